//! What was delivered long ago goes, what isn't finished never does.

mod archive;
mod beside;
mod log;
mod partitions;
mod s3;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use posthouse::retention::{Report, Retention};
use posthouse::store::{MessageFilter, MessageStatus};
use posthouse::{Message, RetentionSettings};

use crate::store::tables::{DEADLINE, Fresh, StoreDb};

/// Ids per partition.
const PARTITION: i64 = 4_000_000;

/// An hour: what is published in a test is younger.
fn settings() -> RetentionSettings {
    RetentionSettings::after(Some(Duration::from_secs(3_600)))
}

/// A directory of a test's own.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        let dir = std::env::temp_dir().join(format!("posthouse-archive-{:016x}", fastrand::u64(..)));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn settings(&self) -> RetentionSettings {
        let mut settings = settings();
        settings.archive = Some(format!("file://{}", self.0.display()));
        settings
    }

    /// Its files of messages.
    fn files(&self) -> Vec<PathBuf> {
        let mut out = Vec::new();
        let mut left = vec![self.0.clone()];
        while let Some(dir) = left.pop() {
            for entry in std::fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    left.push(path);
                } else if path.extension().is_some_and(|end| end == "zst") {
                    out.push(path);
                }
            }
        }
        out.sort();
        out
    }

    /// The ids in its files, in their order.
    fn ids(&self) -> Vec<i64> {
        let mut out = Vec::new();
        for file in self.files() {
            let bytes = std::fs::read(&file).unwrap();
            let rows = posthouse::retention::read(&bytes, posthouse::ArchiveFormat::Ndjson).unwrap();
            out.extend(rows.map(|row| row.unwrap().id));
        }
        out
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        // What is left in the directory for temporary files does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Messages of every status, published long ago and just now.
struct Scene {
    /// Delivered, old.
    sent: Vec<i64>,
    /// Old, and not delivered: fresh, waiting for a retry, being sent, FAILED, delayed.
    open: Vec<i64>,
    /// Just published: the first delivered, the second not.
    young: Vec<i64>,
}

impl Scene {
    fn failed(&self) -> i64 {
        self.open[3]
    }

    fn remaining(&self) -> BTreeSet<i64> {
        self.open.iter().chain(&self.young).copied().collect()
    }
}

/// `apart`: the young ones are in the next partition, where there are such.
async fn scene<T: StoreDb>(db: &Fresh<T>, apart: bool) -> Scene {
    let old = db.publish((0..11).map(|n| Message::to("d").key(format!("k{n}")).json(&n))).await;
    let open = vec![old[0], old[2], old[5], old[6], old[10]];
    let sent: Vec<i64> = old.iter().copied().filter(|id| !open.contains(id)).collect();
    deliver(db, &sent).await;
    let statuses = [("PENDING", "{PAST}", 1), ("SENDING", "{PAST}", 2), ("FAILED", far::<T>(), 3), ("PENDING", far::<T>(), 4)];
    for (status, due, n) in statuses {
        db.run(&format!("UPDATE {{pending}} SET status = '{status}', due_at = {due} WHERE id = {}", open[n])).await;
    }
    age(db).await;
    if apart {
        next_partition(db).await;
    }
    let young = db.publish([Message::to("d"), Message::to("d")]).await;
    deliver(db, &young[..1]).await;
    Scene { sent, open, young }
}

fn far<T: StoreDb>() -> &'static str {
    if T::NAME == "sqlite" { "253402214400000" } else { "'9999-12-31 00:00:00'" }
}

/// All messages that there are were published long ago.
async fn age<T: StoreDb>(db: &Fresh<T>) {
    db.run("UPDATE {message} SET created_at = {PAST}").await;
}

async fn deliver<T: StoreDb>(db: &Fresh<T>, ids: &[i64]) {
    let list: Vec<String> = ids.iter().map(i64::to_string).collect();
    db.run(&format!("DELETE FROM {{pending}} WHERE id IN ({})", list.join(", "))).await;
}

/// The next ids are in the next partition.
async fn next_partition<T: StoreDb>(db: &Fresh<T>) {
    match T::NAME {
        // Not by ALTER TABLE, which would wait for transactions that a test has open.
        "postgres" => {
            let sequence = db.outbox.tables().name("message_id_seq").replace('"', "");
            db.ints(&format!("SELECT setval('{sequence}', {})", PARTITION - 1)).await;
            0
        }
        "mysql" => db.run(&format!("ALTER TABLE {{message}} AUTO_INCREMENT = {PARTITION}")).await,
        _ => 0,
    };
}

fn retention<T: StoreDb>(db: &Fresh<T>, settings: RetentionSettings) -> Retention {
    Retention::new(db.store.clone(), "orders", settings).unwrap()
}

async fn round<T: StoreDb>(db: &Fresh<T>, settings: RetentionSettings) -> Report {
    retention(db, settings).run(&mut |_| ControlFlow::Continue(())).await.unwrap()
}

/// A round that ends at its n-th step; whether it came so far.
async fn cut_off<T: StoreDb>(db: &Fresh<T>, settings: RetentionSettings, n: usize) -> bool {
    let mut steps = 0;
    let report = retention(db, settings)
        .run(&mut |_| {
            steps += 1;
            if steps > n { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .await
        .unwrap();
    assert_eq!(report.problems, Vec::<String>::new());
    report.unfinished
}

/// Every message that isn't delivered can be loaded, shown, and is listed once; and so in the view.
async fn all_is_found<T: StoreDb>(db: &Fresh<T>, scene: &Scene, when: &str) {
    let open: BTreeSet<i64> = scene.open.iter().chain(&scene.young[1..]).copied().collect();
    let ids: Vec<i64> = open.iter().copied().collect();
    let loaded: BTreeSet<i64> =
        db.store.load(&ids).await.unwrap().into_iter().map(|(id, found)| found.map(|_| id).unwrap()).collect();
    assert_eq!(loaded, open, "{when}");
    let list = async |status| {
        let filter = MessageFilter { status, limit: 1_000, ..MessageFilter::default() };
        let rows = db.store.list(&filter).await.unwrap().rows;
        rows.iter().map(|row| (row.id, row.status.clone())).collect::<Vec<_>>()
    };
    let listed: Vec<i64> = list(None).await.into_iter().filter(|row| row.1 != "SENT").map(|row| row.0).collect();
    assert_eq!(listed, open.iter().rev().copied().collect::<Vec<_>>(), "{when}: listed");
    let failed: Vec<i64> = list(Some(MessageStatus::Failed)).await.into_iter().map(|row| row.0).collect();
    assert_eq!(failed, [scene.failed()], "{when}");
    let viewed = db.ints("SELECT id FROM {outbox} WHERE status <> 'SENT' ORDER BY id").await;
    assert_eq!(viewed.into_iter().flatten().collect::<Vec<_>>(), ids, "{when}: in the view");
    for id in ids {
        assert_eq!(db.store.show(id).await.unwrap().map(|m| m.row.id), Some(id), "{when}");
    }
}

/// A store whose calls go through another pool: another instance.
fn another<T: StoreDb>(db: &Fresh<T>) -> std::sync::Arc<dyn posthouse::store::Store> {
    db.outbox.store(DEADLINE)
}
