//! What stands in the Markdown files: blocks, links, headings, command lines. Also read by a test of the program itself, which knows its
//! command line and configuration better.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

/// A Markdown file.
#[derive(Debug)]
pub(crate) struct Page {
    /// Below the repository's root.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// A fenced block.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) page: String,
    /// Of its first fence, from 1.
    pub(crate) line: usize,
    /// What stands behind the fence: `sh`, `toml`.
    pub(crate) info: String,
    /// What a comment right above it says about testing it: `<!-- test: run -->`.
    pub(crate) directive: String,
    /// The text above it, back to the heading or the block before.
    pub(crate) before: String,
    pub(crate) text: String,
}

impl Block {
    pub(crate) fn place(&self) -> String {
        format!("{}:{}", self.page, self.line)
    }
}

/// All pages that people read.
pub(crate) fn pages() -> Vec<Page> {
    let mut files = Vec::new();
    markdown_files(&root(), false, &mut files);
    markdown_files(&root().join("docs"), true, &mut files);
    markdown_files(&root().join("examples"), true, &mut files);
    markdown_files(&root().join("crates"), true, &mut files);
    files.sort();
    let read = |file: PathBuf| Page {
        path: file.strip_prefix(root()).unwrap().to_str().unwrap().replace('\\', "/"),
        text: std::fs::read_to_string(&file).unwrap(),
    };
    files.into_iter().map(read).collect()
}

fn markdown_files(dir: &Path, below: bool, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name());
        if path.is_dir() {
            // What builds and package managers make there isn't ours.
            if below && !["target", "node_modules", "book"].iter().any(|made| name == *made) {
                markdown_files(&path, true, out);
            }
        } else if path.extension().is_some_and(|e| e == "md") {
            out.push(path);
        }
    }
}

/// What a line is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Line {
    Prose,
    /// The fence above a block.
    Open,
    Inside,
    Close,
}

fn lines(text: &str) -> Vec<(usize, &str, Line)> {
    let mut fence: Option<&str> = None;
    let mut out = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        let mark = &trimmed[..trimmed.len() - trimmed.trim_start_matches('`').len()];
        let kind = match fence {
            None if mark.len() >= 3 => {
                fence = Some(mark);
                Line::Open
            }
            None => Line::Prose,
            Some(open) if mark.len() >= open.len() && trimmed.trim_end() == mark => {
                fence = None;
                Line::Close
            }
            Some(_) => Line::Inside,
        };
        out.push((number + 1, line, kind));
    }
    out
}

/// The fenced blocks of a page.
pub(crate) fn blocks(page: &Page) -> Vec<Block> {
    let mut out: Vec<Block> = Vec::new();
    let (mut before, mut directive) = (String::new(), String::new());
    for (line, text, kind) in lines(&page.text) {
        match kind {
            Line::Prose => match text.trim().strip_prefix("<!-- test: ").and_then(|t| t.strip_suffix(" -->")) {
                Some(said) => directive = said.to_owned(),
                None => {
                    if text.starts_with('#') {
                        before.clear();
                    }
                    before.push_str(text);
                    before.push('\n');
                }
            },
            Line::Open => out.push(Block {
                page: page.path.clone(),
                line,
                info: text.trim().trim_start_matches('`').to_owned(),
                directive: std::mem::take(&mut directive),
                before: std::mem::take(&mut before),
                text: String::new(),
            }),
            Line::Inside => out.iter_mut().last().unwrap().text += &format!("{text}\n"),
            Line::Close => {}
        }
    }
    out
}

/// What stands between single backticks, with its line. A span may go over the end of a line.
pub(crate) fn spans(page: &Page) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    let mut paragraph: Vec<(usize, &str)> = Vec::new();
    let mut end = |paragraph: &mut Vec<(usize, &str)>| {
        let Some((first, _)) = paragraph.first().copied() else { return };
        let text = paragraph.iter().map(|(_, text)| *text).collect::<Vec<_>>().join("\n");
        let mut at = first;
        for (place, part) in text.split('`').enumerate() {
            if place % 2 == 1 {
                out.push((at, part.replace('\n', " ")));
            }
            at += part.matches('\n').count();
        }
        paragraph.clear();
    };
    for (number, text, kind) in lines(&page.text) {
        let prose = kind == Line::Prose;
        // A cell of a table, an item of a list, a paragraph: none goes on behind its end.
        if !prose || text.trim().is_empty() || text.starts_with(['|', '#', '-']) {
            end(&mut paragraph);
        }
        if prose && !text.trim().is_empty() {
            paragraph.push((number, text));
        }
    }
    end(&mut paragraph);
    out
}

/// Where links of a page lead, with their lines. What stands in code is none.
pub(crate) fn links(page: &Page) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    for (number, text, kind) in lines(&page.text) {
        if kind != Line::Prose {
            continue;
        }
        let plain: String = text.split('`').step_by(2).collect::<Vec<_>>().join("");
        for part in plain.split("](").skip(1) {
            if let Some((target, _)) = part.split_once(')') {
                out.push((number, target.to_owned()));
            }
        }
    }
    out
}

/// The names by which the headings of a page can be linked to.
pub(crate) fn anchors(page: &Page) -> BTreeSet<String> {
    let mut out = BTreeSet::new();
    for (_, text, kind) in lines(&page.text) {
        if kind != Line::Prose || !text.starts_with('#') {
            continue;
        }
        let heading = text.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        let name: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let mut numbered = name.clone();
        let mut n = 0;
        while !out.insert(numbered.clone()) {
            n += 1;
            numbered = format!("{name}-{n}");
        }
    }
    out
}

/// Command lines of a block for a shell: continued lines joined, comments and prompts left out, `a && b | c` taken apart.
pub(crate) fn commands(text: &str) -> Vec<Vec<String>> {
    let mut out = Vec::new();
    let mut document: Option<String> = None;
    for line in text.replace("\\\n", " ").lines() {
        let line = line.trim();
        // What a command is given to read.
        if let Some(end) = &document {
            if line == end {
                document = None;
            }
            continue;
        }
        document = line.split_once("<<").map(|(_, end)| end.trim_matches(['-', '\'', '"', ' ']).to_owned());
        let mut words = Vec::new();
        let (mut word, mut quote, mut any) = (String::new(), None, false);
        let mut chars = line.strip_prefix("$ ").unwrap_or(line).chars().peekable();
        while let Some(c) = chars.next() {
            match (quote, c) {
                (Some(open), _) if c == open => quote = None,
                (Some('"'), '\\') => word.extend(chars.next()),
                (Some(_), _) => word.push(c),
                (None, '\'' | '"') => (quote, any) = (Some(c), true),
                (None, '\\') => word.extend(chars.next()),
                (None, '#') if word.is_empty() && !any => break,
                (None, '&' | '|' | ';') => {
                    if chars.peek() == Some(&c) {
                        chars.next();
                    }
                    words.extend((any || !word.is_empty()).then(|| std::mem::take(&mut word)));
                    any = false;
                    out.push(std::mem::take(&mut words));
                }
                (None, _) if c.is_whitespace() => {
                    words.extend((any || !word.is_empty()).then(|| std::mem::take(&mut word)));
                    any = false;
                }
                (None, _) => word.push(c),
            }
        }
        words.extend((any || !word.is_empty()).then_some(word));
        out.push(words);
    }
    // Variables that are set for one command, and where its output goes, are no part of it.
    for words in &mut out {
        // `NAME=$(command …)` runs the command.
        let inner = words.first().and_then(|first| first.split_once("=$(")).map(|(_, command)| command.to_owned());
        if let Some(command) = inner {
            words[0] = command;
        }
        let set = |word: &String| {
            word.split_once('=').is_some_and(|(name, _)| {
                !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
            })
        };
        let variables = words.iter().take_while(|word| set(word)).count();
        words.drain(..variables);
        if let Some(at) = words.iter().position(|word| word.starts_with(['<', '>'])) {
            words.truncate(at);
        }
    }
    out.retain(|words| !words.is_empty());
    out
}

/// The lines of a block that run `posthouse`, whatever kind of block it is.
pub(crate) fn posthouse_lines(block: &Block) -> Vec<Vec<String>> {
    let of = |words: &Vec<String>| words.first().is_some_and(|first| first == "posthouse");
    match block.info.as_str() {
        "sh" => {
            let mut all = commands(&block.text);
            for words in &mut all {
                // The program in its other dresses.
                let through_cargo = words.first().is_some_and(|w| w == "cargo") && words.iter().any(|w| w == "posthouse-server");
                if let Some(at) = words.iter().position(|w| w == "--").filter(|_| through_cargo) {
                    words.drain(..at);
                    words[0] = "posthouse".into();
                }
                let within = words.first().is_some_and(|w| ["docker", "podman", "run"].contains(&w.as_str()));
                let program = |w: &String| w == "posthouse" || w.ends_with("/bin/posthouse");
                if let Some(at) = words.iter().rposition(program).filter(|at| within && at + 1 < words.len()) {
                    words.drain(..at);
                    words[0] = "posthouse".into();
                }
            }
            all.retain(of);
            all
        }
        "text" => {
            let shown = |line: &&str| line.starts_with("posthouse ") || line.starts_with("$ posthouse ");
            commands(&block.text.lines().filter(shown).collect::<Vec<_>>().join("\n"))
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(text: &str) -> Page {
        Page { path: "x.md".into(), text: text.into() }
    }

    #[test]
    fn blocks_are_found_with_what_is_said_about_them() {
        let page = page(
            "# A\n\nRun in PostgreSQL:\n\n<!-- test: run -->\n```sh\na\n```\n\n````text\n```\n````\nend `b c` [l](m.md#n) `[x](y)`\n",
        );
        let found = blocks(&page);
        assert_eq!(found.len(), 2);
        assert_eq!(
            (found[0].line, found[0].info.as_str(), found[0].directive.as_str(), found[0].text.as_str()),
            (6, "sh", "run", "a\n")
        );
        assert!(found[0].before.contains("PostgreSQL"));
        assert_eq!((found[1].info.as_str(), found[1].directive.as_str()), ("text", ""));
        assert_eq!(spans(&page)[0].1, "b c");
        assert_eq!(links(&page), [(13, "m.md#n".to_owned())]);
    }

    #[test]
    fn headings_become_anchors() {
        let found = anchors(&page("# `[databases.NAME]`\n## A & B: c\n## A & B: c\n```sh\n# no\n```\n"));
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["a--b-c", "a--b-c-1", "databasesname"]);
    }

    #[test]
    fn lines_that_call_the_program_are_found_in_shells_and_sessions() {
        let of = |text: &str| posthouse_lines(&blocks(&page(text))[0]);
        let doctor = [vec!["posthouse".to_owned(), "doctor".to_owned()]];
        assert_eq!(of("```sh\ncd x && posthouse doctor\n```\n"), doctor);
        assert_eq!(of("```text\n$ posthouse doctor\nposthouses are old\n```\n"), doctor);
        assert_eq!(of("```sh\ndocker compose exec posthouse posthouse doctor\n```\n"), doctor);
        assert_eq!(of("```sh\ncargo run -p posthouse-server --no-default-features -- doctor\n```\n"), doctor);
    }

    #[test]
    fn command_lines_are_taken_apart() {
        assert!(commands("cat > x <<'END'\nposthouse no\nEND\n").len() == 1);
        let found = commands("X=1 posthouse a 'b c' \\\n  --d \"e f\" # g\n\n# h\n$ posthouse i && j | k > l\n");
        let words = |all: &[&str]| all.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            found,
            [words(&["posthouse", "a", "b c", "--d", "e f"]), words(&["posthouse", "i"]), words(&["j"]), words(&["k"])]
        );
    }
}
