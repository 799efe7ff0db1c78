//! Each block is of a kind that is tried somewhere, and this says where.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use super::markdown::{Block, blocks, commands, pages, root};
use super::sql;

/// Programs of others that pages may call. What they do is tried where a page is run (`pages.rs`).
const TOOLS: &str = "alias apt-get bash cat cd chmod chown cp curl docker echo eval export git go grep helm install java javac jq kill \
                     kubectl mdbook mkdir mv mvn mysql mysqldump node npm npx openssl pg_basebackup pg_dump pg_restore pip podman \
                     psql python python3 rm sleep source sqlite3 sudo systemctl systemd-analyze systemd-run tar useradd zstd";

/// Words of the shell itself.
const WORDS: &str = "case do done else esac fi for if then until while { } [ [[";

#[test]
fn every_block_is_tried() {
    let mut wrong = Vec::new();
    for page in pages() {
        for (number, line) in page.text.lines().enumerate() {
            if line.starts_with("    $ ") || line.starts_with("    posthouse ") {
                wrong.push(format!("{}:{}: write a fenced block, which can be tried", page.path, number + 1));
            }
        }
        for block in blocks(&page) {
            if let Err(why) = tried(&block) {
                wrong.push(format!("{}: {why}", block.place()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn tried(block: &Block) -> Result<(), String> {
    match block.info.as_str() {
        "sh" => shell(block),
        // Read by `src/book.rs`: the file itself, and lines that call the program.
        "toml" | "text" => Ok(()),
        "sql" if sql::databases(block).is_empty() => Err("names no database".into()),
        // Run by `sql.rs`, or with its page.
        "sql" => Ok(()),
        "json" => {
            let all = serde_json::Deserializer::from_str(&block.text).into_iter::<serde_json::Value>();
            all.collect::<Result<Vec<_>, _>>().map(drop).map_err(|e| e.to_string())
        }
        "mermaid" => {
            let known = ["stateDiagram-v2", "sequenceDiagram", "flowchart", "graph"];
            let first = block.text.split_whitespace().next().unwrap_or_default();
            if known.contains(&first) { Ok(()) } else { Err(format!("{first:?} is no diagram")) }
        }
        // Run with its page.
        _ if block.directive.starts_with("file ") => Ok(()),
        // A test of the documentation compiles it.
        "rust" | "rust,no_run" if block.page.starts_with("crates/") => {
            let library = root().join(&block.page).with_file_name("src/lib.rs");
            let included = std::fs::read_to_string(&library).is_ok_and(|text| text.contains("include_str!(\"../README.md\")"));
            if included { Ok(()) } else { Err(format!("{} doesn't include this page", library.display())) }
        }
        "rust" | "python" | "java" | "js" | "javascript" | "typescript" | "go" | "yaml" | "ini" | "dockerfile" => excerpt(block),
        "" => Err("say what kind of block it is behind its fence; \"text\" if it is none".into()),
        other => Err(format!("nothing tries blocks of the kind {other:?}")),
    }
}

/// What can be said of a command line without running it.
fn shell(block: &Block) -> Result<(), String> {
    let parsed = Command::new("bash").args(["-n", "-c", &block.text]).stderr(Stdio::piped()).output().unwrap();
    if !parsed.status.success() {
        return Err(String::from_utf8_lossy(&parsed.stderr).into_owned());
    }
    let alias = |name: &str| block.text.contains(&format!("alias {name}="));
    let mut all = commands(&block.text).into_iter().filter(|words| !alias(&words[0]));
    all.try_for_each(|words| program(&words).map_err(|why| format!("{}: {why}", words.join(" "))))
}

fn program(words: &[String]) -> Result<(), String> {
    let made = ["target/debug/", "target/release/", ".venv/bin/"].iter().find_map(|dir| words[0].strip_prefix(dir));
    let first = made.unwrap_or(&words[0]);
    let has = |text: &str, name: &str| text.lines().any(|line| line.contains(name));
    match first {
        // Read by `src/book.rs`.
        "posthouse" => Ok(()),
        "cargo" => cargo(words),
        "posthouse-bench" => bench(&words[1..]),
        name if name.starts_with("scripts/") || name.starts_with("./") => {
            let text = std::fs::read_to_string(root().join(name)).map_err(|e| e.to_string())?;
            match words.get(1) {
                Some(word) if !has(&text, word.trim_start_matches('-')) => Err(format!("{name} knows no {word}")),
                _ => Ok(()),
            }
        }
        name if TOOLS.split_whitespace().chain(WORDS.split_whitespace()).any(|known| known == name) => Ok(()),
        // `if`, `$(…)` and assignments alone; bash has read them.
        name if name.contains(['$', '=', '(', ')']) => Ok(()),
        name => Err(format!("the program {name:?} is not known here")),
    }
}

/// Packages, features, programs and examples exist.
fn cargo(words: &[String]) -> Result<(), String> {
    let own = words.iter().position(|word| word == "--").unwrap_or(words.len());
    let (options, rest) = words.split_at(own);
    let after =
        |names: &[&str]| options.iter().position(|word| names.contains(&word.as_str())).and_then(|at| options.get(at + 1));
    let package = after(&["-p", "--package"]);
    let dir = match (package, after(&["--path"])) {
        (Some(name), _) => ["crates", "examples"].iter().map(|dir| root().join(dir).join(name)).find(|dir| dir.exists()),
        (None, Some(path)) => Some(root().join(path)),
        (None, None) => return Ok(()),
    };
    let Some(dir) = dir.filter(|dir| dir.join("Cargo.toml").exists()) else { return Err(format!("no package {package:?}")) };
    let manifest: toml::Table = std::fs::read_to_string(dir.join("Cargo.toml")).unwrap().parse().unwrap();
    for feature in after(&["--features"]).map(|list| list.split(',')).into_iter().flatten() {
        manifest.get("features").and_then(|f| f.get(feature)).ok_or_else(|| format!("no feature {feature:?}"))?;
    }
    if let Some(example) = after(&["--example"]) {
        exists(&dir.join("examples").join(format!("{example}.rs")))?;
    }
    if let Some(bin) = after(&["--bin"]) {
        exists(&dir.join("src/bin").join(format!("{bin}.rs")))?;
    }
    match package.map(String::as_str) {
        Some("posthouse-bench") if !rest.is_empty() => bench(&rest[1..]),
        _ => Ok(()),
    }
}

fn exists(path: &Path) -> Result<(), String> {
    if path.exists() { Ok(()) } else { Err(format!("{} is not there", path.display())) }
}

/// Its commands and options are named in its sources.
fn bench(words: &[String]) -> Result<(), String> {
    let mut sources = Vec::new();
    code_below(&root().join("crates/posthouse-bench/src"), &mut sources);
    let sources: String = sources.into_iter().map(|(_, text)| text.to_lowercase()).collect();
    for word in words.iter().filter(|word| word.starts_with("--")).chain(words.first()) {
        let name = word.trim_start_matches('-').split('=').next().unwrap_or_default();
        if name != "help" && !sources.contains(name) && !sources.contains(&name.replace('-', "_")) {
            return Err(format!("posthouse-bench knows no {word:?}"));
        }
    }
    Ok(())
}

/// Text without space and comments. Comments are for the reader of each; those of Rust's kind can be told from addresses.
fn squeezed(text: &str) -> String {
    let code = text.lines().map(|line| line.split_once("// ").map_or(line, |(code, _)| code));
    code.flat_map(str::split_whitespace).collect()
}

/// A file of code, by its extension.
type Code = (String, String);

/// The code of this repository that is compiled, run or checked by tests, squeezed; read once.
static CODE: LazyLock<Vec<Code>> = LazyLock::new(|| {
    let mut out = Vec::new();
    for dir in ["crates", "examples", "deploy"] {
        code_below(&root().join(dir), &mut out);
    }
    out
});

fn code_below(dir: &Path, out: &mut Vec<Code>) {
    for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            if !["target", "node_modules"].iter().any(|made| entry.file_name() == *made) {
                code_below(&path, out);
            }
            continue;
        }
        let kind = match path.extension().and_then(|e| e.to_str()) {
            Some("mjs" | "ts") => "js",
            Some("yml") => "yaml",
            Some("service" | "conf") => "ini",
            Some(known @ ("rs" | "py" | "java" | "js" | "go" | "yaml" | "ini")) => known,
            _ if entry.file_name() == "Containerfile" => "dockerfile",
            _ => continue,
        };
        // What is no text is no code.
        out.extend(std::fs::read_to_string(&path).ok().map(|text| (kind.to_owned(), squeezed(&text))));
    }
}

/// A piece of code stands in such a file: the same but for space and comments and, at a line `// …`, what is left out.
fn excerpt(block: &Block) -> Result<(), String> {
    let lines: Vec<&str> = block.text.lines().collect();
    let pieces = lines.split(|line| matches!(line.trim(), "// …" | "# …" | "…")).map(|lines| squeezed(&lines.join("\n")));
    let pieces: Vec<String> = pieces.filter(|piece| !piece.is_empty()).collect();
    let kind = match block.info.as_str() {
        "rust" => "rs",
        "python" => "py",
        "javascript" | "typescript" => "js",
        other => other,
    };
    let has = |text: &str| {
        let mut from = 0;
        pieces.iter().all(|piece| text[from..].find(piece.as_str()).inspect(|at| from += at + piece.len()).is_some())
    };
    if CODE.iter().any(|(of, text)| of == kind && has(text)) {
        return Ok(());
    }
    Err("is in no file that is compiled or run by tests, not like this".into())
}
