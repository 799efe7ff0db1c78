//! Links, the table of contents, and names of tests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use super::markdown::{anchors, links, pages, root, spans};

/// A path without `..` in it.
fn plain(path: &Path) -> String {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                out.pop();
            }
            other => out.push(other),
        }
    }
    out.to_str().unwrap().replace('\\', "/")
}

#[test]
fn every_link_leads_somewhere() {
    let pages = pages();
    let known: BTreeMap<&str, BTreeSet<String>> = pages.iter().map(|page| (page.path.as_str(), anchors(page))).collect();
    let mut wrong = Vec::new();
    for page in &pages {
        for (line, target) in links(page) {
            if ["http://", "https://", "mailto:"].iter().any(|scheme| target.starts_with(scheme)) {
                continue;
            }
            let (file, anchor) = target.split_once('#').map_or((target.as_str(), None), |(file, anchor)| (file, Some(anchor)));
            let path = match file {
                "" => page.path.clone(),
                file => plain(&Path::new(&page.path).parent().unwrap().join(file)),
            };
            if !root().join(&path).exists() {
                wrong.push(format!("{}:{line}: {target}: there is no such file", page.path));
            } else if let (Some(anchor), Some(all)) = (anchor, known.get(path.as_str()))
                && !all.contains(anchor)
            {
                wrong.push(format!("{}:{line}: {target}: no such heading; there are {all:?}", page.path));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_table_of_contents_names_every_page() {
    let pages = pages();
    let summary = pages.iter().find(|page| page.path == "docs/SUMMARY.md").expect("docs/SUMMARY.md");
    let named: Vec<String> = links(summary).into_iter().map(|(_, target)| plain(&Path::new("docs").join(target))).collect();
    let missing: Vec<&str> = pages
        .iter()
        .map(|page| page.path.as_str())
        .filter(|path| path.starts_with("docs/") && *path != "docs/SUMMARY.md" && !named.iter().any(|name| name == path))
        .collect();
    assert!(missing.is_empty(), "docs/SUMMARY.md doesn't name {missing:?}");
    let once: BTreeSet<&String> = named.iter().collect();
    assert_eq!(once.len(), named.len(), "a page stands there twice");
}

/// Where a table has a column "shown by", its rows name tests that exist.
#[test]
fn what_is_said_to_be_shown_by_a_test_is() {
    let mut sources = String::new();
    for dir in ["crates", "examples"] {
        read(&root().join(dir), &mut sources);
    }
    let mut rows = 0;
    for page in pages() {
        let mut inside = false;
        for line in page.text.lines() {
            let cells: Vec<&str> = line.trim().trim_matches('|').split('|').collect();
            let last = cells.last().map_or("", |cell| cell.trim());
            inside = line.starts_with('|') && (inside || last == "shown by");
            if !inside || last == "shown by" || last.starts_with("---") {
                continue;
            }
            rows += 1;
            let cell = super::markdown::Page { path: page.path.clone(), text: last.to_owned() };
            let tests = spans(&cell);
            assert!(!tests.is_empty(), "{}: nothing shows: {line}", page.path);
            for (_, test) in tests {
                let name = test.rsplit("::").next().unwrap();
                let there = sources.contains(&format!("fn {name}(")) || sources.contains(&format!("fn {name}<"));
                assert!(there, "{}: there is no test {test:?}", page.path);
            }
        }
    }
    assert!(rows >= 10, "only {rows} rows name what shows them");
}

fn read(dir: &Path, out: &mut String) {
    for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            if !["target", "node_modules"].iter().any(|made| entry.file_name() == *made) {
                read(&path, out);
            }
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}
