//! What `posthouse doctor` asks.

use sqlx::PgConnection;

use super::migrate::{PARTITION_SIZE, ahead, ready, templates, version};
use crate::Error;
use crate::store::{Examination, Finding, LogFacts, Tables, expected_indexes, expected_tables};

/// Dead rows of the pending set that vacuum lets come together, from its table's settings; ten times as many are too many.
const DEAD_ROWS: i64 = 200_000;

/// SQLSTATE of a missing privilege.
const DENIED: &str = "42501";

pub(super) async fn examine(conn: &mut PgConnection, tables: &Tables) -> Result<Examination, Error> {
    let (server, number, now_ms): (String, i32, i64) = sqlx::query_as(
        "SELECT 'PostgreSQL ' || current_setting('server_version'), current_setting('server_version_num')::int, \
                (extract(epoch FROM clock_timestamp()) * 1000)::bigint",
    )
    .fetch_one(&mut *conn)
    .await?;
    let mut out = Examination::new(server, now_ms);
    out.supported(number >= 130_000, "PostgreSQL 13");
    let Some(schema_version) = version(conn, tables).await? else { return Ok(out) };
    let houses: i32 = sqlx::query_scalar(tables.sql("SELECT houses FROM {meta}")).fetch_one(&mut *conn).await?;
    out.schema = Some((schema_version, u16::try_from(houses).unwrap_or(0)));
    let there = tables_there(conn, tables, &mut out).await?;
    privileges(conn, tables, &there, &mut out).await?;
    indexes(conn, tables, &there, &mut out).await?;
    // An account without the right to look at the sequence is told of in the privileges.
    out.partitions_ahead = match ahead(conn, tables).await {
        Ok((last, parts)) => Some(ready(last / PARTITION_SIZE, &parts) as u32),
        Err(Error::Database(e)) if e.as_database_error().and_then(|d| d.code()).as_deref() == Some(DENIED) => None,
        Err(e) => return Err(e),
    };
    let problems = super::upkeep::problems(conn, tables).await?;
    out.publishing(problems);
    vacuum(conn, tables, &mut out).await?;
    let oldest = sqlx::query_as(
        "SELECT format('process %s (%s, %s)', pid, coalesce(usename, '?'), coalesce(state, '?')), \
                (extract(epoch FROM clock_timestamp() - xact_start) / 60)::bigint \
           FROM pg_stat_activity WHERE xact_start IS NOT NULL AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) \
             AND backend_type <> 'autovacuum worker' \
         UNION ALL SELECT format('prepared transaction %s', gid), (extract(epoch FROM clock_timestamp() - prepared) / 60)::bigint \
           FROM pg_prepared_xacts \
         ORDER BY 2 DESC LIMIT 1",
    )
    .fetch_optional(&mut *conn)
    .await?;
    out.transactions(oldest, "end it: SELECT pg_terminate_backend(PROCESS), or ROLLBACK PREPARED");
    out.log = log(conn, tables).await?;
    Ok(out)
}

/// The tables of migration that are there, each with its qualified name.
async fn tables_there(
    conn: &mut PgConnection,
    tables: &Tables,
    out: &mut Examination,
) -> Result<(Vec<String>, Vec<String>), Error> {
    let names = expected_tables(&templates());
    let qualified: Vec<String> = names.iter().map(|n| tables.name(n)).collect();
    let there: Vec<bool> = sqlx::query_scalar(
        "SELECT to_regclass(n) IS NOT NULL FROM unnest($1::text[]) WITH ORDINALITY AS u(n, place) ORDER BY place",
    )
    .bind(&qualified)
    .fetch_all(conn)
    .await?;
    let missing: Vec<&str> = qualified.iter().zip(&there).filter(|(_, is)| !**is).map(|(n, _)| n.as_str()).collect();
    if !missing.is_empty() {
        out.findings.push(missing_tables(&missing));
    }
    let mut found = (Vec::new(), Vec::new());
    for ((name, qualified), _) in names.into_iter().zip(qualified).zip(there).filter(|(_, is)| *is) {
        found.0.push(name);
        found.1.push(qualified);
    }
    Ok(found)
}

fn missing_tables(missing: &[&str]) -> Finding {
    Finding::error("tables", format!("missing: {}", missing.join(", ")), "run `posthouse migrate`")
}

async fn privileges(
    conn: &mut PgConnection,
    tables: &Tables,
    there: &(Vec<String>, Vec<String>),
    out: &mut Examination,
) -> Result<(), Error> {
    // The log is never updated.
    let mut missing: Vec<String> = sqlx::query_scalar(
        "SELECT p || ' on ' || n FROM unnest($1::text[]) n CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) p \
          WHERE NOT has_table_privilege(n, p) AND NOT (n = $2 AND p = 'UPDATE') ORDER BY 1",
    )
    .bind(&there.1)
    .bind(tables.name("message"))
    .fetch_all(&mut *conn)
    .await?;
    let owns: Option<bool> =
        sqlx::query_scalar("SELECT pg_has_role(c.relowner, 'USAGE') FROM pg_class c WHERE c.oid = to_regclass($1)")
            .bind(tables.name("message"))
            .fetch_optional(&mut *conn)
            .await?;
    if owns == Some(false) {
        missing.push(format!("ownership of {} (to make and remove partitions)", tables.name("message")));
    }
    let creates: Option<bool> = sqlx::query_scalar(
        "SELECT has_schema_privilege(n.oid, 'CREATE') FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass($1)",
    )
    .bind(tables.name("message"))
    .fetch_optional(conn)
    .await?;
    if creates == Some(false) {
        missing.push(format!("CREATE on schema {} (for partitions)", tables.schema().unwrap_or("public")));
    }
    out.privileges(&missing, "relay with the account that migrated, or GRANT it the role of that account");
    Ok(())
}

async fn indexes(
    conn: &mut PgConnection,
    tables: &Tables,
    there: &(Vec<String>, Vec<String>),
    out: &mut Examination,
) -> Result<(), Error> {
    let valid: Vec<(String, bool)> = sqlx::query_as(
        "SELECT c.relname, i.indisvalid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid \
          WHERE i.indrelid IN (SELECT to_regclass(n) FROM unnest($1::text[]) n)",
    )
    .bind(&there.1)
    .fetch_all(conn)
    .await?;
    let wanted = expected_indexes(&templates()).into_iter().filter(|i| there.0.contains(&i.table));
    let missing = wanted.filter(|i| !valid.iter().any(|(name, valid)| *valid && *name == tables.text(&i.name)));
    let statements: Vec<String> = missing.map(|i| tables.text(&i.make)).collect();
    out.indexes(&statements);
    Ok(())
}

async fn vacuum(conn: &mut PgConnection, tables: &Tables, out: &mut Examination) -> Result<(), Error> {
    let found: Option<(bool, i64, Option<i64>)> = sqlx::query_as(
        "SELECT current_setting('autovacuum')::bool AND NOT coalesce(c.reloptions::text LIKE '%autovacuum_enabled=false%', false), \
                s.n_dead_tup, (extract(epoch FROM clock_timestamp() - greatest(s.last_autovacuum, s.last_vacuum)) / 60)::bigint \
           FROM pg_stat_user_tables s JOIN pg_class c ON c.oid = s.relid WHERE s.relid = to_regclass($1)",
    )
    .bind(tables.name("pending"))
    .fetch_optional(conn)
    .await?;
    let Some((on, dead, ago)) = found else { return Ok(()) };
    let table = tables.name("pending");
    out.findings.push(if !on {
        Finding::warning(
            "vacuum",
            format!("autovacuum is off for {table}: delivered messages leave rows behind that every sweep reads"),
            format!("ALTER TABLE {table} RESET (autovacuum_enabled), and turn on the server's setting autovacuum"),
        )
    } else if dead > DEAD_ROWS {
        let last = ago.map_or_else(|| "there was none yet".into(), |minutes| format!("the last one was {minutes} minutes ago"));
        Finding::warning(
            "vacuum",
            format!("autovacuum lags: {dead} dead rows in {table}, {last}"),
            format!("look for old transactions and for too few or too slow workers (autovacuum_max_workers); VACUUM {table} helps at once"),
        )
    } else {
        Finding::ok("vacuum", format!("{dead} dead rows in the pending set"))
    });
    Ok(())
}

async fn log(conn: &mut PgConnection, tables: &Tables) -> Result<Option<LogFacts>, Error> {
    // Plan: both ends of the primary key, over the partitions; sizes from the catalogue.
    let found: Option<(i64, i64, i64, i64)> = sqlx::query_as(tables.sql(
        "SELECT a.id, b.id, (extract(epoch FROM a.created_at) * 1000)::bigint, (extract(epoch FROM b.created_at) * 1000)::bigint \
           FROM (SELECT id, created_at FROM {message} ORDER BY id LIMIT 1) a, (SELECT id, created_at FROM {message} ORDER BY id DESC LIMIT 1) b",
    ))
    .fetch_optional(&mut *conn)
    .await?;
    let Some((first, last, first_ms, last_ms)) = found else { return Ok(None) };
    let bytes: i64 = sqlx::query_scalar(
        "SELECT coalesce(sum(pg_total_relation_size(inhrelid)), 0)::bigint FROM pg_inherits WHERE inhparent = to_regclass($1)",
    )
    .bind(tables.name("message"))
    .fetch_one(conn)
    .await?;
    Ok(Some(LogFacts { first, last, first_ms, last_ms, bytes }))
}
