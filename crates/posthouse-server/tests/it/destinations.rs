//! How destinations stand: `posthouse destinations`, `/destinations`, `/metrics`, and brokers that are down from the start.

use serde_json::{Value, json};

use crate::support::{Dir, Receiver, Running, Schema, ph, posthouse, wait_for};

/// Two routes: `good` leads to a receiver, `dead` to a port where nobody listens.
struct World {
    dir: Dir,
    schema: Schema,
    receiver: Receiver,
}

fn world() -> World {
    let w = World { dir: Dir::new(), schema: Schema::new(), receiver: Receiver::start() };
    w.listen_on("127.0.0.1:0", "");
    ph(&w.dir, &["migrate"]).code(0);
    w
}

impl World {
    fn listen_on(&self, listen: &str, rest: &str) {
        let to = self.receiver.address;
        let text = format!(
            "[transports.http]\nallow = [\"127.0.0.1\"]\n[routes.good]\nto = \"http://{to}/good?token=hunter2\"\n\
             [routes.dead]\nto = \"http://127.0.0.1:1/dead\"\n[routes.idle]\nto = \"http://{to}/idle\"\n\
             [server]\nlisten = \"{listen}\"\n{rest}"
        );
        self.dir.write("posthouse.toml", &self.schema.config(&text));
    }

    /// A running relay, which the configuration names from now on.
    fn relay(&self) -> Running {
        let relay = Running::start(&mut posthouse(&self.dir));
        relay.wait_ready();
        self.listen_on(&relay.address, "");
        relay
    }

    /// What `destinations --json` tells, by destination, once it is as wanted.
    fn wait_told(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        wait_for(what, || {
            let told = ph(&self.dir, &["destinations", "--json"]).code(0).json();
            wanted(&told).then_some(told)
        })
    }
}

fn of<'v>(told: &'v Value, destination: &str) -> &'v Value {
    told["destinations"].as_array().unwrap().iter().find(|d| d["destination"] == destination).unwrap_or(&Value::Null)
}

#[test]
fn both_sides_are_told_with_a_relay() {
    let w = world();
    let relay = w.relay();
    for destination in ["good", "good", "dead", "dead", "dead"] {
        ph(&w.dir, &["publish", destination, "{}"]).code(0);
    }
    let told = w.wait_told("good is sent and dead is down", |told| {
        of(told, "dead")["state"] == "down" && of(told, "good")["delivered"] == 2 && of(told, "good")["pending"] == 0
    });
    let order: Vec<&str> = told["destinations"].as_array().unwrap().iter().map(|d| d["destination"].as_str().unwrap()).collect();
    assert_eq!(order, ["dead", "good", "idle"], "failing first");
    let (dead, good, idle) = (of(&told, "dead"), of(&told, "good"), of(&told, "idle"));
    assert_eq!((&dead["pending"], &dead["failed"]), (&json!(3), &json!(0)), "{told}");
    assert!(dead["last_error"].as_str().unwrap().contains("127.0.0.1:1"), "{told}");
    assert!(dead["down_seconds"].is_number() && dead["oldest_pending_seconds"].is_number(), "{told}");
    assert!(dead["last_confirm_seconds"].is_null(), "{told}");
    assert_eq!((&good["state"], &good["last_error"]), (&json!("ok"), &Value::Null), "{told}");
    assert!(good["last_confirm_seconds"].as_f64().unwrap() < 60.0, "{told}");
    assert!(good["to"].as_str().unwrap().ends_with("/good?token=[redacted]"), "{told}");
    assert_eq!((&idle["state"], &idle["pending"]), (&Value::Null, &json!(0)), "{told}");
    assert!(told["databases"][0]["relay"]["instance"].is_string() && told["relay_error"].is_null(), "{told}");

    let ran = ph(&w.dir, &["destinations"]).code(0);
    assert_eq!(ran.stderr, "");
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert!(lines[0].starts_with("DESTINATION") && lines[1].starts_with("dead") && lines[1].contains(" down "), "{}", ran.stdout);
    assert!(lines[2].starts_with("good") && lines[2].contains(" ok ") && lines[2].contains(" ago"), "{}", ran.stdout);
    assert!(ran.stdout.ends_with("3 destinations, 1 down, 3 pending, 0 failed\n"), "{}", ran.stdout);
    assert!(!ran.stdout.contains("hunter2"));

    let metrics = relay.get("/metrics").1;
    for line in [
        "posthouse_destination_down{database=\"main\",destination=\"dead\"} 1\n",
        "posthouse_destination_down{database=\"main\",destination=\"good\"} 0\n",
        "posthouse_destination_blocked{database=\"main\",destination=\"dead\"} 0\n",
        "posthouse_destination_down_seconds{database=\"main\",destination=\"dead\"} ",
        "posthouse_destination_down_seconds{database=\"main\",destination=\"good\"} 0\n",
        "posthouse_destination_in_flight{database=\"main\",destination=\"good\"} 0\n",
        "posthouse_destination_waiting{database=\"main\",destination=\"good\"} 0\n",
        "posthouse_destination_last_confirm_seconds{database=\"main\",destination=\"good\"} ",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    assert!(!metrics.contains("posthouse_destination_last_confirm_seconds{database=\"main\",destination=\"dead\"}"), "never");

    let (status, body) = relay.get("/destinations");
    let told: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &told["databases"]["main"]["destinations"][0]["state"]), (200, &json!("down")), "{told}");
    relay.signal("TERM");
    assert_eq!(relay.ended().0, 0);
}

#[test]
fn without_a_relay_the_database_is_told() {
    let w = world();
    ph(&w.dir, &["publish", "good", "{}", "--id", "a"]).code(0);
    ph(&w.dir, &["publish", "good", "{}", "--id", "b"]).code(0);
    ph(&w.dir, &["messages", "skip", "b"]).code(0);
    for (listen, why) in [("127.0.0.1:1", "efused"), ("127.0.0.1:0", "no port"), ("0.0.0.0:1", "127.0.0.1:1")] {
        w.listen_on(listen, if listen.starts_with('0') { "allow_public = true" } else { "" });
        let ran = ph(&w.dir, &["destinations"]).code(0);
        assert!(ran.stderr.contains("only the database's side") && ran.stderr.contains(why), "{}", ran.stderr);
        assert!(ran.stdout.starts_with("DESTINATION") && !ran.stdout.contains("CONFIRMED"), "{}", ran.stdout);
        assert!(ran.stdout.ends_with("3 destinations, 1 pending, 1 failed\n"), "{}", ran.stdout);
        let told = ph(&w.dir, &["destinations", "--json"]).code(0).json();
        let good = of(&told, "good");
        assert_eq!((&good["pending"], &good["failed"], &good["state"]), (&json!(1), &json!(1), &Value::Null), "{told}");
        assert!(told["relay_error"].is_string() && told["databases"][0]["relay"].is_null(), "{told}");
    }
    // Something else answers there.
    w.listen_on(&w.receiver.address.to_string(), "");
    let ran = ph(&w.dir, &["destinations"]).code(0);
    assert!(ran.stderr.contains("no posthouse of this version"), "{}", ran.stderr);
}

#[test]
fn something_that_never_answers_is_given_up() {
    let w = world();
    w.receiver.open(false);
    w.listen_on(&w.receiver.address.to_string(), "");
    let ran = ph(&w.dir, &["destinations"]).code(0);
    assert!(ran.stderr.contains("no answer within 2 s"), "{}", ran.stderr);
    w.receiver.open(true);
}

#[test]
fn a_relay_of_another_configuration_is_not_mistaken() {
    let w = world();
    let relay = w.relay();
    let text = std::fs::read_to_string(w.dir.path().join("posthouse.toml")).unwrap();
    w.dir.write("posthouse.toml", &text.replace("[databases.main]", "[databases.mine]"));
    let ran = ph(&w.dir, &["destinations"]).code(0);
    assert!(ran.stderr.contains("doesn't know database \"mine\""), "{}", ran.stderr);
    relay.signal("TERM");
    assert_eq!(relay.ended().0, 0);
}

#[test]
fn a_database_that_is_down_is_an_error_and_the_others_are_shown() {
    let w = world();
    ph(&w.dir, &["publish", "good", "{}", "--database", "main"]).code(0);
    w.listen_on("127.0.0.1:1", "[databases.down]\nurl = \"postgres://u:hunter2@127.0.0.1:1/db\"\n");
    let ran = ph(&w.dir, &["destinations"]).code(3);
    assert!(ran.stderr.contains("database \"down\"") && ran.stderr.contains("can't be reached"), "{}", ran.stderr);
    assert!(ran.stdout.starts_with("DATABASE") && ran.stdout.contains("1 pending"), "{}", ran.stdout);
    let ran = ph(&w.dir, &["destinations", "--json"]).code(3);
    assert!(ran.json()["databases"][0]["error"].is_string(), "one document: {}", ran.stdout);
    assert!(!ran.stdout.contains("hunter2") && !ran.stderr.contains("hunter2"));
    let ran = ph(&w.dir, &["destinations", "--database", "main"]).code(0);
    assert!(ran.stdout.starts_with("DESTINATION"), "{}", ran.stdout);
}

#[test]
fn nothing_in_a_destination_steers_the_terminal() {
    let w = world();
    ph(&w.dir, &["publish", "\u{1b}[2J\u{202e}", "{}", "--any-destination"]).code(0);
    for args in [&["destinations"][..], &["destinations", "--json"]] {
        let ran = ph(&w.dir, args).code(0);
        assert!(!ran.stdout.contains(['\u{1b}', '\u{202e}']), "{}", ran.stdout);
    }
}

#[test]
#[cfg(all(feature = "rabbitmq", feature = "kafka", feature = "nats"))]
fn a_start_with_every_broker_down_tells_why_and_takes_messages() {
    let w = world();
    // Port 1 is nobody's, so connections are refused at once.
    w.listen_on(
        "127.0.0.1:0",
        "[transports.amqp]\nkind = \"rabbitmq\"\nurl = \"amqp://u:hunter2@127.0.0.1:1\"\n\
         [transports.kafka]\nkind = \"kafka\"\nbrokers = \"127.0.0.1:1\"\nproperties = { \"sasl.password\" = \"hunter2\" }\n\
         [transports.nats]\nkind = \"nats\"\nurl = \"nats://u:hunter2@127.0.0.1:1\"\n\
         [routes.r]\nto = \"amqp:orders/placed\"\n[routes.k]\nto = \"kafka:orders\"\n[routes.n]\nto = \"nats:orders.placed\"\n",
    );
    let checked = ph(&w.dir, &["relay", "--check"]).code(0).stdout;
    for text in
        ["rabbitmq", "amqp:exchange/routing.key", "kafka:topic", "nats:subject", "127.0.0.1:1", "brokers are not connected"]
    {
        assert!(checked.contains(text), "{text}: {checked}");
    }
    assert!(!checked.contains("hunter2"), "{checked}");
    // What the clients of the brokers log is looked through for secrets too.
    let relay = Running::start(posthouse(&w.dir).env("RUST_LOG", "debug"));
    relay.wait_ready();
    for destination in ["r", "k", "n", "good"] {
        ph(&w.dir, &["publish", destination, "{}", "--id", destination]).code(0);
    }
    let told = wait_for("every broker is told to be down", || {
        let (status, body) = relay.get("/readyz");
        assert_eq!(status, 200, "the relay does its work: {body}");
        let told: Value = serde_json::from_str(&body).unwrap();
        (told["databases"]["main"]["destinations_not_ok"].as_array().unwrap().len() == 3).then_some(told)
    });
    for (destination, to) in [("k", "kafka:orders"), ("n", "nats:orders.placed"), ("r", "amqp:orders/placed")] {
        let all = told["databases"]["main"]["destinations_not_ok"].as_array().unwrap();
        let d = all.iter().find(|d| d["destination"] == destination).unwrap_or_else(|| panic!("{destination}: {told}"));
        assert_eq!((&d["state"], &d["to"]), (&json!("down"), &json!(to)), "{told}");
        assert!(d["error"].as_str().is_some_and(|e| !e.is_empty()) && d["since"].is_string(), "{told}");
        let shown = ph(&w.dir, &["messages", "show", destination, "--json"]).code(0).json();
        assert_eq!((&shown["status"], &shown["attempts"]), (&json!("PENDING"), &json!(0)), "{shown}");
    }
    wait_for("the other destination goes on", || (!w.receiver.seen().is_empty()).then_some(()));
    relay.signal("TERM");
    let (code, log) = relay.ended();
    assert_eq!(code, 0, "{log}");
    assert!(!log.contains("hunter2") && !told.to_string().contains("hunter2"), "{log}");
}
