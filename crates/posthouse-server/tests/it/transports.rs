//! `[transports.NAME]` of every kind, and what routes ask of them, in the configuration file.

use crate::config::one;
#[cfg(all(feature = "rabbitmq", feature = "kafka", feature = "nats"))]
use crate::config::print;
use crate::support::{Dir, ph, posthouse, run};

const DATABASE: &str = "[databases.a]\nurl = \"postgres://u@h/d\"\n";

/// The effective configuration of a good file.
#[track_caller]
fn shown(text: &str) -> serde_json::Value {
    let dir = Dir::new();
    dir.write("posthouse.toml", &format!("{DATABASE}{text}"));
    ph(&dir, &["relay", "--print-config", "--json"]).code(0).json()
}

#[test]
fn a_kind_must_be_one_that_there_is() {
    one("[transports.t]\nkind = \"pigeon\"", "transports.t.kind", &["no such kind", "http, rabbitmq, kafka, nats"]);
    one("[transports.t]\nkind = \"kafak\"", "transports.t.kind", &["did you mean", "kafka"]);
    one("[transports.t]\nkind = \"amqp\"", "transports.t.kind", &["did you mean", "rabbitmq"]);
    one("[transports.t]\nkind = \"local\"", "transports.t.kind", &["embedded relay"]);
    one("[transports.t]\nkind = 5", "transports.t.kind", &["must be text"]);
    one("[transports.t]\nallow = []", "transports.t.kind", &["is missing", "http"]);
    one("[transports.amqp]\nurl = \"x\"", "transports.amqp.kind", &["is missing", "rabbitmq"]);
    one("[transports.nats]\nurl = \"x\"", "transports.nats.kind", &["is missing", "nats"]);
    one("[transports.https]\nkind = \"http\"", "transports.https", &["serves https"]);
}

/// Without the feature, the kind is told to be missing from this program, not to be unknown.
#[test]
fn a_kind_that_was_left_out_is_told() {
    for (kind, there) in
        [("rabbitmq", cfg!(feature = "rabbitmq")), ("kafka", cfg!(feature = "kafka")), ("nats", cfg!(feature = "nats"))]
    {
        let text = format!("[transports.t]\nkind = {kind:?}\n[routes.x]\nto = \"t:x\"");
        if there {
            let key = if kind == "kafka" { "brokers" } else { "url" };
            one(&text, &format!("transports.t.{key}"), &["is missing", key]);
        } else {
            one(&text, "transports.t.kind", &["this posthouse was built without", kind]);
        }
    }
}

#[test]
#[cfg(feature = "rabbitmq")]
fn rabbitmq_settings_are_checked() {
    let good = "[transports.amqp]\nkind = \"rabbitmq\"\nurl = \"amqp://u:hunter2@mq/v\"\n";
    one(&format!("{good}heartbeet = \"1s\""), "transports.amqp.heartbeet", &["did you mean", "heartbeat"]);
    one(&format!("{good}heartbeat = 10"), "transports.amqp.heartbeat", &["must be a length of time"]);
    one(&format!("{good}brokers = \"x\""), "transports.amqp.brokers", &["unknown key", "connection_name"]);
    one(&format!("{good}connect_timeout = \"10s\""), "transports.amqp.connect_timeout", &["less than relay.send_timeout"]);
    one("[transports.amqp]\nkind = \"rabbitmq\"\nulr = \"amqp://mq\"", "transports.amqp.ulr", &["did you mean", "url"]);
    one("[transports.amqp]\nkind = \"rabbitmq\"\nurl = 5", "transports.amqp.url", &["must be text"]);
    one("[transports.http]\nkind = \"rabbitmq\"\nurl = \"amqp://mq\"", "transports.http.kind", &["[transports.rabbitmq]"]);
    let told = shown(&format!("{good}heartbeat = \"3s\""));
    let amqp = &told["transports"]["amqp"];
    assert_eq!((&amqp["kind"], &amqp["heartbeat"], &amqp["connect_timeout"]), (&"rabbitmq".into(), &"3s".into(), &"5s".into()));
    assert_eq!(amqp["url"], "amqp://u:[redacted]@mq/v");
    assert!(told["transports"]["http"].is_object(), "http is there besides: {told}");
}

#[test]
#[cfg(feature = "kafka")]
fn kafka_properties_are_the_users_own() {
    let good = "[transports.kafka]\nkind = \"kafka\"\nbrokers = \"k1:9092,k2:9092\"\n";
    one(&format!("{good}propertys = {{}}"), "transports.kafka.propertys", &["did you mean", "properties"]);
    one(
        &format!("{good}[transports.kafka.properties]\nsecurity.protocol = \"hunter2\""),
        "transports.kafka.properties.security",
        &["is a table", "[redacted]", "\\\"security.protocol\\\" ="],
    );
    one(&format!("{good}properties = \"x\""), "transports.kafka.properties", &["must be a table"]);
    one(&format!("{good}properties = {{ x = [1] }}"), "transports.kafka.properties.x", &["is a list", "true or false"]);
    let all =
        "properties = { \"linger.ms\" = 0.5, \"batch.size\" = 1000, \"socket.keepalive.enable\" = true, \"client.id\" = \"x\" }";
    let told = shown(&format!("{good}{all}"));
    let kafka = &told["transports"]["kafka"];
    assert_eq!(kafka["brokers"], "k1:9092,k2:9092");
    assert_eq!(kafka["properties"].as_object().unwrap().len(), 4);
    assert!(kafka["properties"].as_object().unwrap().values().all(|v| v == "[redacted]"), "{kafka}");
}

#[test]
#[cfg(feature = "nats")]
fn nats_settings_are_checked() {
    let good = "[transports.nats]\nkind = \"nats\"\nurl = \"nats://hunter2@n1:4222,tls://hunter2@n2\"\n";
    one(&format!("{good}credential = \"x\""), "transports.nats.credential", &["did you mean", "credentials"]);
    one(&format!("{good}connect_timeout = \"soon\""), "transports.nats.connect_timeout", &["is no length of time"]);
    one(&format!("{good}connect_timeout = \"11s\""), "transports.nats.connect_timeout", &["less than relay.send_timeout"]);
    let told = shown(&format!("{good}connect_timeout = \"2s\""));
    let nats = &told["transports"]["nats"];
    assert_eq!((&nats["kind"], &nats["connect_timeout"]), (&"nats".into(), &"2s".into()));
    assert_eq!(nats["url"], "nats://[redacted]@n1:4222,tls://[redacted]@n2");
}

#[test]
fn routes_have_settings_for_each_kind() {
    let route = "[routes.x]\nto = \"https://x.example/\"\n";
    for (text, path, words) in [
        ("cloudevents = { mode = \"binari\" }", "routes.x.cloudevents.mode", &["did you mean", "binary"][..]),
        ("cloudevents = { sorce = \"/x\" }", "routes.x.cloudevents.sorce", &["did you mean", "source"]),
        ("cloudevents = true", "routes.x.cloudevents", &["must be a table"]),
        ("cloudevents = { source = \"\" }", "routes.x.cloudevents.source", &["must be a URI"]),
        ("rabbitmq = { priority = 256 }", "routes.x.rabbitmq.priority", &["must be 0 to 255"]),
        ("rabbitmq = { priorty = 1 }", "routes.x.rabbitmq.priorty", &["did you mean", "priority"]),
        ("rabbitmq = { exchange_type = \"topik\" }", "routes.x.rabbitmq.exchange_type", &["did you mean", "topic"]),
        ("rabbitmq = { queue_type = \"stream\" }", "routes.x.rabbitmq.queue_type", &["classic, quorum"]),
        ("rabbitmq = { expiration = 5 }", "routes.x.rabbitmq.expiration", &["must be a length of time"]),
        ("rabbitmq = { queue = \"q\" }", "routes.x.rabbitmq.queue", &["declare = true"]),
        ("rabbitmq = { headers = { d = 1979-05-27 } }", "routes.x.rabbitmq.headers.d", &["a date"]),
        ("rabbitmq = { headers = { d = [nan] } }", "routes.x.rabbitmq.headers.d", &["not finite"]),
        ("http = { signing_keys = \"hunter2\" }", "routes.x.http.signing_keys", &["must be a list of texts", "[redacted]"]),
        ("http = { signing_keys = [5] }", "routes.x.http.signing_keys", &["must be a list of texts"]),
        ("ordering = \"pipelind\"", "routes.x.ordering", &["did you mean", "pipelined"]),
    ] {
        one(&format!("{route}{text}"), path, words);
    }
    let told = shown(&format!(
        "{route}cloudevents = {{ source = \"/orders\" }}\n[routes.x.rabbitmq]\npriority = 5\nexpiration = \"1m\"\n\
         headers = {{ n = 5, t = {{ a = [true] }} }}"
    ));
    let x = &told["routes"]["x"];
    assert_eq!(x["cloudevents"]["mode"], "binary");
    assert_eq!((&x["rabbitmq"]["priority"], &x["rabbitmq"]["expiration"]), (&5.into(), &"1m".into()));
    assert_eq!(x["rabbitmq"]["headers"]["n"], "[redacted]");
}

#[test]
fn pipelined_is_only_for_transports_that_keep_order() {
    let route = "[routes.x]\nto = \"https://x.example/\"\nordering = \"pipelined\"\n";
    one(route, "routes.x.ordering", &["http", "keep a key's messages in order", "strict"]);
    one("[relay.default_route]\nordering = \"pipelined\"", "relay.default_route.ordering", &["every address"]);
}

/// Secrets in every place for one, in good files and in bad ones.
#[test]
#[cfg(all(feature = "rabbitmq", feature = "kafka", feature = "nats"))]
fn no_secret_of_a_transport_is_ever_shown() {
    let good = r#"
        [transports.amqp]
        kind = "rabbitmq"
        url = "amqp://u:hunter2@mq/v"
        [transports.kafka]
        kind = "kafka"
        brokers = "k:9092"
        properties = { "sasl.password" = "hunter2", "ssl.key.password" = "${SECRET}" }
        [transports.nats]
        kind = "nats"
        url = "nats://hunter2@n,nats://hunter2@n2"
        [transports.nats2]
        kind = "nats"
        url = "${NATS}"
        [routes.x]
        to = "https://u:hunter2@x.example/h?token=hunter2"
        http = { signing_keys = ["whsec_hunter2hunter2hunter2hunter2hunt", "${SECRET}"] }
        [routes.x.rabbitmq.headers]
        key = "hunter2"
        deep = { key = ["hunter2", "${SECRET}"] }
        [relay.default_route.http]
        signing_keys = ["whsec_hunter2hunter2hunter2hunter2hunt"]
    "#;
    let bad = r#"
        [transports.amqp]
        kind = "rabbitmq"
        url = "amqp://u:hunter2@mq:port/v"
        uri = "amqp://u:hunter2@mq/v"
        heartbeat = "hunter2s"
        [transports.a2]
        kind = "rabbitmq"
        url = ["amqp://u:hunter2@mq/v"]
        [transports.kafka]
        kind = "kafka"
        brokers = "u:hunter2@k:9092"
        properties = { "sasl.password" = ["hunter2"], "acks" = "hunter2", sasl = { password = "hunter2" } }
        [transports.nats]
        kind = "nats"
        url = { password = "hunter2" }
        [routes.x]
        to = "https://u:hunter2@x.example/h?token=hunter2"
        concurrency = 0
        http = { signing_keys = ["hunter2", 5], signing_key = "hunter2" }
        rabbitmq = { headers = "hunter2" }
        [routes.y]
        to = "https://u:hunter2@x.example/h?token=hunter2"
        http = { signing_keys = ["${SECRET}", "hunter2", "${PH_NOT_SET}"] }
        rabbitmq = { headers = { k = ["hunter2", 1979-05-27], u = "${PH_NOT_SET}hunter2" } }
    "#;
    let bad = bad.replace("heartbeat = \"hunter2s\"\n", "");
    for (text, args) in [
        (good, &["relay", "--print-config"][..]),
        (good, &["relay", "--print-config", "--json"]),
        (good, &["relay", "--check", "-vvv"]),
        (good, &["relay", "--check", "-vvv", "--json"]),
        (&bad, &["relay", "--print-config"]),
        (&bad, &["relay", "--print-config", "--json"]),
    ] {
        let dir = Dir::new();
        dir.write("posthouse.toml", &format!("{DATABASE}{text}"));
        let mut command = posthouse(&dir);
        command.args(args).env("SECRET", "whsec_hunter2hunter2hunter2hunter2hunt").env("NATS", "nats://u:hunter2@n");
        let ran = run(&mut command);
        assert!(!ran.stderr.contains("hunter2") && !ran.stdout.contains("hunter2"), "{args:?}: {}{}", ran.stderr, ran.stdout);
        assert_eq!(ran.code == 0, text == good && args[1] == "--print-config", "{args:?}: {}{}", ran.stderr, ran.stdout);
        assert!(args[1] == "--check" || ran.stderr.contains("[redacted]") || ran.stdout.contains("[redacted]"), "{args:?}");
    }
}

#[test]
#[cfg(all(feature = "rabbitmq", feature = "kafka", feature = "nats"))]
fn secrets_come_from_variables_and_files() {
    let dir = Dir::new();
    let file = dir.write("secret", "hunter2\n");
    dir.write(
        "posthouse.toml",
        &format!(
            "{DATABASE}[transports.amqp]\nkind = \"rabbitmq\"\nurl = \"amqp://u:${{file:{0}}}@${{HOST}}/v\"\n\
             [transports.kafka]\nkind = \"kafka\"\nbrokers = \"${{HOST}}:9092\"\n\
             properties = {{ \"sasl.password\" = \"${{file:{0}}}\" }}\n\
             [transports.nats]\nkind = \"nats\"\nurl = \"nats://${{file:{0}}}@${{HOST}}\"\n\
             [transports.nats2]\nkind = \"nats\"\nurl = \"nats://${{HOST}}\"\ncredentials = \"/run/${{HOST}}.creds\"\n",
            file.display()
        ),
    );
    let ran = run(posthouse(&dir).args(["relay", "--print-config", "--json"]).env("HOST", "mq.example")).code(0);
    assert!(!ran.stdout.contains("hunter2"), "{}", ran.stdout);
    let told = ran.json();
    assert_eq!(told["transports"]["amqp"]["url"], "amqp://u:[redacted]@mq.example/v");
    assert_eq!(told["transports"]["kafka"]["brokers"], "mq.example:9092");
    assert_eq!(told["transports"]["nats"]["url"], "nats://[redacted]@mq.example");
    assert_eq!(told["transports"]["nats2"]["credentials"], "/run/mq.example.creds");
}

#[test]
#[cfg(all(feature = "rabbitmq", feature = "kafka", feature = "nats"))]
fn a_printed_configuration_with_every_kind_is_valid() {
    let ran = print(&format!(
        "{DATABASE}[transports.amqp]\nkind = \"rabbitmq\"\nurl = \"amqp://mq\"\n\
         [transports.kafka]\nkind = \"kafka\"\nbrokers = \"k:9092\"\n[transports.nats]\nkind = \"nats\"\nurl = \"nats://n\"\n\
         [routes.x]\nto = \"https://x.example/\"\ncloudevents = {{ mode = \"structured\" }}\nrabbitmq = {{ declare = true, queue = \"q\" }}"
    ))
    .code(0);
    assert_eq!(print(&ran.stdout).code(0).stdout, ran.stdout);
}

/// What the documentation shows as a complete file is one, and has every key that is printed.
#[test]
#[cfg(all(feature = "rabbitmq", feature = "kafka", feature = "nats", feature = "xxl-job"))]
fn the_documented_file_is_valid_and_complete() {
    let docs = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md")).unwrap();
    let (_, rest) = docs.split_once("```toml\n").unwrap();
    let (file, _) = rest.split_once("```").unwrap();
    let dir = Dir::new();
    dir.write("posthouse.toml", file);
    let mut command = posthouse(&dir);
    command
        .args(["relay", "--print-config"])
        .env("SHOP_DATABASE_URL", "postgres://u@h/d")
        .env("AMQP_PASSWORD", "x")
        .env("XXL_JOB_TOKEN", "x");
    let printed = run(&mut command).code(0).stdout;
    for line in printed.lines().filter(|l| l.contains(" = ")) {
        let (key, _) = line.split_once(" = ").unwrap();
        assert!(file.lines().any(|l| l.trim_start_matches("# ").starts_with(&format!("{key} = "))), "{key} is not documented");
    }
}
