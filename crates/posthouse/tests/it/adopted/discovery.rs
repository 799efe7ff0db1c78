//! Which tables a mapping means, and whether it fits them.

use std::time::Duration;

use posthouse::{Adopted, AdoptedCoverage, AdoptedPreset, Error, Outbox};

use super::layouts::user_strategy_export;
use super::{beside, jobs, mapping, on_both, relay};
use crate::relay::{Log, Recorder};
use crate::support::{MySql, TestDb, bounded};

on_both!(a_mapping_that_does_not_fit_is_refused_with_all_its_problems, missing_indexes_are_told_with_the_statement_to_run);

async fn check<T: TestDb>(outbox: &Outbox<T::Db>, mapping: &Adopted) -> Result<AdoptedCoverage, Error> {
    relay::<T>(outbox, mapping, Recorder(Log::default())).check().await
}

#[tokio::test]
async fn suffixes_are_discovered_and_gaps_and_differences_told() {
    bounded(async {
        let mut exports = Adopted::preset(AdoptedPreset::MqState);
        exports.lease = Some(Duration::from_secs(3));
        for (numbers, gaps) in
            [(["000", "001", "002", "003"], vec![]), (["001", "002", "004", "005"], vec!["user_strategy_export_003"])]
        {
            let outbox = MySql::fresh().await;
            let tables: String = numbers.iter().map(|n| user_strategy_export(&format!("user_strategy_export_{n}"))).collect();
            let others = "CREATE TABLE user_strategy_export_001_bak (id int); CREATE TABLE user_strategy_export_x (id int); \
                          CREATE TABLE userxstrategyxexportx009 (id int);";
            MySql::execute(outbox.pool(), tables + others).await;
            let coverage = check::<MySql>(&outbox, &exports).await.unwrap();
            let expected: Vec<String> = numbers.iter().map(|n| format!("user_strategy_export_{n}")).collect();
            assert_eq!(coverage.tables, expected);
            assert_eq!(coverage.gaps, gaps);
            assert!(coverage.differences.is_empty() && coverage.missing_indexes.is_empty(), "{coverage:?}");

            MySql::execute(outbox.pool(), "ALTER TABLE user_strategy_export_002 ADD COLUMN more INT".into()).await;
            let coverage = check::<MySql>(&outbox, &exports).await.unwrap();
            let first = &coverage.tables[0];
            assert_eq!(coverage.differences, [format!("user_strategy_export_002 differs from {first}: with more int(11)")]);
        }
    })
    .await;
}

async fn a_mapping_that_does_not_fit_is_refused_with_all_its_problems<T: TestDb>() {
    let outbox = T::fresh().await;
    jobs::<T>(&outbox).await;
    let mut it = mapping();
    it.destination = Some("test:{nowhere}".into());
    it.version = Some("note".into());
    it.created = Some("body".into());
    it.state.sent = Some(posthouse::StateCode::Text("SENT".into()));
    let error = check::<T>(&outbox, &it).await.unwrap_err().to_string();
    for part in [
        "adopted.jobs.destination: there is no column \"nowhere\"; there are id, grp",
        "adopted.jobs.version: note is of type",
        "adopted.jobs.created: body is of type",
        "adopted.jobs.state.sent: SENT does not fit into state",
    ] {
        assert!(error.contains(part), "{part}\n{error}");
    }
    let mut it = mapping();
    it.id = Some("grp".into());
    let error = check::<T>(&outbox, &it).await.unwrap_err().to_string();
    assert!(error.contains("adopted.jobs.id: grp has no primary key or unique index on it alone"), "{error}");
    it = mapping();
    it.table = "jobs".into();
    let error = check::<T>(&outbox, &it).await.unwrap_err().to_string();
    assert!(error.contains("means no table"), "{error}");
    it = mapping();
    it.lease = Some(Duration::from_secs(1));
    it.payload = None;
    let error = check::<T>(&outbox, &it).await.unwrap_err().to_string();
    assert!(error.contains("adopted.jobs.lease") && error.contains("adopted.jobs.payload"), "{error}");
}

async fn missing_indexes_are_told_with_the_statement_to_run<T: TestDb>() {
    let outbox = T::fresh().await;
    let table = beside::<T>(&outbox, "job");
    T::execute(
        outbox.pool(),
        format!("CREATE TABLE {table} (id varchar(40) PRIMARY KEY, grp varchar(40), body text, state int)"),
    )
    .await;
    let mut it = mapping();
    it.key = Some("grp".into());
    let coverage = check::<T>(&outbox, &it).await.unwrap();
    assert_eq!(coverage.missing_indexes.len(), 2, "{coverage:?}");
    for statement in &coverage.missing_indexes {
        assert!(statement.starts_with("CREATE INDEX "), "{statement}");
        T::execute(outbox.pool(), statement.clone()).await;
    }
    let coverage = check::<T>(&outbox, &it).await.unwrap();
    assert!(coverage.missing_indexes.is_empty(), "{coverage:?}");
}
