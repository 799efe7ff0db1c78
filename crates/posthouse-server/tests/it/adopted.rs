//! Adopted tables in the runs of groups.

use crate::support::{Dir, MySqlDatabase, Receiver, Running, on_mysql, ph, posthouse, wait_for};

/// Two tables of another application with two rows each, and a receiver that its invoices go to.
pub(crate) struct Prizes {
    pub(crate) dir: Dir,
    database: MySqlDatabase,
    pub(crate) receiver: Receiver,
}

impl Prizes {
    pub(crate) fn new() -> Self {
        let (dir, database, receiver) = (Dir::new(), MySqlDatabase::new(), Receiver::start());
        for table in ["user_strategy_export_001", "user_strategy_export_002"] {
            let sql = format!(
                "CREATE TABLE {table} (id BIGINT AUTO_INCREMENT PRIMARY KEY, u_id VARCHAR(32), award_name VARCHAR(64), \
                 uuid VARCHAR(128) NOT NULL UNIQUE, mq_state TINYINT NULL, create_time DATETIME NOT NULL DEFAULT '2020-01-01', \
                 update_time DATETIME NOT NULL DEFAULT CURRENT_TIMESTAMP, KEY state (mq_state, id)); \
                 INSERT INTO {table} (u_id, award_name, uuid, mq_state) VALUES ('1', 'lamp', '{table}-a', NULL), ('2', 'book', '{table}-b', 2)"
            );
            on_mysql(&database.url, sql);
        }
        Self { dir, database, receiver }
    }

    /// The mapping, Posthouse's own tables in a group of their own, and what else is wanted.
    pub(crate) fn configure(&self, dir: &Dir, rest: &str) {
        let (url, to) = (&self.database.url, self.receiver.address);
        let text = format!(
            "[databases.lottery]\nurl = {url:?}\nhouses = 2\n[transports.http]\nallow = [\"127.0.0.1\"]\n\
             [routes.invoices]\nto = \"http://{to}/\"\n[adopted.prizes]\npreset = \"mq_state\"\ndestination = \"invoices\"\nid = \"id\"\n\
             payload = {{ columns = [\"u_id\", \"award_name\"] }}\n[server]\nlisten = \"127.0.0.1:0\"\n[[groups]]\nname = \"own\"\ntables = [\"posthouse_\"]\n{rest}"
        );
        dir.write("posthouse.toml", &text);
    }

    pub(crate) fn sent(&self) -> Vec<String> {
        let mut ids: Vec<String> = self.receiver.seen().into_iter().map(|s| s.message_id).collect();
        ids.sort_unstable();
        ids
    }
}

pub(crate) const ALL: [&str; 4] =
    ["user_strategy_export_001-a", "user_strategy_export_001-b", "user_strategy_export_002-a", "user_strategy_export_002-b"];

#[test]
fn adopted_tables_that_a_group_names_are_scanned_in_its_runs_alone() {
    let w = Prizes::new();
    w.configure(&w.dir, "[[groups]]\nname = \"prizes\"\ntables = [\"prizes\"]\ntrigger = \"manual\"\n");
    ph(&w.dir, &["migrate"]).code(0);
    let checked = ph(&w.dir, &["relay", "--check", "--json"]).code(0).json();
    assert_eq!(checked["adopted"][0]["group"], "prizes", "{checked}");
    assert_eq!((&checked["groups"][0]["houses"], &checked["groups"][1]["houses"]), (&"all".into(), &"-".into()), "{checked}");
    let relay = Running::start(&mut posthouse(&w.dir));
    relay.wait_ready();
    // Long enough for two scans, if it were scanned all the time: own messages pass meanwhile.
    ph(&w.dir, &["publish", "invoices", "{}", "--id", "own"]).code(0);
    wait_for("an own message", || (w.sent() == ["own"]).then_some(()));
    let ran = ph(&w.dir, &["groups", "run", "prizes", "--json"]).code(0).json()["databases"][0].clone();
    assert_eq!((&ran["status"], &ran["delivered"]), (&"DONE".into(), &4.into()), "{ran}");
    assert_eq!(w.sent(), [&["own"][..], &ALL[..]].concat());
    let again = ph(&w.dir, &["groups", "run", "prizes", "--json"]).code(0).json()["databases"][0].clone();
    assert_eq!((&again["status"], &again["messages"]), (&"DONE".into(), &0.into()), "{again}");
    relay.signal("TERM");
    assert_eq!(relay.ended().0, 0);
}

#[test]
fn adopted_tables_of_a_continuous_group_are_scanned_all_the_time() {
    let w = Prizes::new();
    w.configure(&w.dir, "[[groups]]\nname = \"prizes\"\ntables = [\"prizes\"]\n");
    ph(&w.dir, &["migrate"]).code(0);
    let relay = Running::start(&mut posthouse(&w.dir));
    relay.wait_ready();
    wait_for("all prizes", || (w.sent() == ALL).then_some(()));
    relay.signal("TERM");
    assert_eq!(relay.ended().0, 0);
}

#[test]
fn what_a_group_says_of_adopted_tables_is_checked() {
    let w = Prizes::new();
    for (groups, path, word) in [
        ("[[groups]]\nname = \"x\"\ntables = [\"prices\"]\n", "groups.x.tables", "did you mean"),
        ("[[groups]]\nname = \"x\"\ntables = [\"prizes\"]\nhouses = \"0-1\"\n", "groups.x.houses", "adopted ones alone"),
        (
            "[[groups]]\nname = \"x\"\ntables = [\"prizes\"]\n[[groups]]\nname = \"y\"\ntables = [\"prizes\"]\n",
            "groups.y.tables",
            "another group",
        ),
    ] {
        w.configure(&w.dir, groups);
        let told = ph(&w.dir, &["relay", "--print-config"]).code(2).stderr;
        assert!(told.contains(path) && told.contains(word) && told.contains("1 problem"), "{told}");
    }
}
