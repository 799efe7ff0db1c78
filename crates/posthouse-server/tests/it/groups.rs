//! Groups: in the configuration file, in a running relay, and from the command line.

use serde_json::{Value, json};

use crate::config::{one, print, problems};
use crate::support::{Dir, Receiver, Running, Schema, ph, posthouse, wait_for};

const DATABASE: &str = "[databases.a]\nurl = \"postgres://u@localhost/db\"\nhouses = 8\n";

#[test]
fn everything_wrong_with_groups_is_told_at_once() {
    let found = problems(&format!(
        r#"{DATABASE}
        [databases.b]
        url = "postgres://u@localhost/other"
        [[groups]]
        name = "orders"
        databases = ["a"]
        houses = "0-3"
        trigger = {{ cron = "0 */5 * * *", tz = "Asia/Shanghai" }}
        limit = 0
        then = "repots"
        [[groups]]
        name = "reports"
        databases = ["a"]
        houses = "3-9"
        trigger = {{ cron = "0 0 4 * * *", tz = "Asia/Shangai" }}
        [[groups]]
        name = "elsewhere"
        databases = ["c"]
        tables = ["other_"]
        [[groups]]
        name = "orders"
        databases = ["b"]
        tables = ["posthuose_"]
        trigger = {{ rate = "10ms" }}
        budget = "1ms"
        "#
    ));
    let told: Vec<String> = found.iter().map(|(path, text)| format!("{path}: {text}")).collect();
    for expected in [
        "groups.orders.trigger.cron: \"\\\"0 */5 * * *\\\"\" | ",
        "has 5 fields, must have six: second, minute, hour",
        "groups.orders.limit: \"0\" | \"must be at least 1\"",
        "groups.orders.then: \"\\\"repots\\\"\" | ",
        "did you mean \\\"reports\\\"?",
        "groups.reports.houses: \"\\\"3-9\\\"\" | \"3 also belong to group",
        "database \\\"a\\\" has the houses 0 to 7",
        "groups.reports.trigger.tz: \"\\\"Asia/Shangai\\\"\" | ",
        "did you mean \\\"Asia/Shanghai\\\"?",
        "groups.elsewhere.databases: ",
        "there is no database \\\"c\\\"",
        "groups[3].name: \"\\\"orders\\\"\" | \"two groups have this name",
        "no database of this group has tables with the prefix \\\"posthuose_\\\"",
        "did you mean \\\"posthouse_\\\"?",
        "groups[3].trigger.rate: \"\\\"10ms\\\"\" | \"must be 100ms to 366 days\"",
        "groups[3].budget: \"\\\"1ms\\\"\" | \"must be at least 100ms\"",
    ] {
        assert!(told.iter().any(|line| line.contains(expected)), "{expected}\n{}", told.join("\n"));
    }
}

#[test]
fn one_wrong_thing_is_told_once() {
    let group = |rest: &str| format!("[[groups]]\nname = \"g\"\n{rest}");
    for (text, path, words) in [
        (
            group("trigger = \"manuel\""),
            "groups.g.trigger",
            &["must be one of continuous, manual, external", "did you mean \\\"manual\\\"?"][..],
        ),
        (group("trigger = 5"), "groups.g.trigger", &["is a whole number", "or a table with every, rate, cron, tz"]),
        (group("trigger = {}"), "groups.g.trigger", &["has none of every, rate and cron", "{ every = "]),
        (group("trigger = { every = \"5s\", cron = \"0 0 0 * * *\" }"), "groups.g.trigger", &["has every and cron"]),
        (group("trigger = { every = \"5s\", tz = \"UTC\" }"), "groups.g.trigger.tz", &["has no effect without cron"]),
        (group("trigger = { evry = \"5s\" }"), "groups.g.trigger.evry", &["did you mean \\\"every\\\"?"]),
        (group("trigger = { every = \"soon\" }"), "groups.g.trigger.every", &["is no length of time"]),
        (group("house = \"1\""), "groups.g.house", &["did you mean \\\"houses\\\"?"]),
        (group("houses = \"0-3,2\""), "groups.g.houses", &["names a house twice"]),
        (group("when_busy = \"wait\""), "groups.g.when_busy", &["must be one of serial, discard, cover"]),
        (group("misfire = \"one\""), "groups.g.misfire", &["did you mean \\\"once\\\"?"]),
        (group("limit = 5"), "groups.g.limit", &["is for runs, and a continuous group has none"]),
        ("[[groups]]\n[[groups]]\nname = \"h\"\nhouses = \"1\"".into(), "groups[0].name", &["is missing"]),
        ("[groups]\nname = \"g\"".into(), "groups", &["is a table, must be tables", "write [[groups]]"]),
        (group("databases = [\"elsewhere\"]"), "groups.g.databases", &["there is no database \\\"elsewhere\\\"", "there are a"]),
    ] {
        one(&text, path, words);
    }
}

#[test]
fn the_printed_configuration_has_the_groups_and_is_valid() {
    let text = format!(
        "{DATABASE}[[groups]]\nname = \"orders\"\nhouses = \"0-3\"\n[[groups]]\nname = \"reports\"\nhouses = \"4-7\"\n\
         trigger = {{ cron = \"0 0 4 * * *\", tz = \"Asia/Shanghai\" }}\nbudget = \"5m\"\nmisfire = \"once\"\n"
    );
    let printed = print(&text).code(0).stdout;
    assert!(printed.contains("[[groups]]") && printed.contains("tz = \"Asia/Shanghai\""), "{printed}");
    assert_eq!(print(&printed).code(0).stdout, printed);
}

struct World {
    dir: Dir,
    // Dropped with the test.
    _schema: Schema,
    receiver: Receiver,
}

fn world(groups: &str) -> World {
    let (dir, schema, receiver) = (Dir::new(), Schema::new(), Receiver::start());
    let to = receiver.address;
    dir.write(
        "posthouse.toml",
        &schema.config(&format!(
            "[transports.http]\nallow = [\"127.0.0.1\"]\n[routes.orders]\nto = \"http://{to}/\"\n[relay]\nidle_poll = \"50ms\"\n\
             [server]\nlisten = \"127.0.0.1:0\"\n{groups}"
        )),
    );
    ph(&dir, &["migrate"]).code(0);
    World { dir, _schema: schema, receiver }
}

impl World {
    fn publish(&self, n: usize) {
        for i in 0..n {
            ph(&self.dir, &["publish", "orders", &i.to_string()]).code(0);
        }
    }

    fn json(&self, code: i32, args: &[&str]) -> Value {
        ph(&self.dir, &[args, &["--json"]].concat()).code(code).json()
    }
}

#[test]
fn groups_are_run_paused_and_looked_at() {
    let w = world(
        "[[groups]]\nname = \"now\"\nhouses = \"0-1\"\ntrigger = \"manual\"\n\
         [[groups]]\nname = \"nightly\"\nhouses = \"2\"\ntrigger = { cron = \"0 0 4 * * *\", tz = \"Asia/Shanghai\" }\n\
         [[groups]]\nname = \"always\"\nhouses = \"3\"\n",
    );
    let check = ph(&w.dir, &["relay", "--check"]).code(0).stdout;
    assert!(check.contains("NEXT DUE") && check.matches(" 04:00:00 +08:00").count() == 3, "{check}");
    let check = w.json(0, &["relay", "--check"]);
    assert_eq!(check["groups"][0]["houses"], "0-1");
    assert_eq!(check["groups"][1]["next_due_us"].as_array().unwrap().len(), 3, "{check}");

    // Nobody is there.
    let refused = ph(&w.dir, &["groups", "run", "now", "--within", "1s"]).code(1);
    assert!(refused.stderr.contains("no live instance with a group \"now\" took the request within 1 s"), "{}", refused.stderr);
    assert_eq!(w.json(0, &["runs", "list"])["runs"][0]["status"], "DISCARDED", "it doesn't take place later");

    w.publish(12);
    let relay = Running::start(&mut posthouse(&w.dir));
    relay.wait_ready();
    let told = w.json(0, &["groups", "run", "now"]);
    let main = &told["databases"][0];
    let sent = main["delivered"].as_i64().unwrap();
    assert_eq!((&main["status"], main["runs"].as_array().unwrap().len()), (&json!("DONE"), 1), "{told}");
    assert!(sent > 0 && sent < 12 && main["messages"] == sent && main["failed"] == 0, "{told}");
    let ran = ph(&w.dir, &["groups", "run", "now"]).code(0);
    let told =
        (ran.stdout.starts_with("main: now DONE in "), ran.stdout.ends_with(" on 1 instance: 0 sent, 0 to retry, 0 failed\n"));
    assert_eq!(told, (true, true), "{}", ran.stdout);
    let asked = ph(&w.dir, &["groups", "run", "nightly", "--no-wait"]).code(0);
    assert!(asked.stdout.starts_with("main: asked for a run of nightly (request "), "{}", asked.stdout);
    wait_for("everything to be sent", || (w.receiver.seen().len() == 12).then_some(()));

    let runs = wait_for("the runs to be recorded", || {
        let runs = w.json(0, &["runs", "list", "--group", "nightly"]);
        runs["runs"].as_array().unwrap().iter().all(|r| r["status"] == "DONE").then_some(runs)
    });
    assert_eq!(runs["runs"].as_array().unwrap().len(), 2, "{runs}");
    let page = w.json(0, &["runs", "list", "--limit", "2"]);
    let last = page["next_before"].as_i64().unwrap();
    assert_eq!(page["runs"][1]["id"], last);
    let next = w.json(0, &["runs", "list", "--before", &last.to_string()]);
    assert!(next["runs"][0]["id"].as_i64().unwrap() < last);
    let text = ph(&w.dir, &["runs", "list"]).code(0).stdout;
    assert!(text.starts_with("ID") && text.contains("manual") && text.contains("(all)") && text.contains("DISCARDED"), "{text}");

    let list = w.json(0, &["groups", "list"]);
    let group = |name: &str| list["groups"].as_array().unwrap().iter().find(|g| g["name"] == name).cloned().unwrap();
    assert_eq!((&group("now")["last"]["status"], &group("now")["running"]), (&json!("DONE"), &json!(0)), "{list}");
    assert!(group("nightly")["next_due_us"].is_i64() && group("always")["next_due_us"].is_null(), "{list}");
    let text = ph(&w.dir, &["groups", "list"]).code(0).stdout;
    assert!(text.contains("0 0 4 * * * (Asia/Shanghai)") && text.contains("DONE"), "{text}");

    // A continuous group waits while it is paused.
    assert_eq!(ph(&w.dir, &["groups", "pause", "always"]).code(0).stdout, "main: always is paused\n");
    assert_eq!(ph(&w.dir, &["groups", "pause", "always"]).code(0).stdout, "main: always was paused already\n");
    let paused = |value: &str| {
        let line = format!("posthouse_group_paused{{database=\"main\",group=\"always\"}} {value}");
        wait_for("the pause in the metrics", || relay.get("/metrics").1.contains(&line).then_some(()));
    };
    paused("1");
    assert!(ph(&w.dir, &["groups", "list"]).code(0).stdout.contains("paused "));
    w.publish(8);
    let before = w.json(0, &["groups", "run", "now"])["databases"][0]["delivered"].as_i64().unwrap() as usize;
    assert_eq!(w.receiver.seen().len(), 12 + before, "the other houses wait");
    assert_eq!(w.json(0, &["groups", "resume", "always"])["databases"][0]["changed"], true);
    ph(&w.dir, &["groups", "run", "nightly"]).code(0);
    wait_for("everything to be sent", || (w.receiver.seen().len() == 20).then_some(()));
    paused("0");
    let metrics = relay.get("/metrics").1;
    for line in [
        "posthouse_group_runs_total{database=\"main\",group=\"now\",status=\"DONE\"} 3",
        "posthouse_group_running{database=\"main\",group=\"nightly\"} 0",
        "posthouse_group_last_run_seconds{database=\"main\",group=\"nightly\"} ",
    ] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }

    // A run that is stopped is not what was asked for.
    w.receiver.open(false);
    w.publish(8);
    let mut waiting = posthouse(&w.dir);
    waiting.args(["groups", "run", "now", "--json"]).stdout(std::process::Stdio::piped());
    let waiting = waiting.spawn().unwrap();
    wait_for("a run to go", || (w.json(0, &["groups", "list"])["groups"][0]["running"] == 1).then_some(()));
    assert!(ph(&w.dir, &["groups", "stop", "now"]).code(0).stdout.contains("are told to stop"));
    wait_for("the stop to be seen", || relay.log().contains("told to stop").then_some(()));
    w.receiver.open(true);
    let out = waiting.wait_with_output().unwrap();
    let told: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((out.status.code(), &told["databases"][0]["status"]), (Some(1), &json!("STOPPED")), "{told}");

    for (args, code, why) in [
        (&["groups", "run", "always"][..], 1, "is continuous"),
        (&["groups", "run", "nwo"], 2, "did you mean \"now\"?"),
        (&["groups", "pause", "nobody"], 2, "there are always, nightly, now"),
        (&["runs", "list", "--group", "nobody"], 2, "there is no group \"nobody\""),
    ] {
        let ran = ph(&w.dir, args).code(code);
        assert!(ran.stderr.contains(why), "{args:?}: {}", ran.stderr);
    }
    relay.signal("TERM");
    assert_eq!(relay.ended().0, 0);
}

#[test]
fn without_groups_there_is_nothing_to_list() {
    let w = world("");
    assert_eq!(
        ph(&w.dir, &["groups", "list"]).code(0).stdout,
        "no groups are configured: every house is sent from all the time\n"
    );
    assert_eq!(ph(&w.dir, &["runs", "list"]).code(0).stdout, "no runs\n");
}
