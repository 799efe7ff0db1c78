//! The relay as a process: delivering, health, metrics, stopping.

use serde_json::{Value, json};

use crate::support::{Dir, MySqlDatabase, Receiver, Running, Schema, ph, posthouse, wait_for};

struct World {
    dir: Dir,
    // Dropped with the test.
    _schema: Schema,
    receiver: Receiver,
}

/// Migrated tables, and routes to a receiver on the loopback interface.
fn world(route: &str, rest: &str) -> World {
    let (dir, schema, receiver) = (Dir::new(), Schema::new(), Receiver::start());
    let to = receiver.address;
    dir.write(
        "posthouse.toml",
        &schema.config(&format!(
            "[transports.http]\nallow = [\"127.0.0.1\"]\n[routes.orders]\nto = \"http://{to}/orders\"\n{route}\n[server]\nlisten = \"127.0.0.1:0\"\n{rest}"
        )),
    );
    ph(&dir, &["migrate", "--database", "main"]).code(0);
    World { dir, _schema: schema, receiver }
}

impl World {
    fn relay(&self) -> Running {
        let relay = Running::start(&mut posthouse(&self.dir));
        relay.wait_ready();
        relay
    }

    fn publish(&self, id: &str) {
        ph(&self.dir, &["--database", "main", "publish", "orders", "{\"n\":1}", "--id", id]).code(0);
    }

    fn status(&self, id: &str) -> String {
        ph(&self.dir, &["messages", "show", id, "--json"]).code(0).json()["status"].as_str().unwrap().to_owned()
    }

    fn wait_status(&self, id: &str, status: &str) {
        wait_for(&format!("{id} is {status}"), || (self.status(id) == status).then_some(()));
    }
}

#[test]
fn delivers_tells_how_it_stands_and_stops_when_told() {
    let w = world("", "");
    w.publish("before");
    let relay = w.relay();
    w.publish("after");
    w.wait_status("before", "SENT");
    w.wait_status("after", "SENT");
    let seen = w.receiver.seen();
    assert_eq!(seen.len(), 2, "{seen:?}");
    assert!(seen.iter().all(|s| s.body == b"{\"n\":1}"), "{seen:?}");

    assert_eq!(relay.get("/healthz"), (200, "ok\n".into()));
    assert_eq!(relay.get("/nothing").0, 404);
    let (status, body) = relay.get("/readyz");
    let told: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status, 200, "{told}");
    let main = &told["databases"]["main"];
    assert_eq!((&main["ready"], &main["houses"], &main["reachable"]), (&json!(true), &json!(4), &json!(true)), "{told}");
    assert!(main["lease_seconds_left"].as_f64().unwrap() > 0.0);

    let metrics = wait_for("the deliveries are counted", || {
        let text = relay.get("/metrics").1;
        text.contains("posthouse_destination_delivered_total{database=\"main\",destination=\"orders\"} 2").then_some(text)
    });
    for line in [
        "posthouse_houses{database=\"main\"} 4",
        "posthouse_relay_running{database=\"main\"} 1",
        "posthouse_failed_total{database=\"main\"} 0",
        "posthouse_last_pass_age_seconds{database=\"main\",loop=\"forward_read\"}",
        "posthouse_delivered_total{database=\"main\"} 2",
        "posthouse_destination_down{database=\"main\",destination=\"orders\"} 0",
        "# TYPE posthouse_delivered_total counter",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    let houses = ph(&w.dir, &["houses", "list"]).code(0).stdout;
    assert!(houses.contains("0-3") && houses.contains("valid"), "{houses}");

    relay.signal("TERM");
    let (code, log) = relay.ended();
    assert_eq!(code, 0, "{log}");
    let houses = ph(&w.dir, &["houses", "list"]).code(0).stdout;
    assert!(houses.contains("(nobody)"), "given back: {houses}");
}

#[test]
fn a_failed_message_is_seen_and_requeued() {
    let w = world("retry = { max_attempts = 2, base = \"10ms\", cap = \"20ms\" }", "");
    w.receiver.answer_with(503);
    let relay = w.relay();
    w.publish("m");
    w.wait_status("m", "FAILED");
    let shown = ph(&w.dir, &["messages", "show", "m"]).code(0).stdout;
    assert!(shown.contains("503") && shown.contains("attempts") && shown.contains("retry"), "{shown}");
    let history = ph(&w.dir, &["messages", "show", "m", "--json"]).json()["history"].as_array().unwrap().len();
    assert_eq!(history, 2);
    // The backlog is counted anew at most every ten seconds.
    wait_for("the backlog is told", || {
        relay
            .get("/metrics")
            .1
            .contains("posthouse_backlog_messages{database=\"main\",destination=\"orders\",status=\"FAILED\"} 1")
            .then_some(())
    });
    w.receiver.answer_with(200);
    let ran = ph(&w.dir, &["messages", "requeue", "--all", "--status", "FAILED", "--destination", "orders", "--yes"]).code(0);
    assert_eq!(ran.stdout, "requeued 1 message\n");
    w.wait_status("m", "SENT");
    assert_eq!(w.receiver.seen().iter().filter(|s| s.message_id == "m").count(), 3);
    relay.signal("INT");
    assert_eq!(relay.ended().0, 0);
}

#[test]
fn what_is_in_flight_is_finished_before_the_end() {
    let w = world("", "");
    w.receiver.open(false);
    let relay = w.relay();
    w.publish("slow");
    wait_for("the request arrives", || (!w.receiver.seen().is_empty()).then_some(()));
    relay.signal("TERM");
    wait_for("it drains", || relay.log().contains("stopping").then_some(()));
    let (status, body) = relay.get("/readyz");
    assert_eq!(status, 503, "{body}");
    assert_eq!(relay.get("/healthz").0, 200);
    w.receiver.open(true);
    assert_eq!(relay.ended().0, 0);
    assert_eq!(w.status("slow"), "SENT", "its outcome was written");
    assert_eq!(w.receiver.seen().len(), 1);
}

#[test]
fn a_second_signal_stops_at_once() {
    let w = world("", "");
    w.receiver.open(false);
    let relay = w.relay();
    w.publish("slow");
    wait_for("the request arrives", || (!w.receiver.seen().is_empty()).then_some(()));
    relay.signal("TERM");
    wait_for("it drains", || relay.log().contains("stopping").then_some(()));
    relay.signal("TERM");
    let (code, log) = relay.ended();
    assert_eq!(code, 1, "{log}");
    assert_eq!(w.status("slow"), "PENDING", "nothing is lost");
    w.receiver.open(true);
}

#[test]
fn a_database_that_is_down_does_not_stop_the_others() {
    let w = world("", "[databases.down]\nurl = \"postgres://u@127.0.0.1:1/db\"\n[relay]\ndatabase_timeout = \"500ms\"");
    let relay = Running::start(&mut posthouse(&w.dir));
    assert_eq!(relay.get("/healthz").0, 200);
    w.publish("m");
    let told = wait_for("the good one is ready", || {
        let (status, body) = relay.get("/readyz");
        let told: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(status, 503, "one is down: {told}");
        (told["databases"]["main"]["ready"] == true && told["databases"]["down"]["reachable"] == false).then_some(told)
    });
    assert!(!told["databases"]["down"]["reasons"].as_array().unwrap().is_empty(), "{told}");
    wait_for("delivered", || (!w.receiver.seen().is_empty()).then_some(()));
    relay.signal("TERM");
    let (code, log) = relay.ended();
    assert_eq!(code, 0, "{log}");
}

#[test]
fn a_destination_that_is_down_is_told_but_does_not_make_the_relay_unready() {
    let w = world("", "[routes.dead]\nto = \"http://127.0.0.1:1/\"");
    let relay = w.relay();
    ph(&w.dir, &["publish", "dead", "{}"]).code(0);
    let (status, told) = wait_for("the outage is told", || {
        let (status, body) = relay.get("/readyz");
        let told: Value = serde_json::from_str(&body).unwrap();
        (told["databases"]["main"]["destinations_not_ok"][0]["destination"] == "dead").then_some((status, told))
    });
    assert_eq!(status, 200, "{told}");
    let dead = &told["databases"]["main"]["destinations_not_ok"][0];
    assert_eq!((&dead["state"], &dead["to"]), (&json!("down"), &json!("http://127.0.0.1:1/")), "{told}");
    assert!(dead["error"].as_str().unwrap().contains("127.0.0.1:1") && dead["down_seconds"].is_number(), "{told}");
    assert!(humantime::parse_rfc3339(dead["since"].as_str().unwrap()).is_ok(), "{told}");
    assert_eq!(told["databases"]["main"]["destinations_not_ok_count"], 1);
    assert!(relay.get("/metrics").1.contains("posthouse_destination_down{database=\"main\",destination=\"dead\"} 1"));
    relay.signal("TERM");
    assert_eq!(relay.ended().0, 0);
}

#[test]
fn a_port_in_use_is_a_configuration_error() {
    let w = world("", "");
    let text = std::fs::read_to_string(w.dir.path().join("posthouse.toml")).unwrap();
    w.dir.write("posthouse.toml", &text.replace("127.0.0.1:0", &w.receiver.address.to_string()));
    let ran = ph(&w.dir, &["relay"]).code(2);
    assert!(ran.stderr.contains("server.listen") && ran.stderr.contains("in use"), "{}", ran.stderr);
}

/// Publishes, delivers, lists and shows, skips and requeues, whatever the database.
#[track_caller]
fn works_on(dir: &Dir, database: &str) {
    let receiver = Receiver::start();
    let to = receiver.address;
    dir.write(
        "posthouse.toml",
        &format!(
            "[databases.main]\n{database}\n[transports.http]\nallow = [\"127.0.0.1\"]\n\
             [routes.orders]\nto = \"http://{to}/\"\n[server]\nlisten = \"127.0.0.1:0\"\n"
        ),
    );
    ph(dir, &["migrate"]).code(0);
    ph(dir, &["migrate"]).code(0);
    ph(dir, &["publish", "orders", "{}", "--id", "a", "--key", "k"]).code(0);
    ph(dir, &["messages", "skip", "a"]).code(0);
    ph(dir, &["messages", "requeue", "--all", "--status", "FAILED", "--yes"]).code(0);
    let relay = Running::start(&mut posthouse(dir));
    relay.wait_ready();
    ph(dir, &["publish", "orders", "{}", "--id", "b", "--key", "k"]).code(0);
    for id in ["a", "b"] {
        wait_for("sent", || (ph(dir, &["messages", "show", id, "--json"]).code(0).json()["status"] == "SENT").then_some(()));
    }
    let order: Vec<String> = receiver.seen().into_iter().map(|s| s.message_id).collect();
    assert_eq!(order, ["a", "b"]);
    ph(dir, &["houses", "list"]).code(0);
    ph(dir, &["relay", "--check"]).code(0);
    relay.signal("TERM");
    let (code, log) = relay.ended();
    assert_eq!(code, 0, "{log}");
}

#[test]
fn works_on_sqlite() {
    let dir = Dir::new();
    let url = format!("sqlite://{}", dir.path().join("outbox.db").display());
    let ran = ph(&dir, &["messages", "list", "--database", &url]).code(2);
    assert!(ran.stderr.contains("run `posthouse migrate`"), "{}", ran.stderr);
    works_on(&dir, &format!("url = {url:?}"));
    ph(&dir, &["migrate", "--database", "sqlite::memory:"]).code(2);
}

#[test]
fn works_on_mysql() {
    let dir = Dir::new();
    let database = MySqlDatabase::new();
    works_on(&dir, &format!("url = {:?}", database.url));
}

#[test]
fn adopted_tables_are_checked_scanned_and_counted() {
    let (dir, database, receiver) = (Dir::new(), MySqlDatabase::new(), Receiver::start());
    let to = receiver.address;
    let adopted = format!(
        "[transports.http]\nallow = [\"127.0.0.1\"]\n[server]\nlisten = \"127.0.0.1:0\"\n\
         [adopted.prizes]\npreset = \"mq_state\"\ntable = \"export_*\"\nunsent_after = \"\"\ndestination = \"http://{to}/{{u_id}}\"\n\
         state = {{ pending = [0], null = true }}\npayload = {{ fields = {{ user = \"u_id\", uuid = \"uuid\" }} }}\ninterval = \"50ms\"\n"
    );
    let config = |rest: &str| format!("[databases.main]\nurl = \"{}\"\n{rest}", database.url);
    dir.write(
        "posthouse.toml",
        &config(
            &adopted
                .replace("unsent_after = \"\"", "unsent_after = \"oops\"")
                .replace("[adopted.prizes]", "[adopted.prizes]\ndatabases = [\"man\"]\nidd = \"x\""),
        ),
    );
    let wrong = ph(&dir, &["relay", "--check"]).code(2).stderr;
    for part in ["adopted.prizes.unsent_after", "there is no database \"man\"; did you mean \"main\"?", "adopted.prizes.idd"] {
        assert!(wrong.contains(part), "{part}: {wrong}");
    }
    dir.write("posthouse.toml", &config(&adopted.replace("unsent_after = \"\"", "unsent_after = \"1s\"")));
    ph(&dir, &["migrate"]).code(0);
    let none = ph(&dir, &["relay", "--check"]).code(2);
    assert!(none.stderr.contains("means no table") || none.stdout.contains("means no table"), "{none:?}");
    for n in ["001", "003"] {
        database.execute(&format!(
            "CREATE TABLE export_{n} (uuid VARCHAR(64) PRIMARY KEY, u_id VARCHAR(20), mq_state TINYINT, create_time DATETIME, \
             update_time DATETIME)"
        ));
        database.execute(&format!(
            "INSERT INTO export_{n} VALUES ('a{n}', 'u1', NULL, NOW() - INTERVAL 1 HOUR, NOW()), ('b{n}', 'u2', 1, NOW(), NOW())"
        ));
    }
    let checked = ph(&dir, &["relay", "--check"]).code(0).stdout;
    for part in [
        "adopted prizes in main: 2 tables",
        "missing in the numbering: export_002",
        "its owner should run: CREATE INDEX `posthouse_state` ON",
    ] {
        assert!(checked.contains(part), "{part}: {checked}");
    }
    let relay = Running::start(&mut posthouse(&dir));
    relay.wait_ready();
    wait_for("both rows are sent", || (receiver.seen().len() == 2).then_some(()));
    wait_for("they are counted", || {
        let text = relay.get("/metrics").1;
        let line =
            |n: &str| format!("posthouse_adopted_sent_total{{database=\"main\",source=\"prizes\",table=\"export_{n}\"}} 1");
        (text.contains(&line("001")) && text.contains(&line("003"))).then_some(())
    });
    let bodies: Vec<String> = receiver.seen().iter().map(|s| String::from_utf8_lossy(&s.body).into_owned()).collect();
    assert!(bodies.contains(&"{\"user\":\"u1\",\"uuid\":\"a001\"}".to_owned()), "{bodies:?}");
    relay.signal("TERM");
    let (code, log) = relay.ended();
    assert_eq!(code, 0, "{log}");
}
