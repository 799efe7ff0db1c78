//! What docs/sql-contract.md says of plain SQL.

use sqlx::{Connection as _, Executor as _, Row as _};
use url::Url;

use crate::languages::Language;
use crate::support::{Dir, MySqlDatabase, Schema, on_postgres, ph, repository, runtime};

pub(crate) fn documentation() -> String {
    std::fs::read_to_string(repository("docs/sql-contract.md")).unwrap()
}

/// A database with the table of a business.
pub(crate) enum Shop {
    Postgres(Schema),
    MariaDb(MySqlDatabase),
}

impl Shop {
    /// Migrated, with 64 houses; its configuration is in `dir`.
    pub(crate) fn postgres(dir: &Dir, rest: &str) -> Self {
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

    pub(crate) fn mariadb(dir: &Dir, rest: &str) -> Self {
        let database = MySqlDatabase::new();
        dir.write("posthouse.toml", &format!("[databases.main]\nurl = {:?}\nhouses = 64\n{rest}", database.url));
        ph(dir, &["migrate"]).code(0);
        database.execute(
            "CREATE TABLE orders (id BIGINT AUTO_INCREMENT PRIMARY KEY, customer VARCHAR(255) CHARACTER SET utf8mb4 NOT NULL)",
        );
        Self::MariaDb(database)
    }

    /// As most drivers take it, and in the ways of JDBC and of Go's driver for MySQL.
    pub(crate) fn url(&self, language: Language) -> String {
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
    pub(crate) fn bigint(&self) -> &'static str {
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
    pub(crate) fn numbers(&self, sql: &str) -> Vec<i64> {
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
