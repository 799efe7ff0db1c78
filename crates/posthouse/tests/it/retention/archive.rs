//! Nothing goes before it is in the archive.

use std::ops::ControlFlow;
use std::time::Duration;

use posthouse::retention::{Progress, Retention};
use posthouse::store::{LogRow, Shelf, Step};
use posthouse::{ArchiveFormat, Message};

use super::{Dir, age, all_is_found, cut_off, retention, round, scene};
use crate::store::tables::{Fresh, StoreDb, on_all_stores, on_store};

on_all_stores!(what_is_in_the_archive_is_what_was_in_the_log, rows_that_go_one_by_one_are_archived_once);
on_store!(postgres_only, Postgres, what_can_not_be_written_stays);
on_store!(postgres_too, Postgres, what_can_not_be_read_back_stays, what_is_missing_in_the_archive_stays);
on_store!(mysql_too, MySql, what_can_not_be_read_back_stays, what_is_missing_in_the_archive_stays);

async fn what_is_in_the_archive_is_what_was_in_the_log<T: StoreDb>(db: &Fresh<T>) {
    let (scene, dir) = (scene(db, true).await, Dir::new());
    let odd = db
        .publish([
            Message::to("d").payload((0..=255_u8).collect::<Vec<_>>()).typed("odd").header("a", "b\"\u{2028}").header("c", "d"),
            Message::to("d").key("k\u{1F40E}").max_attempts(7).content_type("text/plain"),
            Message::to("d").payload(vec![b'x'; 300_000]),
        ])
        .await;
    super::deliver(db, &odd).await;
    // The first partition is over, and so are these of the second.
    age(db).await;
    super::deliver(db, &[scene.young[1]]).await;
    let mut wanted: Vec<i64> = scene.sent.iter().chain(&scene.young).chain(&odd).copied().collect();
    wanted.sort_unstable();
    let rows: Vec<LogRow> = db.store.retention().rows(Shelf::Message, &wanted).await.unwrap();
    assert_eq!(rows.len(), wanted.len());
    assert!(
        rows.iter().any(|row| row.payload.len() == 256 && row.headers.is_some())
            && rows.iter().any(|r| r.max_attempts == Some(7))
    );

    let report = round(db, dir.settings()).await;
    assert_eq!((report.messages(), report.problems.len()), (wanted.len() as i64, 0), "{report:?}");
    let mut found = Vec::new();
    for file in dir.files() {
        let bytes = std::fs::read(&file).unwrap();
        found.extend(posthouse::retention::read(&bytes, ArchiveFormat::Ndjson).unwrap().map(Result::unwrap));
        let name = file.file_name().unwrap().to_str().unwrap();
        let manifest = std::fs::read(file.with_file_name(format!("{name}.json"))).unwrap();
        let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
        assert_eq!((&manifest["file"], &manifest["bytes"]), (&name.into(), &bytes.len().into()));
        assert!(file.starts_with(dir.0.join("orders/message")), "{}", file.display());
    }
    assert_eq!(found, rows);
    assert_eq!(report.files as usize, dir.files().len());

    let verdicts = retention(db, dir.settings()).verify(100).await.unwrap();
    assert_eq!(verdicts.iter().map(|v| v.file.amount).sum::<i64>(), wanted.len() as i64);
    assert!(verdicts.iter().all(|v| v.problem.is_none()), "{verdicts:?}");
    let last = dir.files().pop().unwrap();
    let mut bytes = std::fs::read(&last).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&last, bytes).unwrap();
    let bad: Vec<_> = retention(db, dir.settings()).verify(100).await.unwrap().into_iter().filter_map(|v| v.problem).collect();
    assert!(bad.len() == 1 && bad[0].contains("checksum") && bad[0].contains(last.to_str().unwrap()), "{bad:?}");
    std::fs::remove_file(&last).unwrap();
    let bad = retention(db, dir.settings()).verify(1).await.unwrap();
    assert!(bad[0].problem.as_deref().unwrap().ends_with("is gone"), "{bad:?}");

    // As the other format.
    if cfg!(feature = "parquet") {
        let more = db.publish([Message::to("d").key("k").json(&1), Message::to("d").header("a", "b").json(&2)]).await;
        super::deliver(db, &more).await;
        age(db).await;
        let rows = db.store.retention().rows(Shelf::Message, &more).await.unwrap();
        let mut settings = dir.settings();
        settings.format = ArchiveFormat::Parquet;
        let report = round(db, settings.clone()).await;
        assert_eq!((report.removed, report.files), (2, 1), "{report:?}");
        let file = retention(db, settings).verify(1).await.unwrap().remove(0);
        assert!(file.problem.is_none() && file.file.location.ends_with(".parquet"), "{file:?}");
        let bytes = std::fs::read(file.file.location.strip_prefix("file://").unwrap()).unwrap();
        let found: Vec<LogRow> =
            posthouse::retention::read(&bytes, ArchiveFormat::Parquet).unwrap().map(Result::unwrap).collect();
        assert_eq!(found, rows);
    }
}

/// Cut off at every step, and with one that is delivered meanwhile.
async fn rows_that_go_one_by_one_are_archived_once<T: StoreDb>(db: &Fresh<T>) {
    let (scene, dir) = (scene(db, false).await, Dir::new());
    // While it is written; when it was; when its rows were removed and that isn't noted.
    for n in [0, 1, 0] {
        assert!(cut_off(db, dir.settings(), n).await);
        all_is_found(db, &scene, &format!("cut off at step {n}")).await;
        let archived = dir.ids();
        let left = db.ints("SELECT id FROM {message}").await;
        let safe = |id: &i64| archived.contains(id) || left.contains(&Some(*id));
        assert!(scene.sent.iter().all(safe), "what isn't in the archive is in the log");
    }
    assert!(!cut_off(db, dir.settings(), 100).await);
    assert_eq!(dir.ids(), scene.sent);
    assert_eq!(db.int("SELECT count(*) FROM {message}").await, 7);
    assert!(round(db, dir.settings()).await.is_idle());

    // A process that died before it wrote what it had noted; two more of its messages are delivered by now.
    let store = db.store.retention();
    let (low, high) = (scene.open[0], scene.open[2]);
    let mut noted = store.archives(&posthouse::store::ArchiveFilter { limit: 1, ..Default::default() }).await.unwrap().remove(0);
    noted.location = format!("file://{}/orders/message/noted.ndjson.zst", dir.0.display());
    (noted.low, noted.high, noted.amount, noted.written_ms, noted.removed_ms) = (low, high, 1, None, None);
    store.note(&noted).await.unwrap();
    super::deliver(db, &[low, scene.open[1], scene.open[4]]).await;
    assert_eq!(round(db, dir.settings()).await.removed, 3);
    let verdicts = retention(db, dir.settings()).verify(10).await.unwrap();
    assert!(verdicts.iter().all(|v| v.problem.is_none() && v.file.removed_ms.is_some()), "{verdicts:?}");
    let noted = verdicts.iter().find(|v| v.file.location.ends_with("noted.ndjson.zst")).unwrap();
    assert_eq!((noted.file.low, noted.file.high, noted.file.amount), (low, scene.open[1], 2), "those that it was for");
    let mut all: Vec<i64> = scene.sent.iter().copied().chain([low, scene.open[1], scene.open[4]]).collect();
    all.sort_unstable();
    let mut found = dir.ids();
    found.sort_unstable();
    assert_eq!(found, all, "each once");

    // Few young ones make no file of their own yet.
    let id = db.publish_one(Message::to("d")).await;
    super::deliver(db, &[id]).await;
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let mut soon = dir.settings();
    soon.sent = Some(Duration::from_secs(1));
    let slow = Duration::from_secs(1) + Duration::from_secs(1) / 7;
    let report = round(db, soon.clone()).await;
    if report.files == 0 {
        assert_eq!(db.int(&format!("SELECT count(*) FROM {{message}} WHERE id = {id}")).await, 1);
    }
    crate::support::wait_for("it to go", crate::support::SOON, async || {
        tokio::time::sleep(slow / 10).await;
        round(db, soon.clone()).await;
        db.int(&format!("SELECT count(*) FROM {{message}} WHERE id = {id}")).await == 0
    })
    .await;
}

/// A full disk or a directory that isn't one: nothing is lost, and when it is mended all goes on.
async fn what_can_not_be_written_stays<T: StoreDb>(db: &Fresh<T>) {
    let (scene, dir) = (scene(db, true).await, Dir::new());
    let inside = dir.0.join("orders");
    std::fs::write(&inside, "a file").unwrap();
    for _ in 0..2 {
        let report = round(db, dir.settings()).await;
        assert_eq!((report.problems.len(), report.messages()), (1, 0), "{report:?}");
        assert!(report.problems[0].contains("can't be written"), "{report:?}");
        all_is_found(db, &scene, "unwritable").await;
    }
    assert_eq!(db.store.retention().retired(1).await.unwrap()[0].step, Step::Kept);
    assert_eq!(db.store.retention().count(0).await.unwrap(), 6, "all of it is there");
    std::fs::remove_file(&inside).unwrap();
    assert_eq!(round(db, dir.settings()).await.messages(), 6);
    assert_eq!(dir.ids(), scene.sent);

    let wrong = Retention::new(db.store.clone(), "../x", dir.settings()).unwrap_err();
    assert!(wrong.to_string().contains("\"../x\""), "{wrong}");
}

/// A round that ends when the partition is in the archive, and nothing was read back yet.
async fn archived<T: StoreDb>(db: &Fresh<T>, dir: &Dir) {
    let archived = Progress::Noted(0, Step::Archived);
    let cut = retention(db, dir.settings())
        .run(&mut |p| if p == archived { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        .await
        .unwrap();
    assert!(cut.unfinished);
}

/// Each file is as it was written, and yet the archive has fewer messages than are to go.
async fn what_is_missing_in_the_archive_stays<T: StoreDb>(db: &Fresh<T>) {
    let (scene, dir) = (scene(db, true).await, Dir::new());
    archived(db, &dir).await;
    let store = db.store.retention();
    let filter = posthouse::store::ArchiveFilter { part: Some(0), limit: 10, ..Default::default() };
    store.forget(store.archives(&filter).await.unwrap()[0].id).await.unwrap();
    let report = round(db, dir.settings()).await;
    assert_eq!((report.problems.len(), report.messages()), (1, 0), "{report:?}");
    assert!(report.problems[0].contains("0 messages of partition 0 are in the archive, and 6 should be"), "{report:?}");
    assert_eq!(store.count(0).await.unwrap(), 6, "all of it is there");
    all_is_found(db, &scene, "missing").await;
    // Written anew.
    assert_eq!(round(db, dir.settings()).await.messages(), 6);
    assert_eq!(store.archives(&filter).await.unwrap().iter().map(|file| file.amount).sum::<i64>(), 6);
}

async fn what_can_not_be_read_back_stays<T: StoreDb>(db: &Fresh<T>) {
    let (scene, dir) = (scene(db, true).await, Dir::new());
    archived(db, &dir).await;
    let file = dir.files().remove(0);
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    let report = round(db, dir.settings()).await;
    assert_eq!((report.problems.len(), report.messages()), (1, 0), "{report:?}");
    assert!(report.problems[0].contains("checksum"), "{report:?}");
    assert_eq!(db.store.retention().count(0).await.unwrap(), 6, "all of it is there");
    all_is_found(db, &scene, "damaged").await;
    // Written anew.
    assert_eq!(round(db, dir.settings()).await.messages(), 6);
    assert_eq!(std::fs::read(&file).unwrap(), bytes);
    assert!(retention(db, dir.settings()).verify(10).await.unwrap().iter().all(|v| v.problem.is_none()));
}
