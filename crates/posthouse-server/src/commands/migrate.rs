//! `posthouse migrate`.

use serde_json::json;

use super::load;
use crate::cli::Global;
use crate::database::Database;
use crate::failure::Failure;
use crate::output::{self, clean};

pub(crate) async fn run(global: &Global, print: bool) -> Result<(), Failure> {
    let config = load(global)?;
    let databases = config.sources().iter().map(|(name, d)| Database::open_or_create(name, d)).collect::<Result<Vec<_>, _>>()?;
    if print {
        let sql = databases.iter().map(|d| (&d.name, d.migration_sql()));
        if global.json {
            output::json(&json!({ "sql": sql.collect::<std::collections::BTreeMap<_, _>>() }));
        } else {
            for (name, sql) in sql {
                output::say(&format!("-- database {}\n{sql}", clean(name)));
            }
        }
        return Ok(());
    }
    let mut done = Vec::new();
    let mut worst: Option<Failure> = None;
    for database in &databases {
        // One that fails doesn't keep the others from being migrated.
        match one(database).await {
            Ok((version, houses)) => {
                if !global.json {
                    output::say(&format!(
                        "{}: schema version {version}, {}",
                        clean(&database.name),
                        output::count(houses.into(), "house")
                    ));
                }
                done.push(json!({ "database": database.name, "schema_version": version, "houses": houses }));
            }
            Err(failure) => {
                worst = Some(match worst {
                    None => failure,
                    Some(other) => other.and(failure),
                });
            }
        }
    }
    if let Some(failure) = worst {
        return Err(failure);
    }
    if global.json {
        output::json(&json!({ "databases": done }));
    }
    Ok(())
}

async fn one(database: &Database) -> Result<(i32, u16), Failure> {
    database.reach().await?;
    database.migrate().await?;
    let (_, version, houses) = database.ready().await?;
    Ok((version, houses))
}
