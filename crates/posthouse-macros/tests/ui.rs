//! What people read who use `#[posthouse::transactional]` wrongly.
//!
//! Each file in `ui/` is compiled with the compiler and the library of this test run. Where a comment says `//~ text`, an error
//! with that text must stand on that line, and no error may say anything else. A file without such comments must compile. The
//! compiler's own words around our texts, and how often it repeats one, are not compared: they differ from version to version.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An error and the line on which it stands.
#[derive(Debug, PartialEq)]
struct Complaint {
    line: u64,
    message: String,
}

/// The builds of the library beside this test: one for each set of features and profile that was ever built there.
fn libraries(deps: &Path) -> Vec<PathBuf> {
    let mut found: Vec<_> = std::fs::read_dir(deps)
        .expect("the directory of the test program")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("libposthouse-") && name.ends_with(".rlib")
        })
        .collect();
    // The one that belongs to this test was made or found fresh last.
    found.sort_by_key(|path| std::cmp::Reverse(path.metadata().and_then(|m| m.modified()).ok()));
    found
}

fn compile(case: &Path, library: &Path, deps: &Path) -> Result<(), Vec<Complaint>> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let out = std::env::temp_dir().join(format!("posthouse-ui-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    std::fs::create_dir(&out).expect("a directory for the output");
    let output = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--edition=2024", "--crate-type=lib", "--emit=metadata", "--error-format=json", "--extern"])
        .arg(format!("posthouse={}", library.display()))
        .arg("-L")
        .arg(format!("dependency={}", deps.display()))
        .arg("--out-dir")
        .arg(&out)
        .arg(case)
        .output()
        .expect("rustc runs");
    std::fs::remove_dir_all(&out).expect("the output is removed");
    if output.status.success() {
        return Ok(());
    }
    let mut complaints = Vec::new();
    for line in String::from_utf8_lossy(&output.stderr).lines() {
        let Ok(said) = serde_json::from_str::<serde_json::Value>(line) else { continue };
        let spans = said["spans"].as_array().map(Vec::as_slice).unwrap_or_default();
        // "aborting due to …" has none.
        if said["level"] == "error" && (!spans.is_empty() || said["code"].is_object()) {
            let line = spans.iter().find(|s| s["is_primary"] == true).and_then(|s| s["line_start"].as_u64()).unwrap_or(0);
            complaints.push(Complaint { line, message: said["message"].as_str().unwrap_or_default().to_owned() });
        }
    }
    complaints.sort_by_key(|c| c.line);
    Err(complaints)
}

/// The files in `ui/`.
fn cases() -> Vec<PathBuf> {
    let mut cases: Vec<_> = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ui"))
        .expect("the cases")
        .map(|entry| entry.expect("a case").path())
        .collect();
    cases.sort();
    cases
}

#[test]
fn each_mistake_is_explained_in_our_words() {
    let program = std::env::current_exe().expect("the test program");
    let deps = program.parent().expect("its directory");
    let (wrong, right): (Vec<_>, Vec<_>) =
        cases().into_iter().partition(|case| std::fs::read_to_string(case).expect("a case").contains("//~ "));
    assert!(!right.is_empty() && !wrong.is_empty());

    // What must compile shows which build of the library is usable.
    let mut problems = Vec::new();
    let library = libraries(deps).into_iter().find(|library| {
        right.iter().all(|case| match compile(case, library, deps) {
            Ok(()) => true,
            Err(complaints) => {
                problems.push(format!("{} with {}: {complaints:#?}", case.display(), library.display()));
                false
            }
        })
    });
    let library = library.unwrap_or_else(|| panic!("what is right doesn't compile:\n{}", problems.join("\n")));

    let mut problems = Vec::new();
    for case in wrong {
        let source = std::fs::read_to_string(&case).expect("a case");
        let expected: Vec<_> = (1..)
            .zip(source.lines())
            .filter_map(|(line, text)| Some(Complaint { line, message: text.split_once("//~ ")?.1.to_owned() }))
            .collect();
        let found = compile(&case, &library, deps).err().unwrap_or_default();
        let same = expected.iter().all(|e| found.iter().any(|f| f.line == e.line && f.message.contains(&e.message)))
            && found.iter().all(|f| expected.iter().any(|e| f.message.contains(&e.message)));
        if !same {
            problems.push(format!("{}\nexpected: {expected:#?}\nfound: {found:#?}", case.display()));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n\n"));
}
