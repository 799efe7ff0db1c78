//! Whether a relay stays fast while somebody holds an old snapshot, or a transaction that has published and doesn't end.

use posthouse::Message;

use crate::PinnedArgs;
use crate::database::{CONNECTIONS, Kind, Rig, must};
use crate::drain::{fill, relayed};
use crate::report::{Compared, Figure, Report, Row};

/// For `--help`.
pub(crate) const ABOUT: &str = "\
A relay with a transport that confirms at once sends N messages, several times, while somebody holds

  nothing         for comparison
  a snapshot      a transaction that has read, and stays open: rows that are deleted meanwhile can't be removed
  a publication   a transaction that has published, and stays open: its message is older than all that follow

A row's limit is the first pass with nothing held; `last` is the last pass: a queue table that is searched from its start gets
slower from pass to pass.";

pub(crate) async fn run(kind: Kind, args: &PinnedArgs, report: &mut Report) {
    match kind {
        Kind::Postgres => measure::<sqlx::Postgres>(args, report).await,
        Kind::Mysql => measure::<sqlx::MySql>(args, report).await,
        Kind::Sqlite => report.skip("sqlite: a writer that doesn't end keeps all others out there".into()),
    }
}

#[derive(Debug, Clone, Copy)]
enum Held {
    Nothing,
    Snapshot,
    Publication,
}

async fn measure<DB: Rig>(args: &PinnedArgs, report: &mut Report) {
    let mut limit = None;
    for held in [Held::Nothing, Held::Snapshot, Held::Publication] {
        let outbox = DB::fresh(CONNECTIONS).await;
        let mut tx = must("begin", outbox.begin().await);
        match held {
            Held::Nothing => {}
            Held::Snapshot => must("snapshot", DB::snapshot(&outbox, &mut tx).await),
            Held::Publication => {
                must("publish", tx.publish(Message::to("bench").payload("held")).await);
            }
        }
        let mut rates = Vec::new();
        for _ in 0..args.passes {
            fill(&outbox, args.n, args.payload, Some(1_000)).await;
            rates.push(relayed(&outbox, args.n).await);
        }
        must("rollback", tx.rollback().await);
        DB::remove(outbox).await;
        let what = match held {
            Held::Nothing => "nothing held",
            Held::Snapshot => "a snapshot held",
            Held::Publication => "a publication held",
        };
        let first = *limit.get_or_insert(rates[0]);
        report.add(Row {
            database: DB::KIND.name(),
            what: format!("drain, {what}"),
            unit: "messages/s",
            compared: Some(Compared::new(&rates, &vec![first; rates.len()])),
            figures: vec![
                Figure { name: "first", title: "first", value: rates[0] },
                Figure { name: "last", title: "last", value: rates[rates.len() - 1] },
            ],
        });
    }
}
