//! The configuration file, seen through `relay --print-config`, which validates everything and connects to nothing.

use crate::support::{Dir, Ran, ph, posthouse, run};

pub(crate) fn print(text: &str) -> Ran {
    let dir = Dir::new();
    dir.write("posthouse.toml", text);
    ph(&dir, &["relay", "--print-config"])
}

/// The problems of a file, by path.
#[track_caller]
pub(crate) fn problems(text: &str) -> Vec<(String, String)> {
    let dir = Dir::new();
    dir.write("posthouse.toml", text);
    let ran = ph(&dir, &["relay", "--print-config", "--json"]).code(2);
    let told = ran.json();
    let all = told["error"]["problems"].as_array().unwrap().iter();
    all.map(|p| (p["path"].as_str().unwrap().to_owned(), format!("{} | {} | {}", p["value"], p["reason"], p["fix"]))).collect()
}

/// One wrong thing must be told at this path, in these words, and nothing else.
#[track_caller]
pub(crate) fn one(text: &str, path: &str, words: &[&str]) {
    let found = problems(&format!("[databases.a]\nurl = \"postgres://u@localhost/db\"\n{text}"));
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].0, path, "{found:?}");
    for word in words {
        assert!(found[0].1.contains(word), "{word:?} is not in {found:?}");
    }
}

#[test]
fn everything_wrong_is_told_at_once() {
    let found = problems(
        r#"
        retention = []
        [databases.a]
        url = "postgres://u@localhost/db"
        prefix = "No-Good"
        houses = 0
        [databases.b]
        ulr = "postgres://u@localhost/db"
        [databases.c]
        url = "oracle://u@localhost/db"
        [transports.amqp]
        kind = "pigeon"
        url = "amqp://u:hunter2@mq"
        [routes."w"]
        to = "amqp:not/judged"
        [routes."x"]
        to = "ampq:orders"
        ordering = "strikt"
        retry = { max_attempts = 0, bas = "1s" }
        [relay]
        batch = 0
        heartbeat = "10s"
        idle_poll = "soon"
        [server]
        listen = "0.0.0.0:8420"
        "#,
    );
    let paths: Vec<&str> = found.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "databases.a.houses",
            "databases.a.prefix",
            "databases.b.ulr",
            "databases.c.url",
            "relay.batch",
            "relay.heartbeat",
            "relay.idle_poll",
            "relay.send_timeout",
            "retention",
            "routes.x.ordering",
            "routes.x.retry.bas",
            "routes.x.retry.max_attempts",
            "routes.x.to",
            "server.listen",
            "transports.amqp.kind",
        ],
        "{found:#?}"
    );
}

#[test]
fn people_read_path_value_reason_and_fix() {
    let ran = print("[databases.a]\nurl = \"postgres://u@localhost/db\"\n[relay]\nheartbeet = \"1s\"\nbatch = 0\n").code(2);
    assert_eq!(ran.stdout, "");
    assert!(ran.stderr.contains("posthouse.toml has 2 problems"), "{}", ran.stderr);
    assert!(ran.stderr.contains("relay.heartbeet\n      unknown key; did you mean \"heartbeat\"?"), "{}", ran.stderr);
    assert!(ran.stderr.contains("relay.batch = 0\n      must be 1 to 5000"), "{}", ran.stderr);
}

#[test]
fn unknown_keys_are_errors_with_a_suggestion() {
    one("[relay]\nleese = \"20s\"", "relay.leese", &["did you mean", "lease"]);
    one("[rely]\nlease = \"20s\"", "rely", &["did you mean", "relay"]);
    one("[routes.x]\nto = \"https://x.example/\"\nconcurency = 3", "routes.x.concurency", &["concurrency"]);
    one("[routes.x]\nto = \"https://x.example/\"\nhttp = { metod = \"PUT\" }", "routes.x.http.metod", &["method"]);
    one("[transports.http]\nallow_privat = true", "transports.http.allow_privat", &["allow_private"]);
    one("[server]\nlisten_on = \"127.0.0.1:1\"", "server.listen_on", &["the keys here are listen, allow_public"]);
    one("[[masks]]\nhide = true\npath = [\"$.a\"]", "masks[0].path", &["did you mean", "paths"]);
    one("[relay.default_route]\nto = \"https://x.example/\"", "relay.default_route.to", &["has no effect"]);
}

#[test]
fn values_of_the_wrong_kind_are_told_apart() {
    one("[relay]\nbatch = \"many\"", "relay.batch", &["is text, must be a whole number"]);
    one("[relay]\nbatch = -1", "relay.batch", &["must be 0 to"]);
    one("[relay]\nbatch = 4294967296", "relay.batch", &["must be 0 to"]);
    one("[relay]\nlease = 20", "relay.lease", &["is a whole number, must be a length of time"]);
    one("[relay]\nlease = \"20 parsecs\"", "relay.lease", &["is no length of time"]);
    one("[transports.http]\nallow = \"10.0.0.0/8\"", "transports.http.allow", &["must be a list of texts"]);
    one("[transports.http]\nallow_private = 1", "transports.http.allow_private", &["must be true or false"]);
    one("[routes.x]\nto = \"https://x.example/\"\nhttp = 5", "routes.x.http", &["must be a table"]);
    one("[routes.x]\nto = \"https://x.example/\"\non_exhausted = \"blok\"", "routes.x.on_exhausted", &["did you mean", "block"]);
    one("[server]\nlisten = \"localhost\"", "server.listen", &["must be an IP address and a port"]);
}

#[test]
fn relations_are_checked() {
    one("[relay]\nheartbeat = \"7s\"", "relay.heartbeat", &["at most a third of lease"]);
    one("[relay]\nsend_timeout = \"15s1ms\"", "relay.send_timeout", &["must be at most lease"]);
    assert_eq!(print("[databases.a]\nurl = \"postgres://u@h/d\"\n[relay]\nsend_timeout = \"15s\"").code, 0, "on the boundary");
    one(
        "[transports.http]\nconnect_timeout = \"10s\"",
        "transports.http.connect_timeout",
        &["must be less than relay.send_timeout"],
    );
    one(
        "[relay]\nsend_timeout = \"5s\"\n[transports.http]\nconnect_timeout = \"5s\"",
        "transports.http.connect_timeout",
        &["5s", "must be less than relay.send_timeout"],
    );
    one("[routes.x]\nto = \"https://x.example/\"\nretry = { base = \"20m\" }", "routes.x.retry.base", &["at most retry.cap"]);
    one("[transports.http]\nallow = [\"10.0.0.0/99\"]", "transports.http.allow", &[]);
    one(
        "[databases.b]\nurl = \"postgres://other:pw@localhost:5432/db\"\nschema = \"public\"",
        "databases.b",
        &["has the same tables as databases.a"],
    );
    let other_prefix = "[databases.a]\nurl = \"postgres://u@h/d\"\n[databases.b]\nurl = \"postgres://u@h/d\"\nprefix = \"b_\"";
    assert_eq!(print(other_prefix).code, 0);
}

#[test]
fn a_short_send_timeout_asks_for_nothing_that_was_not_written() {
    for (send_timeout, connect_timeout) in [("4s", "2s"), ("5s", "2s 500ms"), ("5s 1ms", "5s")] {
        let dir = Dir::new();
        dir.write("posthouse.toml", &format!("[databases.a]\nurl = \"sqlite:a.db\"\n[relay]\nsend_timeout = \"{send_timeout}\""));
        let shown = ph(&dir, &["relay", "--print-config", "--json"]).code(0).json();
        assert_eq!(shown["transports"]["http"]["connect_timeout"], connect_timeout, "{send_timeout}");
    }
}

#[test]
fn a_relation_with_a_mistyped_key_waits_until_that_is_mended() {
    one(
        "[relay]\nlease = \"6s\"\nheartbeet = \"1s\"\nsend_timeout = \"4s\"\n[transports.http]\nconnect_timeout = \"1s\"",
        "relay.heartbeet",
        &[],
    );
}

#[test]
fn routes_must_lead_somewhere() {
    one("[routes.x]\nconcurrency = 3", "routes.x.to", &["is missing"]);
    one("[routes.x]\nto = \"orders\"", "routes.x.to", &["names no transport"]);
    one("[routes.x]\nto = \"amqp:orders\"", "routes.x.to", &["there is no transport", "amqp"]);
    one("[routes.x]\nto = \"htps://x.example/\"", "routes.x.to", &["did you mean", "https"]);
    one("[routes.x]\nto = \"https:/x.example\"", "routes.x.to", &["is no complete"]);
    one("[routes.x]\nto = \"local:mail\"", "routes.x.to", &["embedded relay"]);
    let named = "[databases.a]\nurl = \"postgres://u@h/d\"\n[transports.internal]\nkind = \"http\"\nallow = [\"10.0.0.0/8\"]\n\
                 [routes.x]\nto = \"internal:http://10.0.0.1/\"\n[routes.\"https://y.example/\"]\nconcurrency = 2";
    print(named).code(0);
}

#[test]
fn databases_are_checked() {
    for (text, path, word) in [
        ("[databases.a]\nprefix = \"p_\"", "databases.a.url", "is missing"),
        ("[databases.a]\nurl = \"localhost\"", "databases.a.url", "is no database URL"),
        ("[databases.a]\nurl = \"mongodb://u:hunter2@h/d\"", "databases.a.url", "names no kind of database"),
        ("[databases.a]\nurl = \"postgres://u:hunter2@h:99999/d\"", "databases.a.url", "is no valid database URL"),
        ("[databases.a]\nurl = \"sqlite:///x.db\"\nschema = \"s\"", "databases.a.schema", "no schemas"),
        ("[databases.a]\nurl = \"postgres://h/d\"\nschema = \"a;drop\"", "databases.a.schema", "a-z, 0-9 and _"),
        ("[databases.a]\nurl = \"postgres://h/d\"\nhouses = 4097", "databases.a.houses", "must be 1 to 4096"),
        ("[databases.a]\nurl = \"postgres://h/d\"\ntables = []", "databases.a.tables", "at least one prefix"),
        ("[databases.a]\nurl = \"postgres://h/d\"\ntables = [\"a_\", \"a_\"]", "databases.a.tables", "twice"),
        ("[databases.a]\nurl = \"postgres://h/d\"\ntables = [\"a_\", \"B\"]", "databases.a.tables", "a-z, 0-9 and _"),
        ("[databases.a]\nurl = \"postgres://h/d\"\nprefix = \"p_\"\ntables = [\"a_\"]", "databases.a.prefix", "one of tables"),
        ("[databases.\"a/b\"]\nurl = \"postgres://h/d\"", "databases.\"a/b\"", "must not contain '/'"),
        (
            "[databases.a]\nurl = \"postgres://h/d\"\ntables = [\"a_\"]\n[databases.b]\nurl = \"postgres://h/d\"\nprefix = \"a_\"",
            "databases.b",
            "same tables",
        ),
    ] {
        let found = problems(text);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].0 == path && found[0].1.contains(word), "{found:?}");
        assert!(!found[0].1.contains("hunter2"), "{found:?}");
    }
}

#[test]
fn a_public_address_must_say_who_may_come() {
    one("[server]\nlisten = \"0.0.0.0:8420\"", "server.listen", &["nothing says who may look", "token", "trusted_proxy_header"]);
    one("[server]\nlisten = \"[::]:8420\"", "server.listen", &["nothing says who may look"]);
    for good in [
        "listen = \"[::1]:8420\"",
        "listen = \"127.0.0.2:1\"",
        "listen = \"0.0.0.0:1\"\nallow_public = true",
        "listen = \"0.0.0.0:1\"\ntoken = \"0123456789abcdef\"",
        "listen = \"0.0.0.0:1\"\ntrusted_proxy_header = \"X-User\"\ntrusted_proxies = [\"10.0.0.0/8\", \"::1\"]\noperators = [\"*\"]",
    ] {
        print(&format!("[databases.a]\nurl = \"postgres://h/d\"\n[server]\n{good}")).code(0);
    }
}

#[test]
fn who_may_come_is_checked() {
    let server = |text: &str, path: &str, words: &[&str]| one(&format!("[server]\n{text}"), &format!("server.{path}"), words);
    server("token = \"0123456789abcde\"", "token", &["has 15 bytes", "16 or more", "openssl rand"]);
    server("token = \"0123456789 abcdef\"", "token", &["printable ASCII"]);
    server("token = \"0123456789abcdef\"\nviewer_token = \"0123456789abcdef\"", "viewer_token", &["the same as server.token"]);
    server("session = \"1s\"", "session", &["1 minute to 90 days"]);
    server("trusted_proxy_header = \"a b\"", "trusted_proxy_header", &["is no name of a header"]);
    server("trusted_proxy_header = \"Cookie\"", "trusted_proxy_header", &["everybody can send it"]);
    server("operators = [\"ann\"]", "operators", &["no effect without trusted_proxy_header"]);
    server(
        "trusted_proxy_header = \"X-User\"\ntrusted_proxies = [\"proxy\"]",
        "trusted_proxies",
        &["neither an IP address nor a network"],
    );
    one("[[masks]]\nhide = false", "masks[0]", &["hides nothing"]);
    one("[[masks]]\npaths = [\"card\"]", "masks[0].paths", &["a path begins with $"]);
}

#[test]
fn variables_and_files_are_put_in() {
    let dir = Dir::new();
    let secret = dir.write("secret", "s3cret\n");
    dir.write(
        "posthouse.toml",
        &format!(
            "[databases.a]\nurl = \"postgres://u@${{H}}/${{D:-db}}?application_name=$${{x}}\"\n\
             [routes.x]\nto = \"https://x.example/\"\nhttp = {{ authorization = \"Bearer ${{file:{}}}\" }}\n\
             [relay]\nbatch = \"${{BATCH}}\"\nidle_poll = \"${{POLL}}\"\n[server]\nallow_public = \"${{PUBLIC}}\"\nlisten = \"0.0.0.0:1\"\n",
            secret.display()
        ),
    );
    let mut command = posthouse(&dir);
    command.env("H", "db.example").env("BATCH", "77").env("POLL", "3s").env("PUBLIC", "true");
    let ran = run(command.args(["relay", "--print-config", "--json"])).code(0);
    let told = ran.json();
    assert_eq!(told["databases"]["a"]["url"], "postgres://u@db.example/db?application_name=${x}");
    assert_eq!(told["relay"]["batch"], 77);
    assert_eq!(told["relay"]["idle_poll"], "3s");
    assert!(!ran.stdout.contains("s3cret"));
}

#[test]
fn every_missing_variable_and_file_is_named() {
    let found = problems(
        "[databases.a]\nurl = \"postgres://${PH_NO_USER}:${PH_NO_PW}@h/d\"\n[relay]\ninstance = \"${file:/nonexistent/x}\"\nbatch = \"${PH_NO_BATCH\"",
    );
    let all = format!("{found:?}");
    for name in ["PH_NO_USER is not set", "PH_NO_PW is not set", "/nonexistent/x", "no closing"] {
        assert!(all.contains(name), "{name}: {all}");
    }
    assert_eq!(found.len(), 4, "{all}");
    one("[relay]\nbatch = \"${PATH}\"", "relay.batch", &["${PATH}", "must be a whole number"]);
}

#[test]
fn no_secret_is_ever_shown() {
    let text = r#"
        secret_key = "hunter2"
        [databases.a]
        url = "postgres://u:hunter2@h/d?password=hunter2&sslmode=bad"
        [databases]
        b = "postgres://u:hunter2@h/d"
        [transports.mq]
        kind = "rabbitmq"
        url = "amqp://u:hunter2@h"
        [routes.x]
        to = "https://u:hunter2@x.example/h?token=hunter2"
        concurrency = 0
        [routes.x.http]
        authorization = 5
        autorization = "hunter2"
        headers = { x-api-key = ["hunter2"] }
    "#;
    let ran = print(text).code(2);
    assert!(!ran.stderr.contains("hunter2") && !ran.stdout.contains("hunter2"), "{}{}", ran.stderr, ran.stdout);
    assert!(ran.stderr.contains("[redacted]"), "{}", ran.stderr);

    // A broken line is not quoted.
    let ran = print("[databases.a]\nurl = \"postgres://u:hunter2@h/d\n").code(2);
    assert!(ran.stderr.contains("line 2") && !ran.stderr.contains("hunter2"), "{}", ran.stderr);

    let good = r#"
        [databases.a]
        url = "postgres://u:hunter2@h/d?password=hunter2"
        [routes.x]
        to = "https://u:hunter2@x.example/h?token=hunter2"
        http = { authorization = "hunter2", headers = { x-api-key = "hunter2" } }
        [relay.default_route.http]
        authorization = "hunter2"
        headers = { x-api-key = "hunter2" }
    "#;
    for args in [&["relay", "--print-config"][..], &["relay", "--print-config", "--json"], &["relay", "--check", "-vvv"]] {
        let dir = Dir::new();
        dir.write("posthouse.toml", good);
        let ran = ph(&dir, args);
        assert!(!ran.stderr.contains("hunter2") && !ran.stdout.contains("hunter2"), "{}{}", ran.stderr, ran.stdout);
    }
}

#[test]
fn the_printed_configuration_is_complete_and_valid() {
    let ran = print("[databases.a]\nurl = \"postgres://u@h/d\"\n[routes.\"a.b\"]\nto = \"https://x.example/\"").code(0);
    for line in [
        "listen = \"127.0.0.1:8420\"",
        "lease = \"20s\"",
        "[transports.http]",
        "[routes.\"a.b\".retry]",
        "prefix = \"posthouse_\"",
    ] {
        assert!(ran.stdout.contains(line), "{line}: {}", ran.stdout);
    }
    assert_eq!(print(&ran.stdout).code(0).stdout, ran.stdout);
}

#[test]
fn without_a_file_one_database_will_do() {
    let dir = Dir::new();
    let ran = ph(&dir, &["relay", "--print-config"]).code(2);
    assert!(ran.stderr.contains("POSTHOUSE_DATABASE_URL") && ran.stderr.contains("--database URL"), "{}", ran.stderr);
    let ran =
        run(posthouse(&dir).args(["relay", "--print-config", "--json"]).env("POSTHOUSE_DATABASE_URL", "mysql://u@h/d")).code(0);
    assert_eq!(ran.json()["databases"]["default"]["url"], "mysql://u@h/d");
    let ran = ph(&dir, &["relay", "--print-config", "--json", "--database", "postgres://u@h/d"]).code(0);
    assert_eq!(ran.json()["databases"]["default"]["url"], "postgres://u@h/d");
    let ran = ph(&dir, &["relay", "--print-config", "--database", "bogus://u:hunter2@h/d"]).code(2);
    assert!(ran.stderr.contains("--database") && !ran.stderr.contains("hunter2"), "{}", ran.stderr);
    let ran = ph(&dir, &["relay", "--print-config", "-c", "nowhere.toml"]).code(2);
    assert!(ran.stderr.contains("nowhere.toml"), "{}", ran.stderr);
}

#[test]
fn a_database_is_chosen_by_name() {
    let dir = Dir::new();
    dir.write("posthouse.toml", "[databases.orders]\nurl = \"postgres://u@h/a\"\n[databases.bills]\nurl = \"postgres://u@h/b\"");
    let ran = ph(&dir, &["relay", "--print-config", "--json", "--database", "bills"]).code(0);
    assert_eq!(ran.json()["databases"].as_object().unwrap().len(), 1);
    let ran = ph(&dir, &["messages", "list"]).code(2);
    assert!(ran.stderr.contains("bills, orders") && ran.stderr.contains("--database NAME"), "{}", ran.stderr);
    let ran = ph(&dir, &["messages", "list", "--database", "order"]).code(2);
    assert!(ran.stderr.contains("did you mean \"orders\"?"), "{}", ran.stderr);
}
