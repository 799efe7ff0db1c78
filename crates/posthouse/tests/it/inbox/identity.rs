//! Ids of every kind, and messages without one.

use posthouse::inbox::{Handled, Incoming};
use posthouse::store::{InboxFilter, InboxStatus};
use posthouse::{Error, ErrorKind, MissingId};

use super::{Fixture, at, process, quick};
use crate::support::{TestDb, on_all_databases};

on_all_databases!(
    ids_differ_by_any_byte,
    without_an_id_it_is_kept,
    without_an_id_its_content_is_its_id,
    without_an_id_it_is_refused,
    odd_bytes_are_kept,
);

async fn ids_differ_by_any_byte<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let (long, longer) = ("x".repeat(254), "x".repeat(255));
    let ids = [
        "a", "A", "a ", " a", "ä", "ae", "Ä", "ａ", "ß", "ss", "😀", "😁", "é", "e\u{301}", "a\n", "1", "01", "1.0", &long,
        &longer,
    ];
    for id in ids {
        assert_eq!(process::<T>(&f.inbox, &f.effects, &named(id)).await.unwrap(), Handled::Processed, "{id:?}");
    }
    for id in ids {
        assert_eq!(process::<T>(&f.inbox, &f.effects, &named(id)).await.unwrap(), Handled::Duplicate, "{id:?}");
        assert_eq!(f.shown(id).await.row.message_id, id);
    }
    assert_eq!(f.count(InboxStatus::Success).await, ids.len() as i64);
}

fn named(id: &str) -> Incoming {
    Incoming::new(id, "7")
}

async fn all<T: TestDb>(f: &Fixture<T>) -> Vec<String> {
    let filter = InboxFilter { limit: 100, ..InboxFilter::default() };
    f.inbox.store().list(&filter).await.unwrap().rows.into_iter().map(|r| r.message_id).collect()
}

/// Messages whose ids can't be stored.
fn nameless() -> Vec<Incoming> {
    let nameless = || Incoming::without_id([0xff, 0]).typed("t").key("k");
    vec![nameless(), named("").typed("empty"), named("a\u{0}b").typed("nul"), named(&"x".repeat(256)).typed("long")]
}

async fn without_an_id_it_is_kept<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    for incoming in nameless() {
        for _ in 0..2 {
            assert_eq!(f.process(&incoming).await, Handled::Failed);
        }
    }
    let ids = all(&f).await;
    assert_eq!(ids.len(), 8, "no two of them can be told to be the same");
    for id in ids {
        let shown = f.shown(&id).await;
        assert_eq!(shown.row.status, InboxStatus::Failed);
        let error = shown.row.last_error.unwrap();
        assert!(error.contains("message id"), "{error}");
        let source = shown.row.source.unwrap_or_default();
        match shown.row.kind.as_str() {
            "t" => assert_eq!((shown.payload.as_deref(), shown.key.as_deref()), (Some(&[0xff, 0][..]), Some("k"))),
            "nul" => assert_eq!(source, r#"{"exact":{"message_id":"a\u0000b"}}"#),
            "long" => assert!(source.contains(&"x".repeat(256)), "{source}"),
            _ => {}
        }
    }
    assert_eq!(f.effects().await, 0);
}

async fn without_an_id_its_content_is_its_id<T: TestDb>() {
    let mut settings = quick();
    settings.missing_id = MissingId::Hash;
    let f = Fixture::<T>::with(settings).await;
    for incoming in nameless() {
        at(process::<T>(&f.inbox, "nowhere", &incoming).await.unwrap());
    }
    // Nowhere is no table, so all of them wait; what counts is that each is one message.
    assert_eq!(all(&f).await.len(), 4);
    let incoming = Incoming::without_id("once");
    assert_eq!(f.process(&incoming).await, Handled::Processed);
    assert_eq!(f.process(&incoming).await, Handled::Duplicate);
    assert_eq!(f.process(&incoming.clone().key("k")).await, Handled::Processed);
    let mut tx = f.inbox.outbox().begin().await.unwrap();
    assert!(!f.inbox.first_time(&mut tx, &incoming).await.unwrap());
}

async fn without_an_id_it_is_refused<T: TestDb>() {
    let mut settings = quick();
    settings.missing_id = MissingId::Reject;
    let f = Fixture::<T>::with(settings).await;
    for incoming in nameless() {
        let refused = process::<T>(&f.inbox, &f.effects, &incoming).await.unwrap_err();
        assert!(matches!(refused, Error::Invalid { field: "message_id", .. }), "{refused}");
        assert_eq!(refused.kind(), ErrorKind::Invalid);
    }
    assert!(all(&f).await.is_empty());
}

/// L8.
async fn odd_bytes_are_kept<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let every_byte: Vec<u8> = (0..=255).collect();
    let odd = Incoming::new("odd", every_byte.clone())
        .typed("t\u{0}")
        .key("k".repeat(300))
        .content_type("ü".repeat(200))
        .header("nul", "\u{0}")
        .header_bytes("latin1", b"gr\xfc\xdfe");
    assert_eq!(f.process(&odd).await, Handled::Failed);
    let shown = f.shown("odd").await;
    assert!(shown.row.last_error.unwrap().contains("latin1"));
    assert_eq!(shown.payload, Some(every_byte));
    let headers: serde_json::Value = serde_json::from_str(&shown.headers.unwrap()).unwrap();
    assert_eq!((headers["nul"].as_str(), headers["latin1"].as_str()), (Some("\u{0}"), Some("\\x6772fcdf65")));
    let source: serde_json::Value = serde_json::from_str(&shown.row.source.unwrap()).unwrap();
    assert_eq!(source["exact"]["type"].as_str(), Some("t\u{0}"));
    assert_eq!(source["exact"]["message_key"].as_str(), Some(&*"k".repeat(300)));
    assert_eq!(source["exact"]["content_type"].as_str(), Some(&*"ü".repeat(200)));
    // The same again is the same message.
    assert_eq!(f.process(&odd).await, Handled::Failed);
    assert_eq!(all(&f).await, ["odd"]);
    assert_eq!(f.effects().await, 0);
    // What only its columns can't hold is handled; its record holds it.
    let strange = Incoming::new("strange", "1").typed("t\u{0}").header("nul", "\u{0}");
    assert_eq!(f.process(&strange).await, Handled::Processed);
    // One that another consumer kept for a person is no business of this one.
    let other = f.beside(f.place.pool.clone(), "billing", quick());
    assert_eq!(process::<T>(&other, &f.effects, &named("odd")).await.unwrap(), Handled::Processed);
}
