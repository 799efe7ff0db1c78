//! Publishing from other languages by plain SQL: the programs of `examples/sql-contract`, and what docs/sql-contract.md says.

use std::collections::HashSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use sqlx::{Connection as _, Executor as _, Row as _};
use url::Url;

use crate::support::{
    Dir, MySqlDatabase, Ran, Receiver, Running, Schema, Seen, on_postgres, ph, posthouse, run, run_with_stdin, runtime, wait_for,
};

/// Has a house and a hash in the documentation.
const DESTINATION: &str = "订单";
const KEY: &str = "客户-1";

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn documentation() -> String {
    std::fs::read_to_string(repository("docs/sql-contract.md")).unwrap()
}

/// A database with the table of a business.
enum Shop {
    Postgres(Schema),
    MariaDb(MySqlDatabase),
}

impl Shop {
    /// Migrated, with 64 houses; its configuration is in `dir`.
    fn postgres(dir: &Dir, rest: &str) -> Self {
        let schema = Schema::new();
        dir.write(
            "posthouse.toml",
            &format!("[databases.main]\nurl = {:?}\nschema = {:?}\nhouses = 64\n{rest}", schema.url, schema.name),
        );
        ph(dir, &["migrate"]).code(0);
        let orders = "orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL)";
        on_postgres(&schema.url, format!("CREATE TABLE \"{}\".{orders}", schema.name));
        Self::Postgres(schema)
    }

    fn mariadb(dir: &Dir, rest: &str) -> Self {
        let database = MySqlDatabase::new();
        dir.write("posthouse.toml", &format!("[databases.main]\nurl = {:?}\nhouses = 64\n{rest}", database.url));
        ph(dir, &["migrate"]).code(0);
        database.execute(
            "CREATE TABLE orders (id BIGINT AUTO_INCREMENT PRIMARY KEY, customer VARCHAR(255) CHARACTER SET utf8mb4 NOT NULL)",
        );
        Self::MariaDb(database)
    }

    /// As most drivers take it, and in the ways of JDBC and of Go's driver for MySQL.
    fn url(&self, language: Language) -> String {
        let (Self::Postgres(Schema { url, .. }) | Self::MariaDb(MySqlDatabase { url, .. })) = self;
        let mut url = Url::parse(url).unwrap();
        let server = format!("{}:{}", url.host_str().unwrap(), url.port().unwrap());
        let (user, password) = (url.username().to_owned(), url.password().unwrap_or_default().to_owned());
        match (self, language) {
            (Self::Postgres(schema), Language::Java) => {
                format!("jdbc:postgresql://{server}{}?user={user}&password={password}&currentSchema={}", url.path(), schema.name)
            }
            (Self::Postgres(schema), _) => {
                url.query_pairs_mut().append_pair("options", &format!("-csearch_path={}", schema.name));
                url.into()
            }
            (Self::MariaDb(_), Language::Java) => {
                format!("jdbc:mariadb://{server}{}?user={user}&password={password}&sslMode=disable", url.path())
            }
            (Self::MariaDb(_), Language::Go) => format!("{user}:{password}@tcp({server}){}", url.path()),
            (Self::MariaDb(_), _) => url.into(),
        }
    }

    /// The type to cast to for a 64-bit integer.
    fn bigint(&self) -> &'static str {
        match self {
            Self::Postgres(_) => "bigint",
            Self::MariaDb(_) => "SIGNED",
        }
    }

    /// Runs one statement as a client does; how many rows it affected, or the SQLSTATE.
    fn execute(&self, sql: &str) -> Result<u64, String> {
        let (url, sql) = (self.url(Language::Python), sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned())));
        let affected = runtime().block_on(async {
            match self {
                Self::Postgres(_) => {
                    sqlx::PgConnection::connect(&url).await.unwrap().execute(sql).await.map(|r| r.rows_affected())
                }
                Self::MariaDb(_) => {
                    sqlx::MySqlConnection::connect(&url).await.unwrap().execute(sql).await.map(|r| r.rows_affected())
                }
            }
        });
        affected.map_err(|e| match e.as_database_error() {
            Some(d) => d.code().unwrap_or_default().into_owned(),
            None => panic!("{e}"),
        })
    }

    /// The numbers that a query gives: a row each, of the first column.
    fn numbers(&self, sql: &str) -> Vec<i64> {
        let (url, sql) = (self.url(Language::Python), sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned())));
        runtime().block_on(async {
            match self {
                Self::Postgres(_) => {
                    let rows = sqlx::PgConnection::connect(&url).await.unwrap().fetch_all(sql).await.unwrap();
                    rows.iter().map(|row| row.get(0)).collect()
                }
                Self::MariaDb(_) => {
                    let rows = sqlx::MySqlConnection::connect(&url).await.unwrap().fetch_all(sql).await.unwrap();
                    rows.iter().map(|row| row.get(0)).collect()
                }
            }
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Language {
    Python,
    Node,
    Java,
    Go,
}

impl Language {
    const ALL: [Self; 4] = [Self::Python, Self::Node, Self::Java, Self::Go];

    fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Node => "node",
            Self::Java => "java",
            Self::Go => "go",
        }
    }

    /// Those that are installed here. For what is left out there is a line in the output of the tests.
    fn here() -> Vec<Self> {
        Self::ALL.into_iter().filter(|language| language.is_here()).collect()
    }

    fn is_here(self) -> bool {
        let (needed, made): (&[&str], _) = match self {
            Self::Python => (&["python3"], "target/languages/python/made"),
            Self::Node => (&["node", "npm"], "examples/sql-contract/node/node_modules/.package-lock.json"),
            Self::Java => (&["java", "javac", "mvn"], "target/languages/java/made"),
            Self::Go => (&["go"], "target/languages/go/made"),
        };
        let path = std::env::var_os("PATH").unwrap_or_default();
        let missing = needed.iter().find(|program| !std::env::split_paths(&path).any(|dir| dir.join(program).exists()));
        if let Some(missing) = missing {
            // Past the capture of the test's output, which is shown for failed tests only.
            let said = format!("SKIPPED: publishing from {}: there is no {missing} here\n", self.name());
            std::io::stderr().write_all(said.as_bytes()).unwrap();
            return false;
        }
        assert!(repository(made).exists(), "{}: not installed; do it with: scripts/services languages", self.name());
        true
    }

    fn program(self, shop: &Shop) -> Command {
        let postgres = matches!(shop, Shop::Postgres(_));
        let example = |name: &str| repository("examples/sql-contract").join(self.name()).join(name);
        let installed = repository("target/languages").join(self.name());
        let mut command = match self {
            Self::Python => {
                let mut python = Command::new(installed.join("bin/python"));
                python.arg(example(if postgres { "postgres.py" } else { "mariadb.py" }));
                python
            }
            Self::Node => {
                let mut node = Command::new("node");
                node.arg(example(if postgres { "postgres.mjs" } else { "mysql.mjs" }));
                node
            }
            Self::Java => {
                let classes = installed.display();
                let mut java = Command::new("java");
                // These make a short run shorter.
                java.args(["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", &format!("{classes}:{classes}/lib/*")]);
                java.arg(if postgres { "Postgres" } else { "MariaDb" });
                java
            }
            Self::Go => Command::new(installed.join(if postgres { "postgres" } else { "mysql" })),
        };
        // Java reads its arguments in the encoding of the locale.
        command.env("LC_ALL", "C.UTF-8").arg(shop.url(self));
        command
    }
}

/// A message as it is published and expected.
struct Order {
    from: &'static str,
    customer: String,
    content_type: &'static str,
    payload: Vec<u8>,
}

impl Order {
    fn text(from: &'static str, customer: impl Into<String>) -> Self {
        let payload =
            format!("{{\"from\": \"{from}\", \"note\": \"naïve 北京 😀 'it''s' \\\\ % \\\"x\\\" ${{1}} ? %s\"}}").into_bytes();
        Self { from, customer: customer.into(), content_type: "application/json", payload }
    }

    /// Every byte there is, and what is no UTF-8.
    fn binary(from: &'static str, customer: impl Into<String>) -> Self {
        let payload = [&(0..=255).collect::<Vec<u8>>()[..], b"\xff\xc0\x80\0", from.as_bytes()].concat();
        Self { from, customer: customer.into(), content_type: "application/x-order", payload }
    }

    /// Places it with the program of a language.
    fn place(&self, language: Language, shop: &Shop, dir: &Dir, how: &[&str]) -> Ran {
        let file = dir.path().join(crate::support::unique(self.from));
        std::fs::write(&file, &self.payload).unwrap();
        let mut program = language.program(shop);
        run(program.current_dir(dir.path()).args([DESTINATION, &self.customer, self.content_type]).arg(file).args(how))
    }

    /// Publishes it as the library does.
    fn publish(&self, dir: &Dir, more: &[&str]) -> Ran {
        let (kind, header) = (["--type", "order.placed.v1"], ["--header", "shop=北京"]);
        let mut program = posthouse(dir);
        program.args(["publish", DESTINATION, "-", "--key", &self.customer, "--content-type", self.content_type]);
        run_with_stdin(program.args(kind).args(header).args(more), &self.payload)
    }

    #[track_caller]
    fn assert_is(&self, seen: &Seen) {
        let header = |name: &str| seen.headers.get(name).map_or(&b""[..], |v| v.as_bytes());
        assert!(seen.body == self.payload, "{}: {:?}", self.from, String::from_utf8_lossy(&seen.body));
        assert_eq!(header("content-type"), self.content_type.as_bytes(), "{}", self.from);
        assert_eq!(header("posthouse-type"), b"order.placed.v1", "{}", self.from);
        let key: String = self
            .customer
            .bytes()
            .map(|b| if b.is_ascii_graphic() && b != b'%' { char::from(b).into() } else { format!("%{b:02X}") })
            .collect();
        assert_eq!(header("posthouse-key"), key.as_bytes(), "{}", self.from);
    }
}

/// Number in a row of the documented table of hashes: 5 the hash, 6 the house.
fn documented_vector(column: usize) -> i64 {
    let page = documentation();
    let row =
        page.lines().find(|line| line.starts_with(&format!("| `{DESTINATION}` | `{KEY}` |"))).expect("the row of the hashes");
    row.split('|').nth(column).unwrap().trim().parse().unwrap()
}

fn other_languages_publish(place: impl FnOnce(&Dir, &str) -> Shop) {
    let languages = Language::here();
    let (dir, receiver) = (Dir::new(), Receiver::start());
    let rest = format!(
        "[transports.http]\nallow = [\"127.0.0.1\"]\n[routes.{DESTINATION:?}]\nto = \"http://{}/\"\n\
         [relay]\nidle_poll = \"50ms\"\n[server]\nlisten = \"127.0.0.1:0\"\n",
        receiver.address
    );
    let shop = place(&dir, &rest);

    // One customer's orders, each from another language, twice round.
    let mut orders = Vec::new();
    for make in [Order::text, Order::binary] {
        let order = make("rust", KEY);
        order.publish(&dir, &[]).code(0);
        orders.push(order);
        for &language in &languages {
            let order = make(language.name(), KEY);
            assert_eq!(order.place(language, &shop, &dir, &[]).code(0).stdout, "published\n", "{language:?}");
            orders.push(order);
        }
    }
    // The same key has the same place, whoever publishes.
    for (column, expected) in [("house", documented_vector(6)), ("key_hash", documented_vector(5))] {
        let found = shop.numbers(&format!("SELECT CAST({column} AS {}) FROM posthouse_pending ORDER BY id", shop.bigint()));
        let found: Vec<_> = orders.iter().map(|o| o.from).zip(found).collect();
        assert_eq!(found.len(), orders.len());
        assert!(found.iter().all(|(_, number)| *number == expected), "not all have the {column} {expected}: {found:?}");
    }

    // What is no order's key: one whose hash depends on every byte, and on letters that can be written in two ways.
    let once = |name: &str| format!("Zoë-{name} 'é' \\ % 😀");
    std::thread::scope(|scope| {
        for &language in &languages {
            let (shop, dir) = (&shop, &dir);
            scope.spawn(move || {
                let name = language.name();
                let declined = Order::text(name, format!("declined-{name}")).place(language, shop, dir, &["declined"]);
                assert!(declined.code != 0 && declined.stderr.contains("declined"), "{language:?}: {declined:?}");
                let (order, dedup_key) = (Order::text(name, once(name)), format!("once-{name}-é"));
                for said in ["published\n", "published before\n"] {
                    let ran = order.place(language, shop, dir, &["once", &dedup_key]).code(0);
                    assert_eq!(ran.stdout, said, "{language:?}");
                }
                // Nor does the library publish with this dedup key; it takes it for the message's id as well.
                assert_eq!(order.publish(dir, &["--dedup-key", &dedup_key, "--json"]).code(0).json()["message_id"], *dedup_key);
            });
        }
    });
    let count = |sql: &str| shop.numbers(&format!("SELECT CAST(COUNT(*) AS {}) FROM {sql}", shop.bigint()))[0];
    assert_eq!(count("orders WHERE customer LIKE 'declined%'"), 0, "orders of transactions that were rolled back");
    assert_eq!(count("posthouse_outbox WHERE message_key LIKE 'declined%'"), 0, "messages of transactions that were rolled back");
    assert_eq!(count("orders WHERE customer LIKE 'Zoë%'"), 2 * languages.len() as i64, "a used dedup key doesn't stop the order");
    assert_eq!(count("posthouse_outbox"), (orders.len() + languages.len()) as i64);

    let relay = Running::start(&mut posthouse(&dir));
    let ids = || receiver.seen().into_iter().map(|s| s.message_id).collect::<HashSet<_>>();
    wait_for("all messages", || (ids().len() == orders.len() + languages.len()).then_some(()));
    relay.signal("TERM");
    assert_eq!(relay.ended().0, 0);

    // A resend would be no failure.
    let (mut known, mut seen) = (HashSet::new(), receiver.seen());
    seen.retain(|s| known.insert(s.message_id.clone()));
    let (of_one_key, others): (Vec<_>, Vec<_>) = seen.into_iter().partition(|s| !s.message_id.starts_with("once-"));
    let from = |seen: &Seen| orders.iter().position(|o| o.payload == seen.body);
    assert_eq!(of_one_key.iter().map(from).collect::<Vec<_>>(), (0..orders.len()).map(Some).collect::<Vec<_>>(), "in order");
    for (order, seen) in orders.iter().zip(&of_one_key) {
        order.assert_is(seen);
        assert_eq!(seen.headers["shop"].as_bytes(), "北京".as_bytes(), "{}", order.from);
    }
    for language in languages {
        let id = format!("once-{}-%C3%A9", language.name());
        let seen = others.iter().find(|s| s.message_id == id).unwrap_or_else(|| panic!("{id} is not among {others:?}"));
        Order::text(language.name(), once(language.name())).assert_is(seen);
    }
}

#[test]
fn other_languages_publish_on_postgres() {
    other_languages_publish(Shop::postgres);
}

#[test]
fn other_languages_publish_on_mariadb() {
    other_languages_publish(Shop::mariadb);
}

/// Blocks of code on the page, with the language that each names.
fn blocks(page: &str) -> Vec<(&str, &str)> {
    let mut blocks = Vec::new();
    for (n, part) in page.split("\n```").enumerate() {
        // Every other part is inside.
        if n % 2 == 1 {
            let (language, text) = part.split_once('\n').unwrap();
            blocks.push((language, text));
        }
    }
    blocks
}

/// Without the indentation that all lines have.
fn unindented<'a>(lines: &[&'a str]) -> Vec<&'a str> {
    let indent = lines.iter().filter(|l| !l.trim().is_empty()).map(|l| l.len() - l.trim_start().len()).min().unwrap_or(0);
    lines.iter().map(|line| line.get(indent..).unwrap_or("")).collect()
}

#[test]
fn snippets_on_the_page_are_parts_of_the_examples() {
    let page = documentation();
    let blocks = blocks(&page);
    for (name, files) in [
        ("python", ["python/postgres.py", "python/mariadb.py"]),
        ("js", ["node/postgres.mjs", "node/mysql.mjs"]),
        ("java", ["java/Postgres.java", "java/MariaDb.java"]),
        ("go", ["go/postgres/main.go", "go/mysql/main.go"]),
    ] {
        let files = files.map(|file| std::fs::read_to_string(repository("examples/sql-contract").join(file)).unwrap());
        let snippets: Vec<_> = blocks.iter().filter(|(language, _)| *language == name).map(|(_, text)| text).collect();
        assert!(!snippets.is_empty(), "no snippet for {name}");
        for snippet in snippets {
            let wanted = unindented(&snippet.lines().collect::<Vec<_>>());
            let found = files.iter().any(|file| {
                let lines: Vec<_> = file.lines().collect();
                lines.windows(wanted.len()).any(|window| unindented(window) == wanted)
            });
            assert!(found, "in no program of examples/sql-contract/{name}:\n{snippet}");
        }
    }
}

/// What the page says that the tables check, at its boundary.
fn wrong_values_are_refused(place: impl FnOnce(&Dir, &str) -> Shop) {
    let dir = Dir::new();
    let shop = place(&dir, "");
    let insert =
        |columns: &str, values: &str| shop.execute(&format!("INSERT INTO posthouse_message ({columns}) VALUES ({values})"));
    for (columns, values) in [
        ("payload", "'x'"),
        ("destination", "NULL"),
        ("destination", "''"),
        ("destination", "REPEAT('x', 256)"),
        // Bytes, not characters.
        ("destination", "REPEAT('é', 128)"),
        ("destination, message_key", "'d', REPEAT('x', 256)"),
        ("destination, message_id", "'d', ''"),
        ("destination, message_id", "'d', REPEAT('x', 256)"),
        ("destination, type", "'d', REPEAT('x', 256)"),
        ("destination, content_type", "'d', REPEAT('x', 256)"),
        ("destination, headers", "'d', 'shop: 1'"),
        ("destination, payload", "'d', NULL"),
        ("destination, deliver_at", "'d', '9999-06-01'"),
        ("destination, max_attempts", "'d', 0"),
        ("destination, max_attempts", "'d', 10001"),
    ] {
        insert(columns, values).expect_err(&format!("({columns}) VALUES ({values})"));
    }
    let long = "REPEAT('x', 255)";
    let columns = "destination, message_key, message_id, type, content_type, max_attempts, headers";
    assert_eq!(insert(columns, &format!("{long}, {long}, {long}, {long}, {long}, 10000, '[1]'")), Ok(1));
    assert_eq!(insert(columns, "'d', '', 'x', '', '', 1, '{}'"), Ok(1));
    let dedup = |key: &str| shop.execute(&format!("INSERT INTO posthouse_dedup (dedup_key, message_id) VALUES ({key}, 'm')"));
    dedup("REPEAT('x', 256)").expect_err("a dedup key that is too long");
    assert_eq!(dedup(long), Ok(1));
    let of_the_key = dedup(long).expect_err("a dedup key that was used");
    match &shop {
        Shop::Postgres(_) => assert_eq!(of_the_key, "23505"),
        Shop::MariaDb(_) => assert_eq!(of_the_key, "23000"),
    }
    let count = format!("SELECT CAST(COUNT(*) AS {}) FROM posthouse_outbox", shop.bigint());
    assert_eq!(shop.numbers(&count), [2]);
}

#[test]
fn wrong_values_are_refused_on_postgres() {
    wrong_values_are_refused(Shop::postgres);
}

#[test]
fn wrong_values_are_refused_on_mariadb() {
    wrong_values_are_refused(Shop::mariadb);
}

/// The statement with which a consumer remembers a message, for a database.
fn receiving(database: &str) -> String {
    let page = documentation();
    let (_, section) = page.split_once("\n## Receiving once\n").expect("the section");
    let (_, section) = section.split_once(&format!("\n{database}. ")).expect("the paragraph about the database");
    blocks(section)[0].1.to_owned()
}

#[test]
fn a_message_is_received_once_by_sql() {
    for (database, place) in [("PostgreSQL", Shop::postgres as fn(&Dir, &str) -> Shop), ("MySQL and MariaDB", Shop::mariadb)] {
        let dir = Dir::new();
        let (shop, receive) = (place(&dir, ""), receiving(database));
        shop.execute(&format!("BEGIN; {receive} ROLLBACK;")).unwrap();
        assert_eq!(shop.execute(&receive), Ok(1), "{database}: what was rolled back is forgotten");
        let again = if database == "PostgreSQL" { Ok(0) } else { Err("23000".into()) };
        assert_eq!(shop.execute(&receive), again, "{database}");
        assert_listed(&dir);
    }
}

#[test]
fn a_message_is_received_once_by_sql_on_sqlite() {
    let dir = Dir::new();
    dir.write("posthouse.toml", "[databases.main]\nurl = \"sqlite://shop.db\"\n");
    ph(&dir, &["migrate"]).code(0);
    let affected = runtime().block_on(async {
        let mut conn =
            sqlx::SqliteConnection::connect(&format!("sqlite://{}", dir.path().join("shop.db").display())).await.unwrap();
        let mut affected = Vec::new();
        for _ in 0..2 {
            affected.push(conn.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(receiving("SQLite")))).await.unwrap().rows_affected());
        }
        affected
    });
    assert_eq!(affected, [1, 0]);
    assert_listed(&dir);
}

/// One success that happened today.
#[track_caller]
fn assert_listed(dir: &Dir) {
    let listed = ph(dir, &["inbox", "list", "--json"]).code(0).json();
    let [row] = &listed["messages"].as_array().unwrap()[..] else { panic!("{listed}") };
    assert_eq!(
        (&row["consumer"], &row["status"], &row["type"]),
        (&"billing".into(), &"SUCCESS".into(), &"order.placed.v1".into())
    );
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros();
    assert!(u128::from(row["success_us"].as_u64().unwrap_or_default()).abs_diff(now) < 86_400_000_000, "{row}");
}
