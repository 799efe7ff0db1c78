//! What `deploy/` holds starts as it is written there, and its files agree; what would be published is complete.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Map, Value, json};
use yaml_rust2::{Yaml, YamlLoader};

use crate::support::{Dir, Ran, Running, on_postgres, posthouse, run, unique, variable, wait_for};

/// Where the manifests have the program and its configuration.
const PROGRAM: &str = "/usr/local/bin/posthouse";
const PLACE: &str = "/etc/posthouse";

const TOKEN: &str = "token-of-the-test-0123456789";

/// What ends after the drain, one after the other: the executor for XXL-JOB (11 s), metrics to a collector (2 s), alerts (3 s),
/// brokers that are watched (3 s), actions on many messages (5 s), the HTTP server (1 s).
const AFTER_DRAIN: Duration = Duration::from_secs(25);

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(repository(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn yaml(path: &str) -> Value {
    let documents = YamlLoader::load_from_str(&read(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    assert_eq!(documents.len(), 1, "{path} holds one document");
    plain(&documents[0])
}

/// As JSON, with what `<<` merges in its place.
fn plain(yaml: &Yaml) -> Value {
    match yaml {
        Yaml::String(text) => json!(text),
        Yaml::Integer(n) => json!(n),
        Yaml::Real(text) => json!(text.parse::<f64>().unwrap()),
        Yaml::Boolean(yes) => json!(yes),
        Yaml::Array(items) => items.iter().map(plain).collect(),
        Yaml::Hash(entries) => {
            let mut out = Map::new();
            for (key, value) in entries {
                match (key.as_str().unwrap(), plain(value)) {
                    ("<<", Value::Object(merged)) => merged.into_iter().for_each(|(k, v)| {
                        out.entry(k).or_insert(v);
                    }),
                    (key, value) => {
                        out.insert(key.to_owned(), value);
                    }
                }
            }
            Value::Object(out)
        }
        Yaml::Null => Value::Null,
        other => panic!("not expected in a manifest: {other:?}"),
    }
}

#[track_caller]
fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("not text: {value}")).to_owned()
}

#[track_caller]
fn words(value: &Value) -> Vec<String> {
    value.as_array().unwrap_or_else(|| panic!("not a list: {value}")).iter().map(text).collect()
}

/// The instructions of the last stage of `deploy/Containerfile`.
struct Image(Vec<(String, String)>);

impl Image {
    fn read() -> Self {
        let whole = read("deploy/Containerfile").replace("\\\n", " ");
        let lines = whole.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
        let all: Vec<_> = lines.filter_map(|line| line.split_once(' ')).map(|(a, b)| (a.to_owned(), b.to_owned())).collect();
        let last = all.iter().rposition(|(instruction, _)| instruction == "FROM").unwrap();
        Self(all[last..].to_vec())
    }

    #[track_caller]
    fn get(&self, instruction: &str) -> &str {
        let mut found = self.0.iter().filter(|(name, _)| name == instruction);
        let (_, value) = found.next().unwrap_or_else(|| panic!("no {instruction} in the Containerfile"));
        assert!(found.next().is_none(), "{instruction} twice");
        value
    }

    fn list(&self, instruction: &str) -> Vec<String> {
        serde_json::from_str(self.get(instruction)).unwrap()
    }

    fn health(&self) -> Vec<String> {
        let (_, command) = self.get("HEALTHCHECK").split_once("CMD ").unwrap();
        serde_json::from_str(command).unwrap()
    }

    fn env(&self) -> (String, String) {
        let (name, value) = self.get("ENV").split_once('=').unwrap();
        (name.to_owned(), value.to_owned())
    }
}

/// The `[Service]` of a unit; a setting may be there several times.
fn unit() -> BTreeMap<String, Vec<String>> {
    let mut settings: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let whole = read("deploy/systemd/posthouse.service");
    let (_, service) = whole.split_once("[Service]").unwrap();
    let lines = service.lines().take_while(|line| !line.starts_with('[')).filter(|line| !line.starts_with('#'));
    for (name, value) in lines.filter_map(|line| line.split_once('=')) {
        settings.entry(name.to_owned()).or_default().push(value.to_owned());
    }
    settings
}

/// A command line of a manifest, in its surroundings.
#[derive(Clone)]
struct Launch {
    manifest: &'static str,
    /// Behind the program.
    args: Vec<String>,
    env: BTreeMap<String, String>,
    config: String,
    /// The address that it must serve.
    listen: &'static str,
}

impl Launch {
    fn drain(&self) -> Duration {
        let at = self.args.iter().position(|a| a == "--drain").map(|at| self.args[at + 1].as_str());
        humantime::parse_duration(at.unwrap_or("30s")).unwrap()
    }

    fn verb(&self) -> &str {
        &self.args[0]
    }

    /// To be run in a directory instead of [`PLACE`].
    fn command(&self, dir: &Dir) -> Command {
        let here = |text: &str| text.replace(PLACE, dir.path().to_str().unwrap());
        dir.write("posthouse.toml", &self.config);
        let mut command = posthouse(dir);
        command.args(self.args.iter().map(|a| here(a))).envs(self.env.iter().map(|(name, value)| (name, here(value))));
        command
    }
}

/// The variables of an environment in compose.yaml, with what is substituted from the user's own.
fn substituted(environment: &Value) -> (BTreeMap<String, String>, BTreeSet<String>) {
    let (mut out, mut asked) = (BTreeMap::new(), BTreeSet::new());
    for (name, value) in environment.as_object().unwrap() {
        let mut value = text(value);
        while let Some((before, rest)) = value.split_once("${") {
            let (inner, after) = rest.split_once('}').unwrap();
            let (variable, _) = inner.split_once(":?").unwrap_or_else(|| panic!("{name}: {inner} may be missing unnoticed"));
            asked.insert(variable.to_owned());
            value = format!("{before}{TOKEN}{after}");
        }
        out.insert(name.clone(), value);
    }
    (out, asked)
}

fn kubernetes(kind: &str) -> Value {
    yaml(&format!("deploy/kubernetes/{kind}.yaml"))
}

/// Not among the files that `kubectl apply` takes: applied again, it would empty a secret that was filled in elsewhere.
fn secret_manifest() -> Value {
    yaml("deploy/kubernetes/secret.yaml.example")
}

/// Every command line of the program in the manifests.
fn launches() -> Vec<Launch> {
    let (image, compose, deployment) = (Image::read(), yaml("deploy/compose.yaml"), kubernetes("deployment"));
    let shared = read("deploy/posthouse.toml");
    assert_eq!(image.list("ENTRYPOINT"), [PROGRAM]);
    let (public, loopback) = ("0.0.0.0:8420", "127.0.0.1:8420");
    let secrets: BTreeMap<String, String> =
        secret_manifest()["stringData"].as_object().unwrap().keys().map(|name| (name.clone(), TOKEN.into())).collect();
    let secret = |name: &str| secrets.get(name).map(|value| (name.to_owned(), value.clone()));
    let usual: BTreeMap<String, String> = secrets.clone();

    let mut out = vec![Launch {
        manifest: "Containerfile",
        args: image.list("CMD"),
        env: usual.clone().into_iter().chain([image.env()]).collect(),
        config: shared.clone(),
        listen: loopback,
    }];
    for name in ["migrate", "posthouse"] {
        let service = &compose["services"][name];
        assert_eq!(words(&service["volumes"]), [format!("./posthouse.toml:{PLACE}/posthouse.toml:ro")]);
        out.push(Launch {
            manifest: "compose.yaml",
            args: words(&service["command"]),
            env: substituted(&service["environment"]).0.into_iter().chain([image.env()]).collect(),
            config: shared.clone(),
            listen: public,
        });
    }
    let pod = &deployment["spec"]["template"]["spec"];
    let config = text(&kubernetes("configmap")["data"]["posthouse.toml"]);
    for container in [&pod["initContainers"][0], &pod["containers"][0]] {
        let env = container["env"].as_array().into_iter().flatten().map(|e| (text(&e["name"]), text(&e["value"])));
        assert_eq!(container["envFrom"], json!([{ "secretRef": { "name": secret_manifest()["metadata"]["name"] } }]));
        assert_eq!(container["volumeMounts"][0]["mountPath"], PLACE);
        out.push(Launch {
            manifest: "kubernetes/deployment.yaml",
            args: words(&container["args"]),
            env: secrets.clone().into_iter().chain(env).chain([image.env()]).collect(),
            config: config.clone(),
            // What migrates serves nothing.
            listen: if container["name"] == "migrate" { loopback } else { public },
        });
    }
    let unit = unit();
    let mut start = unit["ExecStart"][0].split(' ').map(str::to_owned);
    assert_eq!(start.next().unwrap(), PROGRAM);
    assert_eq!(unit["EnvironmentFile"], [format!("{PLACE}/posthouse.env")]);
    let names = ["SHOP_DATABASE_URL", "AMQP_URL", "POSTHOUSE_TOKEN", "POSTHOUSE_SESSION_KEY"];
    out.push(Launch {
        manifest: "systemd/posthouse.service",
        args: start.collect(),
        env: names.into_iter().filter_map(secret).collect(),
        config: shared,
        listen: loopback,
    });
    // The addresses in them are never called here.
    for launch in &mut out {
        for (name, url) in [("SHOP_DATABASE_URL", "postgres://u:p@db.example/shop"), ("AMQP_URL", "amqp://u:p@mq.example")] {
            launch.env.entry(name.into()).and_modify(|value| {
                if value == TOKEN {
                    *value = url.into();
                }
            });
        }
    }
    out
}

/// A database and a queue of a test's own, for what the manifests start.
struct World {
    url: String,
    database: String,
    queue: String,
}

impl World {
    fn new() -> Self {
        let (url, database) = (variable("POSTHOUSE_TEST_POSTGRES_URL"), unique("packaging"));
        on_postgres(&url, format!("CREATE DATABASE {database}"));
        Self { url, database, queue: unique("orders") }
    }

    /// The same with real addresses, a port that is free, and a queue that is nobody else's.
    fn real(&self, launch: &Launch) -> Launch {
        let mut url = url::Url::parse(&self.url).unwrap();
        url.set_path(&self.database);
        let mut launch = launch.clone();
        for (name, value) in [("SHOP_DATABASE_URL", url.to_string()), ("AMQP_URL", variable("POSTHOUSE_TEST_RABBITMQ_URL"))] {
            assert!(launch.env.insert(name.into(), value).is_some(), "{} doesn't set {name}", launch.manifest);
        }
        launch.env.insert("POSTHOUSE_LISTEN".into(), "127.0.0.1:0".into());
        launch.config = launch.config.replace("amqp:/orders", &format!("amqp:/{}", self.queue));
        launch
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let (url, sql) = (self.url.clone(), format!("DROP DATABASE {} WITH (FORCE)", self.database));
        // Its name is never used again.
        let _ = std::thread::spawn(move || on_postgres(&url, sql)).join();
    }
}

#[test]
fn every_manifest_starts_as_it_is_written() {
    let (world, image) = (World::new(), Image::read());
    let launches = launches();
    let (migrating, relaying): (Vec<_>, Vec<_>) = launches.iter().partition(|l| l.verb() == "migrate");
    assert_eq!((migrating.len(), relaying.len()), (2, 4), "each manifest is looked at");

    for launch in &launches {
        let dir = Dir::new();
        let mut shown = launch.clone();
        shown.args = vec!["relay".into(), "--print-config".into(), "--json".into()];
        shown.args.extend(launch.args.iter().skip_while(|a| *a != "--config").take(2).cloned());
        let told = run(&mut shown.command(&dir)).code(0).json();
        assert_eq!(told["server"]["listen"], launch.listen, "{}", launch.manifest);
    }
    for launch in migrating {
        let dir = Dir::new();
        assert_eq!(run(&mut world.real(launch).command(&dir)).code(0).stdout, "shop: schema version 5, 64 houses\n");
    }

    let dirs: Vec<Dir> = relaying.iter().map(|_| Dir::new()).collect();
    let started: Vec<(Launch, &Dir, Running)> = relaying
        .iter()
        .zip(&dirs)
        .map(|(launch, dir)| {
            let launch = world.real(launch);
            let running = Running::started(&mut launch.command(dir));
            (launch, dir, running)
        })
        .collect();
    let compose = yaml("deploy/compose.yaml");
    let health = words(&compose["services"]["posthouse"]["healthcheck"]["test"]);
    assert_eq!(health[0], "CMD", "the image has no shell");
    let container = &kubernetes("deployment")["spec"]["template"]["spec"]["containers"][0];
    let path = |probe: &str| text(&container[probe]["httpGet"]["path"]);
    for (launch, dir, running) in &started {
        let what = launch.manifest;
        wait_for(what, || {
            let (status, _) = running.get(&path("readinessProbe"));
            assert_ne!(status, 404, "{what}");
            (status == 200).then_some(())
        });
        assert_eq!(running.get(&path("livenessProbe")), (200, "ok\n".into()), "{what}");
        for check in [&image.health()[..], &health[1..]] {
            assert_eq!(check[0], PROGRAM);
            let mut asked = launch.clone();
            asked.args = check[1..].to_vec();
            // The unit has the file on its command line alone.
            asked.env.extend([image.env(), ("POSTHOUSE_LISTEN".into(), running.address.clone())]);
            run(&mut asked.command(dir)).code(0);
        }
    }

    // What they are for: a message leaves.
    let (launch, dir, _) = &started[0];
    let ask = |args: &[&str]| -> Ran {
        let mut asked = launch.clone();
        asked.args = args.iter().map(|a| (*a).to_owned()).collect();
        run(&mut asked.command(dir)).code(0)
    };
    ask(&["publish", "orders", "{\"order\":7}", "--key", "7", "--id", "m"]);
    wait_for("it is sent", || (ask(&["messages", "show", "m", "--json"]).json()["status"] == "SENT").then_some(()));

    for (_, _, running) in &started {
        running.signal(image.get("STOPSIGNAL").strip_prefix("SIG").unwrap());
    }
    for (launch, _, running) in started {
        let (code, log) = running.ended();
        assert_eq!(code, 0, "{}: {log}", launch.manifest);
    }
}

#[test]
fn manifests_agree() {
    let (image, compose, deployment, unit) = (Image::read(), yaml("deploy/compose.yaml"), kubernetes("deployment"), unit());
    let pod = &deployment["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let ours = &compose["services"]["posthouse"];

    let config = text(&kubernetes("configmap")["data"]["posthouse.toml"]);
    assert_eq!(config, read("deploy/posthouse.toml"), "one configuration");

    // Ports.
    let port = image.get("EXPOSE").parse::<u64>().unwrap();
    assert_eq!(container["ports"], json!([{ "name": "http", "containerPort": port }]));
    let service = kubernetes("service");
    assert_eq!(service["spec"]["ports"], json!([{ "name": "http", "port": port, "targetPort": "http" }]));
    assert_eq!(ours["ports"], json!([format!("127.0.0.1:{port}:{port}")]));
    for launch in launches() {
        assert!(launch.listen.ends_with(&format!(":{port}")));
    }
    for probe in ["livenessProbe", "readinessProbe"] {
        assert_eq!(container[probe]["httpGet"]["port"], "http");
    }

    // Not root, and nothing to become it with.
    let (user, group) = image.get("USER").split_once(':').unwrap();
    let (user, group) = (user.parse::<u64>().unwrap(), group.parse::<u64>().unwrap());
    assert!(user > 0 && group > 0);
    let copies: Vec<&str> = image.0.iter().filter(|(name, _)| name == "COPY").map(|(_, what)| what.as_str()).collect();
    let state = format!("--from=build --chown={user}:{group} /state {}", image.get("WORKDIR"));
    assert!(copies.contains(&state.as_str()), "it may write to its working directory: {copies:?}");
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    assert_eq!(pod["securityContext"]["runAsUser"], user);
    assert_eq!(pod["securityContext"]["runAsGroup"], group);
    assert!(read("deploy/rootfs").contains(&format!("posthouse:x:{user}:{group}:")), "the user has a name");
    for service in ["posthouse", "migrate"].map(|name| &compose["services"][name]) {
        assert!(service["user"].is_null() && service["privileged"].is_null());
        assert_eq!((&service["read_only"], &service["cap_drop"]), (&json!(true), &json!(["ALL"])));
        assert_eq!(service["security_opt"], json!(["no-new-privileges:true"]));
    }
    for container in [&pod["initContainers"][0], container] {
        assert_eq!(
            container["securityContext"],
            json!({ "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": { "drop": ["ALL"] } })
        );
    }
    assert_eq!((&unit["DynamicUser"][..], &unit["NoNewPrivileges"][..]), (&["yes".to_owned()][..], &["yes".to_owned()][..]));

    // Who stops them waits for longer than they drain.
    let grace = |manifest: &str| {
        Duration::from_secs(match manifest {
            "compose.yaml" => text(&ours["stop_grace_period"]).strip_suffix('s').unwrap().parse().unwrap(),
            "systemd/posthouse.service" => unit["TimeoutStopSec"][0].strip_suffix('s').unwrap().parse().unwrap(),
            _ => pod["terminationGracePeriodSeconds"].as_u64().unwrap(),
        })
    };
    for launch in launches().iter().filter(|l| l.verb() == "relay" && l.manifest != "Containerfile") {
        let (grace, drain) = (grace(launch.manifest), launch.drain());
        assert!(grace >= drain + AFTER_DRAIN, "{}: {grace:?} for a drain of {drain:?}", launch.manifest);
    }

    // One version and one name of the image.
    let name = format!("posthouse:{}", env!("CARGO_PKG_VERSION"));
    for image in
        [&ours["image"], &compose["services"]["migrate"]["image"], &container["image"], &pod["initContainers"][0]["image"]]
    {
        assert_eq!(image, &json!(name));
    }
    // It is built with a Rust that the workspace can be built with.
    let containerfile = read("deploy/Containerfile");
    let (_, rust) = containerfile.split_once("ARG RUST_IMAGE=rust:").unwrap();
    let minor = |version: &str| version.split(['.', '-']).nth(1).unwrap().parse::<u32>().unwrap();
    assert!(minor(rust) >= minor(env!("CARGO_PKG_RUST_VERSION")), "{rust}");

    // What belongs together in Kubernetes has the same labels.
    let labels = &deployment["spec"]["template"]["metadata"]["labels"];
    let disruption = kubernetes("poddisruptionbudget");
    for selector in [
        &deployment["spec"]["selector"]["matchLabels"],
        &service["spec"]["selector"],
        &disruption["spec"]["selector"]["matchLabels"],
        &pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ] {
        assert_eq!(selector, labels);
    }
    assert_eq!(
        pod["volumes"],
        json!([{ "name": "config", "configMap": { "name": kubernetes("configmap")["metadata"]["name"] } }])
    );
    assert_eq!(container["volumeMounts"][0]["name"], "config");

    // Services of compose.yaml know each other by the names that they have.
    let (env, asked) = substituted(&ours["environment"]);
    let database = url::Url::parse(&env["SHOP_DATABASE_URL"]).unwrap();
    let postgres = substituted(&compose["services"][database.host_str().unwrap()]["environment"]);
    assert_eq!(database.username(), postgres.0["POSTGRES_USER"]);
    assert_eq!(database.path(), format!("/{}", postgres.0["POSTGRES_DB"]));
    let broker = url::Url::parse(&env["AMQP_URL"]).unwrap();
    let rabbitmq = substituted(&compose["services"][broker.host_str().unwrap()]["environment"]);
    assert_eq!(broker.username(), rabbitmq.0["RABBITMQ_DEFAULT_USER"]);
    assert!(postgres.1.is_subset(&asked) && rabbitmq.1.is_subset(&asked), "passwords on both sides are the same");
    // The manual says how to make what is asked for.
    let manual = read("docs/deployment.md");
    let (_, made) = manual.split_once("for name in ").unwrap();
    let made: BTreeSet<String> = made.split_once(';').unwrap().0.split(' ').map(str::to_owned).collect();
    assert_eq!(made, asked);
    let (_, made) = manual.split_once("posthouse.env <<'END'\n").unwrap();
    let made: BTreeSet<&str> = made.split_once("\nEND").unwrap().0.lines().filter_map(|l| Some(l.split_once('=')?.0)).collect();
    let secret = secret_manifest();
    assert_eq!(made, secret["stringData"].as_object().unwrap().keys().map(String::as_str).collect());
}

#[test]
fn the_secret_starts_nothing_before_it_is_filled_in() {
    let dir = Dir::new();
    let mut launch = launches().into_iter().find(|l| l.manifest.starts_with("kubernetes") && l.verb() == "migrate").unwrap();
    for (name, value) in secret_manifest()["stringData"].as_object().unwrap() {
        launch.env.insert(name.clone(), text(value));
    }
    let ran = run(&mut launch.command(&dir)).code(2);
    for path in ["databases.shop.url", "transports.amqp.url", "server.token", "server.session_key"] {
        assert!(ran.stderr.contains(path), "{path}: {}", ran.stderr);
    }
}

/// Runs a program that must be there: a check that is left out proves nothing.
fn tool(command: &mut Command, hint: &str) -> Ran {
    let out = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}; {hint}"));
    Ran {
        code: out.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&out.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
    }
}

#[test]
fn systemd_takes_the_unit() {
    let dir = Dir::new();
    let unit = read("deploy/systemd/posthouse.service").replace(PROGRAM, env!("CARGO_BIN_EXE_posthouse"));
    let path = dir.write("posthouse.service", &unit);
    let analyze =
        |args: &[&str]| tool(Command::new("systemd-analyze").args(args).arg(&path), "run scripts/services build-tools").code(0);
    // It exits with 0 when it ignores a setting that it doesn't know, and says so.
    let ran = analyze(&["verify", "--man=no"]);
    assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("", ""));
    // Tenths of points: exit code 1 above.
    analyze(&["security", "--offline=true", "--threshold=20", "--no-pager"]);
}

#[test]
fn the_image_holds_all_that_the_program_needs() {
    let (dir, world) = (Dir::new(), World::new());
    let root = dir.path().join("root");
    let made =
        tool(Command::new(repository("deploy/rootfs")).arg(env!("CARGO_BIN_EXE_posthouse")).arg(&root), "on Debian").code(0);
    assert_eq!(made.stderr, "");
    let image = Image::read();
    let mut launch = world.real(&launches()[0]);
    std::fs::write(root.join("etc/posthouse/posthouse.toml"), &launch.config).unwrap();
    // Root may change its root directory, and everybody becomes root in a namespace of their own.
    let root_here = tool(Command::new("id").arg("-u"), "").code(0).stdout.trim() == "0";
    let mut inside = |args: &[&str]| {
        let mut command = Command::new(if root_here { "chroot" } else { "unshare" });
        if root_here {
            command.arg(format!("--userspec={}", image.get("USER")));
        } else {
            command.args(["--map-root-user", "chroot"]);
        }
        launch.args = args.iter().map(|a| (*a).to_owned()).collect();
        command.env_clear().envs(&launch.env).arg(&root).args(image.list("ENTRYPOINT")).args(&launch.args);
        // `chroot` itself is looked for before the change.
        command.env("PATH", std::env::var_os("PATH").unwrap());
        tool(&mut command, "needed to look at what a container holds")
    };
    assert_eq!(inside(&["--version"]).code(0).stdout, concat!("posthouse ", env!("CARGO_PKG_VERSION"), "\n"));
    inside(&["migrate"]).code(0);
    // It makes the transports too, and finds the root certificates for that.
    inside(&["relay", "--check"]).code(0);
}

/// The packages that are published.
const PUBLISHED: [&str; 3] = ["posthouse-macros", "posthouse", "posthouse-server"];

fn cargo(args: &[&str]) -> String {
    tool(Command::new(env!("CARGO")).args(args).current_dir(repository(".")), "").code(0).stdout
}

/// Files below a directory, by their path from there.
fn files(dir: &Path, below: &str, out: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(dir.join(below)).unwrap() {
        let entry = entry.unwrap();
        let path = format!("{below}/{}", entry.file_name().into_string().unwrap());
        if entry.file_type().unwrap().is_dir() {
            files(dir, &path, out);
        } else {
            out.insert(path);
        }
    }
}

#[test]
fn packages_hold_what_they_need_and_nothing_else() {
    for name in PUBLISHED {
        let list = cargo(&["package", "--list", "--allow-dirty", "--offline", "--quiet", "-p", name]);
        let listed: BTreeSet<String> = list.lines().map(|line| line.replace('\\', "/")).collect();
        let dir = repository("crates").join(name);
        let mut wanted: BTreeSet<String> =
            [".cargo_vcs_info.json", "Cargo.lock", "Cargo.toml", "Cargo.toml.orig", "LICENSE-APACHE", "LICENSE-MIT", "README.md"]
                .map(str::to_owned)
                .into();
        for below in ["src", "examples", "assets", "templates"] {
            if dir.join(below).exists() {
                files(&dir, below, &mut wanted);
            }
        }
        // Where git can't be asked about the commit, it isn't in the package.
        wanted.retain(|file| file != ".cargo_vcs_info.json" || listed.contains(file));
        assert_eq!(listed, wanted, "{name}");
        for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
            assert_eq!(std::fs::read_to_string(dir.join(licence)).unwrap(), read(licence), "{name}");
        }
    }
}

#[test]
fn packages_say_what_they_are() {
    let told: Value = serde_json::from_str(&cargo(&["metadata", "--no-deps", "--offline", "--format-version", "1"])).unwrap();
    let packages = told["packages"].as_array().unwrap();
    let published: BTreeSet<&str> =
        packages.iter().filter(|p| p["publish"].is_null()).map(|p| p["name"].as_str().unwrap()).collect();
    assert_eq!(published, BTreeSet::from(PUBLISHED));
    for package in packages.iter().filter(|p| p["publish"].is_null()) {
        let name = text(&package["name"]);
        for key in ["description", "license", "repository", "documentation", "readme", "rust_version"] {
            assert!(package[key].as_str().is_some_and(|v| !v.is_empty()), "{name}: {key}");
        }
        for key in ["keywords", "categories"] {
            let number = words(&package[key]).len();
            assert!((1..=5).contains(&number), "{name}: {number} {key}");
        }
        assert_eq!(package["version"], env!("CARGO_PKG_VERSION"), "{name}");
    }
}
