//! `posthouse doctor`: each thing that can be wrong, in turn, and what it says to do.

use serde_json::Value;

use crate::support::{Dir, MySqlDatabase, Ran, Running, Schema, on_mysql, on_postgres, ph, posthouse, run};

fn doctor(dir: &Dir) -> Ran {
    ph(dir, &["doctor", "--json"])
}

/// What was found under this name, as `severity: text → fix`, one per finding.
fn found(told: &Value, about: &str, check: &str) -> Vec<String> {
    let all = told["examined"].as_array().unwrap();
    let one = all.iter().find(|e| e["about"] == about).unwrap_or_else(|| panic!("{about} in {told}"));
    let text = |f: &Value, key: &str| f[key].as_str().unwrap_or_default().to_owned();
    let findings = one["findings"].as_array().unwrap().iter().filter(|f| f["check"] == check);
    findings.map(|f| format!("{}: {} → {}", text(f, "severity"), text(f, "text"), text(f, "fix"))).collect()
}

/// The only finding under this name; it must be of this severity and contain these texts.
#[track_caller]
fn assert_found(told: &Value, about: &str, check: &str, severity: &str, texts: &[&str]) {
    let all = found(told, about, check);
    let [one] = all.as_slice() else { panic!("{check}: {all:?} in {told}") };
    assert!(one.starts_with(&format!("{severity}: ")), "{one}");
    for text in texts {
        assert!(one.contains(text), "{text:?} is missing in: {one}");
    }
}

#[test]
fn postgres_each_fault_is_named_with_its_cure() {
    let (dir, schema) = (Dir::new(), Schema::new());
    let main = "database main";
    let name = &schema.name;
    let routes = "[routes.known]\nto = \"http://127.0.0.1:9/\"\n[transports.http]\nallow = [\"127.0.0.1\"]\n[server]\nlisten = \"127.0.0.1:0\"\n";
    dir.write("posthouse.toml", &schema.config(routes));
    let told = doctor(&dir).code(1).json();
    assert_found(&told, main, "migration", "error", &["no tables", "posthouse migrate"]);
    ph(&dir, &["migrate"]).code(0);
    // Nothing relays yet: a warning.
    let told = doctor(&dir).code(0).json();
    assert_eq!((&told["ok"], &told["worst"]), (&true.into(), &"warning".into()), "{told}");
    assert_found(&told, main, "instances", "warning", &["no instance relays", "posthouse relay"]);
    for fine in ["connection", "migration", "version", "privileges", "indexes", "publishing", "vacuum", "clock", "partitions"] {
        assert_found(&told, main, fine, "ok", &[]);
    }
    // With a relay.
    let relay = Running::start(&mut posthouse(&dir));
    relay.wait_ready();
    dir.write("posthouse.toml", &schema.config(&routes.replace("127.0.0.1:0", &relay.address)));
    let told = doctor(&dir).code(0).json();
    assert_found(&told, main, "instances", "ok", &["1 instance alive"]);
    assert_found(&told, main, "houses", "ok", &[]);
    assert_found(&told, "relay", "relay", "ok", &[]);
    relay.signal("TERM");
    relay.ended();
    // What people break.
    ph(&dir, &["publish", "nowhere", "{}", "--any-destination"]).code(0);
    on_postgres(
        &schema.url,
        format!(
            "DROP INDEX {name}.posthouse_pending_due; \
             UPDATE {name}.posthouse_house SET house = house; \
             ALTER TABLE {name}.posthouse_pending SET (autovacuum_enabled = false); \
             UPDATE {name}.posthouse_message SET created_at = created_at - interval '100 days'; \
             INSERT INTO {name}.posthouse_pending (house, id, destination, size) VALUES (77, 1000, 'known', 0), (-1, 1001, 'known', 0); \
             DROP TRIGGER posthouse_enqueue ON {name}.posthouse_message"
        ),
    );
    let told = doctor(&dir).code(1).json();
    let index = format!("CREATE INDEX \"posthouse_pending_due\" ON \"{name}\".\"posthouse_pending\" (house, due_at, id) WHERE");
    assert_found(&told, main, "indexes", "error", &[&index]);
    assert_found(&told, main, "vacuum", "warning", &["autovacuum is off", "RESET (autovacuum_enabled)"]);
    assert_found(&told, main, "growth", "warning", &["goes back 100 days", "[retention]"]);
    assert_found(&told, main, "destinations", "error", &["1 message for \"nowhere\"", "[routes.\"nowhere\"]"]);
    assert_found(&told, main, "houses", "error", &["1 in house 77", "1 in house -1", "posthouse houses resize 4"]);
    assert_found(&told, main, "publishing", "error", &["trigger"]);
    // The statement it gives mends it.
    let fix = found(&told, main, "indexes")[0].split("→ run ").nth(1).unwrap().to_owned();
    on_postgres(&schema.url, fix);
    assert_found(&doctor(&dir).code(1).json(), main, "indexes", "ok", &[]);
    // An account that may only look.
    let user = format!("{name}_u");
    on_postgres(
        &schema.url,
        format!(
            "CREATE ROLE {user} LOGIN PASSWORD 'posthouse'; GRANT USAGE ON SCHEMA {name} TO {user}; GRANT SELECT ON ALL TABLES IN SCHEMA {name} TO {user}"
        ),
    );
    let mut url = url::Url::parse(&schema.url).unwrap();
    url.set_username(&user).unwrap();
    url.set_password(Some("posthouse")).unwrap();
    dir.write("posthouse.toml", &schema.config(routes).replace(&format!("{:?}", schema.url), &format!("{:?}", url.as_str())));
    let ran = doctor(&dir).code(1);
    let told = ran.json();
    assert_found(&told, main, "privileges", "error", &["DELETE on", "ownership of", "the account that migrated"]);
    assert!(!ran.stdout.contains("posthouse@") && !ran.stdout.contains(":posthouse"), "no passwords: {}", ran.stdout);
    on_postgres(&schema.url, format!("DROP OWNED BY {user}; DROP ROLE {user}"));
}

#[test]
fn mysql_what_is_missing_is_named_with_its_cure() {
    let (dir, database) = (Dir::new(), MySqlDatabase::new());
    dir.write("posthouse.toml", &format!("[databases.main]\nurl = {:?}\n[server]\nlisten = \"127.0.0.1:0\"\n", database.url));
    ph(&dir, &["migrate"]).code(0);
    let main = "database main";
    let told = doctor(&dir).code(0).json();
    for fine in ["connection", "migration", "version", "privileges", "indexes", "publishing", "clock", "partitions"] {
        assert_found(&told, main, fine, "ok", &[]);
    }
    database
        .execute("ALTER TABLE posthouse_pending DROP KEY pending_key; DROP TABLE posthouse_kept; DROP TRIGGER posthouse_enqueue");
    let told = doctor(&dir).code(1).json();
    assert_found(&told, main, "tables", "error", &["posthouse_kept"]);
    assert_found(&told, main, "publishing", "error", &["trigger"]);
    assert_found(&told, main, "indexes", "error", &["ADD KEY pending_key (house, key_hash, id)"]);
    let fix = found(&told, main, "indexes")[0].split("→ run ").nth(1).unwrap().to_owned();
    database.execute(&fix);
    assert_found(&doctor(&dir).code(1).json(), main, "indexes", "ok", &[]);
    // An account that may only look.
    let user = format!("u{}", fastrand::u32(..));
    let name = database.url.rsplit('/').next().unwrap().to_owned();
    on_mysql(
        &database.url,
        format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'posthouse'; GRANT SELECT ON {name}.* TO '{user}'@'%'"),
    );
    let mut url = url::Url::parse(&database.url).unwrap();
    url.set_username(&user).unwrap();
    url.set_password(Some("posthouse")).unwrap();
    dir.write("posthouse.toml", &format!("[databases.main]\nurl = {:?}\n", url.as_str()));
    let told = doctor(&dir).code(1).json();
    assert_found(&told, main, "privileges", "error", &["UPDATE on `posthouse_pending`", "ALTER on"]);
    on_mysql(&database.url, format!("DROP USER '{user}'@'%'"));
}

#[test]
fn sqlite_and_what_cannot_be_reached() {
    let dir = Dir::new();
    let config = "[databases.main]\nurl = \"sqlite://a.db\"\n[transports.amqp]\nkind = \"rabbitmq\"\nurl = \"amqp://u:hunter2@127.0.0.1:1/v\"\n\
                  [server]\nlisten = \"127.0.0.1:1\"\n";
    dir.write("posthouse.toml", config);
    ph(&dir, &["migrate"]).code(0);
    let ran = doctor(&dir).code(3);
    let told = ran.json();
    assert_found(&told, "transport amqp", "connection", "error", &["127.0.0.1:1: can't be reached", "start it"]);
    assert_found(&told, "relay", "relay", "warning", &["posthouse relay"]);
    for fine in ["connection", "migration", "version", "privileges", "indexes", "publishing", "clock", "file"] {
        assert_found(&told, "database main", fine, "ok", &[]);
    }
    assert!(!ran.stdout.contains("hunter2") && !ran.stderr.contains("hunter2"), "{ran:?}");
    dir.write("posthouse.toml", "[databases.main]\nurl = \"postgres://u:hunter2@127.0.0.1:1/d\"\n");
    let ran = doctor(&dir).code(3);
    assert_found(&ran.json(), "database main", "connection", "error", &["can't be reached"]);
    assert!(!ran.stdout.contains("hunter2") && !ran.stderr.contains("hunter2"), "{ran:?}");
    // For people.
    let ran = run(posthouse(&dir).arg("doctor")).code(3);
    assert!(ran.stdout.contains("→ start it") && ran.stdout.contains("1 error"), "{}", ran.stdout);
}

#[test]
fn completions_are_for_every_shell() {
    let dir = Dir::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = ph(&dir, &["completions", shell]).code(0).stdout;
        assert!(script.contains("doctor") && script.contains("requeue"), "{shell}");
    }
    ph(&dir, &["completions", "cmd.exe"]).code(2);
}
