//! Many databases and several sets of tables on one relay.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};

use serde_json::Value;

use crate::support::{Dir, MySqlDatabase, Receiver, Running, Schema, on_postgres, ph, posthouse, wait_for};

/// Sets of tables in PostgreSQL and in MariaDB, and SQLite files: 49 in all, and one that can't be reached. With --soak more of the
/// databases are servers.
fn counts() -> (usize, usize, usize) {
    if std::env::var_os("POSTHOUSE_SOAK").is_some() { (20, 20, 9) } else { (5, 3, 41) }
}

/// Passes connections on to a server.
fn forward(listener: TcpListener, to: SocketAddr) {
    std::thread::spawn(move || {
        for here in listener.incoming().map_while(Result::ok) {
            let there = TcpStream::connect(to).unwrap();
            for (mut from, mut to) in [(here.try_clone().unwrap(), there.try_clone().unwrap()), (there, here)] {
                std::thread::spawn(move || {
                    // Either side may go at any time.
                    let _ = io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
            }
        }
    });
}

#[test]
fn fifty_databases_on_one_relay_and_a_dead_one_disturbs_nobody() {
    let (dir, schema, mysql, receiver) = (Dir::new(), Schema::new(), MySqlDatabase::new(), Receiver::start());
    let (postgres, mariadb, files) = counts();
    let prefixes = |letter: char, n: usize| (0..n).map(|i| format!("{letter}{i}_")).collect::<Vec<_>>();
    let (p, m) = (prefixes('p', postgres), prefixes('m', mariadb));
    let name = format!("many{}", std::process::id());
    let mut url = url::Url::parse(&schema.url).unwrap();
    url.query_pairs_mut().append_pair("application_name", &name);
    let server = SocketAddr::from(([127, 0, 0, 1], url.port().unwrap_or(5432)));
    // A port at which nobody answers yet.
    let later = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut dead = url.clone();
    dead.set_host(Some("127.0.0.1")).unwrap();
    dead.set_port(Some(later.port())).unwrap();

    let mut config = format!(
        "[databases.pg]\nurl = \"{url}\"\nschema = {:?}\nhouses = 2\ntables = {p:?}\n\
         [databases.my]\nurl = {:?}\nhouses = 2\ntables = {m:?}\n",
        schema.name, mysql.url,
    );
    for i in 0..files {
        let _ = write!(config, "[databases.file{i}]\nurl = \"sqlite://{i}.db\"\n");
    }
    let reachable = format!("[databases.dead]\nurl = \"{url}\"\nschema = {:?}\nhouses = 2\nprefix = \"dead_\"\n", schema.name);
    let unreachable = reachable.replace(url.as_str(), dead.as_str());
    let rest = format!(
        "[transports.http]\nallow = [\"127.0.0.1\"]\n[routes.orders]\nto = \"http://{}/\"\n[server]\nlisten = \"127.0.0.1:0\"\n",
        receiver.address
    );
    dir.write("posthouse.toml", &format!("{config}{reachable}{rest}"));
    let migrated = ph(&dir, &["migrate", "--json"]).code(0).json();
    let sources: Vec<String> =
        migrated["databases"].as_array().unwrap().iter().map(|d| d["database"].as_str().unwrap().to_owned()).collect();
    assert_eq!(sources.len(), 50, "{sources:?}");
    assert!(sources.iter().any(|s| s == "pg/p0_") && sources.iter().any(|s| s == "my/m0_"), "{sources:?}");
    let publish = |source: &str| {
        ph(&dir, &["--database", source, "publish", "orders", "{}", "--id", source]).code(0);
    };
    sources.iter().for_each(|source| publish(source));
    let several = ph(&dir, &["--database", "pg", "messages", "list"]).code(2);
    assert!(several.stderr.contains("pg/p0_"), "{}", several.stderr);
    let checked = ph(&dir, &["relay", "--check", "--json"]).code(0).json();
    let connections = |kind: &str| -> i64 {
        let all = checked["databases"].as_array().unwrap().iter();
        all.filter(|d| d["url"].as_str().unwrap().starts_with(kind)).map(|d| d["connections"].as_i64().unwrap()).sum()
    };

    dir.write("posthouse.toml", &format!("{config}{unreachable}{rest}"));
    let relay = Running::start(&mut posthouse(&dir));
    let arrived = || receiver.seen().into_iter().map(|s| s.message_id).collect::<BTreeSet<_>>();
    let all_but_dead: BTreeSet<String> = sources.iter().filter(|s| *s != "dead").cloned().collect();
    wait_for("the messages of all that can be reached", || (arrived() == all_but_dead).then_some(()));
    let (status, body) = relay.get("/readyz");
    let told: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &told["databases"]["dead"]["ready"]), (503, &Value::Bool(false)), "{told}");
    assert_eq!(told["databases"]["pg/p0_"]["ready"], true, "{told}");

    forward(TcpListener::bind(later).unwrap(), server);
    wait_for("the message of the one that came back", || arrived().contains("dead").then_some(()));
    relay.wait_ready();
    // No more connections than `relay --check` says.
    let most = connections("postgres");
    let sql = format!(
        "DO $$DECLARE n bigint; BEGIN SELECT count(*) INTO n FROM pg_stat_activity WHERE application_name = '{name}'; \
         IF n NOT BETWEEN 1 AND {most} THEN RAISE EXCEPTION '% connections', n; END IF; END$$"
    );
    on_postgres(&schema.url, sql);
    assert_eq!(receiver.seen().len(), 50, "none was sent twice");
    relay.signal("TERM");
    assert_eq!(relay.ended().0, 0);
}
