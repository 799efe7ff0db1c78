//! SQL blocks, run against the databases that they name, one after the other.

use std::fmt::Write as _;

use sqlx::{Connection, Executor};

use super::markdown::{Block, blocks, pages};
use crate::support::{Dir, MySqlDatabase, Schema, ph, runtime, unique};

/// A kind of database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Postgres,
    MySql,
    Sqlite,
}

/// The databases that a block is for: those that a comment names, or the text right above it. All, where neither names one.
pub(crate) fn databases(block: &Block) -> Vec<Kind> {
    let paragraph = block.before.trim().rsplit("\n\n").next().unwrap_or_default().to_lowercase();
    let said = block.directive.strip_prefix("sql ").map_or(paragraph, str::to_lowercase);
    let of = |kind: Kind, names: &[&str]| names.iter().any(|name| said.contains(name)).then_some(kind);
    let named: Vec<Kind> =
        [of(Kind::Postgres, &["postgres"]), of(Kind::MySql, &["mysql", "mariadb"]), of(Kind::Sqlite, &["sqlite"])]
            .into_iter()
            .flatten()
            .collect();
    match (named.is_empty(), block.directive.starts_with("sql ")) {
        (true, false) => vec![Kind::Postgres, Kind::MySql, Kind::Sqlite],
        _ => named,
    }
}

/// Tables of applications that pages speak of.
const SETUP: &str = "CREATE TABLE orders (id BIGINT, sku VARCHAR(100), count INT, amount BIGINT);\n\
                     CREATE TABLE producer_message (id BIGINT);\n";

/// A database for all pages.
struct Place {
    kind: Kind,
    name: String,
    schema: Option<Schema>,
    mysql: Option<MySqlDatabase>,
    url: String,
}

impl Place {
    fn new(kind: Kind, name: String) -> Self {
        let (schema, mysql) = match kind {
            Kind::Postgres => (Some(Schema::new()), None),
            Kind::MySql => (None, Some(MySqlDatabase::new())),
            Kind::Sqlite => (None, None),
        };
        let url = match (&schema, &mysql) {
            (Some(schema), _) => schema.url.clone(),
            (_, Some(database)) => database.url.clone(),
            _ => format!("sqlite:{name}.db"),
        };
        Self { kind, name, schema, mysql, url }
    }

    fn config(&self) -> String {
        let mut out = format!(
            "[databases.{}]\nurl = {:?}\nhouses = {}\n",
            self.name,
            self.url,
            if self.kind == Kind::Sqlite { 1 } else { 4 }
        );
        if let Some(schema) = &self.schema {
            let _ = writeln!(out, "schema = {:?}", schema.name);
        }
        out
    }

    /// Runs blocks one after the other; what failed.
    fn run(&self, dir: &Dir, all: &[Block]) -> Vec<String> {
        runtime().block_on(async {
            match self.kind {
                Kind::Postgres => {
                    let mut conn = sqlx::PgConnection::connect(&self.url).await.unwrap();
                    let path = format!("SET search_path TO {}", self.schema.as_ref().unwrap().name);
                    sqlx::raw_sql(sqlx::AssertSqlSafe(path)).execute(&mut conn).await.unwrap();
                    self.each::<sqlx::Postgres>(&mut conn, all).await
                }
                Kind::MySql => self.each::<sqlx::MySql>(&mut sqlx::MySqlConnection::connect(&self.url).await.unwrap(), all).await,
                Kind::Sqlite => {
                    let file = format!("sqlite:{}", dir.path().join(format!("{}.db", self.name)).display());
                    self.each::<sqlx::Sqlite>(&mut sqlx::SqliteConnection::connect(&file).await.unwrap(), all).await
                }
            }
        })
    }

    async fn each<DB: sqlx::Database>(&self, conn: &mut DB::Connection, all: &[Block]) -> Vec<String>
    where
        for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    {
        let mut wrong = Vec::new();
        execute::<DB>(conn, SETUP.to_owned()).await.unwrap();
        for block in all {
            let sql = if block.text.contains("GRANT ") { self.granting(&block.text) } else { block.text.clone() };
            if let Err(why) = execute::<DB>(conn, sql).await {
                wrong.push(format!("{} ({:?}): {why}", block.place(), self.kind));
                // Ends a transaction that the block began; without one it is refused.
                let _ = execute::<DB>(conn, "ROLLBACK".to_owned()).await;
            }
        }
        wrong
    }

    /// Grants to an account of this run's own, which doesn't stay.
    fn granting(&self, text: &str) -> String {
        let account = unique("book");
        let mut text = text.to_owned();
        let names: Vec<String> = text
            .split(" TO ")
            .skip(1)
            .map(|rest| rest.chars().take_while(|c| c.is_alphanumeric() || matches!(c, '_' | '\'' | '@' | '%')).collect())
            .collect();
        match self.kind {
            Kind::MySql => {
                for name in &names {
                    text = text.replace(name.as_str(), &format!("'{account}'@'%'"));
                    let database = format!("{}.", name.split('\'').nth(1).unwrap_or_default());
                    let own = url::Url::parse(&self.mysql.as_ref().unwrap().url).unwrap().path().trim_matches('/').to_owned();
                    text = text.replace(&format!("ON {database}"), &format!("ON {own}."));
                    text = text.replace("ON shop.", &format!("ON {own}."));
                }
                format!("CREATE USER '{account}'@'%';\n{text}\nDROP USER '{account}'@'%'")
            }
            _ => {
                for name in &names {
                    text = text.replace(&format!(" TO {name}"), &format!(" TO {account}"));
                }
                format!("BEGIN;\nCREATE ROLE {account};\n{text}\nROLLBACK")
            }
        }
    }
}

async fn execute<DB: sqlx::Database>(conn: &mut DB::Connection, sql: String) -> Result<(), sqlx::Error>
where
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
{
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(conn).await.map(drop)
}

#[test]
fn sql_is_understood_by_the_databases_that_it_is_for() {
    let (dir, pages) = (Dir::new(), pages());
    let places = [Kind::Postgres, Kind::MySql, Kind::Sqlite].map(|kind| Place::new(kind, format!("{kind:?}").to_lowercase()));
    dir.write("posthouse.toml", &places.iter().map(Place::config).collect::<String>());
    ph(&dir, &["migrate"]).code(0);
    let (mut wrong, mut tried) = (Vec::new(), 0);
    for place in &places {
        let meant =
            |block: &Block| block.info == "sql" && !block.directive.starts_with("run") && databases(block).contains(&place.kind);
        let all: Vec<Block> = pages.iter().flat_map(blocks).filter(meant).collect();
        tried += all.len();
        wrong.extend(place.run(&dir, &all));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(tried > 20, "hardly any SQL was found");
}
