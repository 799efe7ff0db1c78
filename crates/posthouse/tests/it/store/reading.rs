//! What the relay's reads find, and what they leave out.

use std::time::Duration;

use posthouse::Message;
use posthouse::store::{Mark, Setback};

use crate::store::tables::{Fresh, StoreDb, by_id, done, ids, on_all_stores, setback, sorted};

on_all_stores!(
    a_poll_reads_above_its_marks,
    a_poll_reads_up_to_its_limit_per_house,
    a_poll_leaves_out_excluded_destinations,
    a_poll_tells_when_the_next_row_is_due,
    rows_that_wait_are_in_no_read,
    due_rows_page_by_time_and_id,
    of_destination_reads_one_destination,
    a_row_that_cannot_be_decoded_is_an_error_of_its_own,
);

async fn a_poll_reads_above_its_marks<T: StoreDb>(db: &Fresh<T>) {
    let empty = db.poll().await;
    assert!(empty.rows.is_empty());
    assert_eq!(empty.houses.len(), T::HOUSES);
    assert!(empty.houses.iter().all(|h| h.max_id == 0 && h.next_due.is_none()), "{empty:?}");

    let published = db.publish((0..60).map(|n| Message::to(format!("d{n}")))).await;
    let poll = db.poll().await;
    assert_eq!(ids(&by_id(poll.rows.clone())), published);
    let mut marks = db.marks().await;
    for mark in &mut marks {
        let of_house: Vec<i64> = poll.rows.iter().filter(|t| t.house == mark.house).map(|t| t.id).collect();
        assert_eq!(of_house, sorted(of_house.clone()), "by id within a house");
        let told = poll.houses.iter().find(|h| h.house == mark.house).unwrap();
        assert_eq!(Some(&told.max_id), of_house.last());
        mark.after = of_house[of_house.len() / 2];
    }
    let above = db.store.poll(&marks, 1000, &[]).await.unwrap();
    let after = |mark: &Mark| mark.after;
    for mark in &marks {
        let want: Vec<i64> = poll.rows.iter().filter(|t| t.house == mark.house && t.id > after(mark)).map(|t| t.id).collect();
        let got: Vec<i64> = above.rows.iter().filter(|t| t.house == mark.house).map(|t| t.id).collect();
        assert_eq!(got, want);
    }
    // Nothing above the mark: the mark comes back.
    let beyond: Vec<Mark> = marks.iter().map(|m| Mark { after: i64::MAX - 1, ..*m }).collect();
    let none = db.store.poll(&beyond, 1000, &[]).await.unwrap();
    assert!(none.rows.is_empty());
    assert!(none.houses.iter().all(|h| h.max_id == i64::MAX - 1), "{none:?}");
    // Only the houses that were asked for.
    let one = db.store.poll(&marks[..1], 1000, &[]).await.unwrap();
    assert_eq!(one.houses.len(), 1);
    assert!(one.rows.iter().all(|t| t.house == marks[0].house));
    assert!(db.store.poll(&[], 1000, &[]).await.unwrap().rows.is_empty());
}

async fn a_poll_reads_up_to_its_limit_per_house<T: StoreDb>(db: &Fresh<T>) {
    db.publish((0..100).map(|n| Message::to(format!("d{n}")))).await;
    let all = db.poll().await;
    let some = db.store.poll(&db.marks().await, 2, &[]).await.unwrap();
    for mark in db.marks().await {
        let first: Vec<i64> = all.rows.iter().filter(|t| t.house == mark.house).map(|t| t.id).take(2).collect();
        let got: Vec<i64> = some.rows.iter().filter(|t| t.house == mark.house).map(|t| t.id).collect();
        assert_eq!(got, first, "house {}", mark.house);
        let told = |poll: &posthouse::store::Poll| *poll.houses.iter().find(|h| h.house == mark.house).unwrap();
        let (short, long) = (told(&some), told(&all));
        assert_eq!(
            (short.max_id, short.next_due),
            (long.max_id, long.next_due),
            "the limit doesn't change what is told about a house"
        );
        assert_eq!(long.cut_off, None);
        assert_eq!(short.cut_off, (first.len() == 2).then(|| first[1]), "but where the read stopped");
    }
}

async fn a_poll_leaves_out_excluded_destinations<T: StoreDb>(db: &Fresh<T>) {
    let names = ["full", "Full", "full ", "ful", "a'b\"c", "ü"];
    let published = db.publish(names.iter().flat_map(|n| (0..3).map(|_| Message::to(*n)))).await;
    let left = async |excluded: &[&str]| {
        let excluded: Vec<String> = excluded.iter().map(ToString::to_string).collect();
        let poll = db.store.poll(&db.marks().await, 1000, &excluded).await.unwrap();
        let swept = by_id(db.store.sweep(&db.marks().await, 1000, &excluded).await.unwrap());
        assert_eq!(ids(&swept), ids(&by_id(poll.rows.clone())), "a sweep leaves out the same");
        ids(&by_id(poll.rows))
    };
    assert_eq!(left(&[]).await, published);
    assert_eq!(left(&["full"]).await, published[3..]);
    assert_eq!(
        left(&["full", "full ", "nothing", "a'b\"c"]).await,
        [&published[3..6], &published[9..12], &published[15..]].concat()
    );
    assert!(left(&names).await.is_empty());
    // Rows are read past an excluded destination up to the limit, so that one can't starve others.
    let poll = db.store.poll(&db.marks().await, 1, &["full".to_owned()]).await.unwrap();
    assert!(poll.rows.iter().all(|t| t.destination != "full") && !poll.rows.is_empty());
}

async fn a_poll_tells_when_the_next_row_is_due<T: StoreDb>(db: &Fresh<T>) {
    let hour = Duration::from_secs(3600);
    let id = db.publish_one(Message::to("a").key("k")).await;
    let thin = db.thin(id).await;
    let wait = Setback { attempts: 1, ..setback(&thin, Some(hour)) };
    assert_eq!(db.store.setback("i", &[wait]).await.unwrap(), [id]);
    let poll = db.poll().await;
    assert!(poll.rows.is_empty());
    let told = poll.houses.iter().find(|h| h.house == thin.house).unwrap();
    let left = Duration::from_micros(told.next_due.unwrap() as u64);
    assert!(left <= hour && left > hour - Duration::from_secs(600), "{left:?}");
    assert_eq!(told.max_id, id, "a row that waits counts for the highest id");
    assert!(poll.houses.iter().filter(|h| h.house != thin.house).all(|h| h.next_due.is_none()));
    // Due already: not positive.
    db.run("UPDATE {pending} SET due_at = {PAST}").await;
    let poll = db.poll().await;
    let told = poll.houses.iter().find(|h| h.house == thin.house).unwrap();
    assert!(told.next_due.unwrap() <= 0);
    assert_eq!(ids(&poll.rows), [id]);
    assert_eq!(poll.rows[0].due, Some(946_684_800_000_000), "microseconds of the database's clock");
}

async fn rows_that_wait_are_in_no_read<T: StoreDb>(db: &Fresh<T>) {
    let hour = Duration::from_secs(3600);
    let published = db.publish((0..4).map(|n| Message::to("d").key(n))).await;
    let rows = db.eligible().await;
    let keys: Vec<_> = rows.iter().map(crate::store::tables::key_of).collect();
    db.store.setback("i", &[setback(&rows[0], Some(hour)), setback(&rows[1], None)]).await.unwrap();
    db.store.claim("i", &[done(&rows[2])], hour).await.unwrap();
    let (marks, houses) = (db.marks().await, db.all_houses().await);
    let left = [published[3]];
    assert_eq!(ids(&db.poll().await.rows), left);
    assert_eq!(ids(&db.store.sweep(&marks, 100, &[]).await.unwrap()), left);
    assert_eq!(ids(&db.store.of_keys(&keys, 100).await.unwrap()), left);
    assert_eq!(ids(&db.store.of_destination(&marks, "d", 100).await.unwrap()), left);
    let page = db.store.due(&houses, (-1, 0), 100, &[]).await.unwrap();
    assert!(page.rows.is_empty(), "a fresh row isn't due, it is new");
    let next = Duration::from_micros(page.next_due.unwrap() as u64);
    assert!(next <= hour, "a failed row is never due: {next:?}");
}

async fn due_rows_page_by_time_and_id<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish((0..40).map(|n| Message::to(if n % 4 == 0 { "full" } else { "d" }).key(n))).await;
    let rows = db.eligible().await;
    // Many of them at the same instant.
    db.run("UPDATE {pending} SET due_at = {PAST} WHERE id % 3 <> 0").await;
    let waiting: Vec<Setback> = rows.iter().filter(|t| t.id % 3 == 0).map(|t| setback(t, Some(Duration::ZERO))).collect();
    assert_eq!(db.store.setback("i", &waiting).await.unwrap().len(), waiting.len());
    let houses = db.all_houses().await;
    let read = async |excluded: &[String]| {
        let (mut cursor, mut found) = ((-62_135_596_800_000_000, 0), Vec::new());
        loop {
            let page = db.store.due(&houses, cursor, 3, excluded).await.unwrap();
            assert!(page.rows.len() <= 3);
            assert_eq!(page.next_due, None, "all are due already");
            let Some(last) = page.rows.last() else { return found };
            cursor = (last.due.unwrap(), last.id);
            found.extend(page.rows.iter().map(|t| (t.due.unwrap(), t.id)));
        }
    };
    let found = read(&[]).await;
    assert!(found.is_sorted(), "{found:?}");
    assert_eq!(sorted(found.iter().map(|f| f.1).collect()), published, "every row once");
    assert!(read(&["full".to_owned()]).await.len() == 30);
    let one = db.store.due(&houses[..1], (-1, 0), 1000, &[]).await.unwrap();
    assert!(one.rows.iter().all(|t| t.house == houses[0]));
}

async fn of_destination_reads_one_destination<T: StoreDb>(db: &Fresh<T>) {
    db.publish((0..30).map(|n| Message::to(["a", "A", "b"][n % 3]))).await;
    let all = db.poll().await.rows;
    let mut marks = db.marks().await;
    let found = db.store.of_destination(&marks, "a", 1000).await.unwrap();
    assert_eq!(found.len(), 10);
    assert!(found.iter().all(|t| t.destination == "a"));
    assert_eq!(found.len(), all.iter().filter(|t| t.destination == "a").count());
    let limited = db.store.of_destination(&marks, "a", 1).await.unwrap();
    let houses: std::collections::HashSet<_> = found.iter().map(|t| t.house).collect();
    assert_eq!(limited.len(), houses.len(), "one per house that has any");
    for mark in &mut marks {
        mark.after = found.iter().filter(|t| t.house == mark.house).map(|t| t.id).min().unwrap_or(0);
    }
    let above = db.store.of_destination(&marks, "a", 1000).await.unwrap();
    assert_eq!(above.len(), found.len() - houses.len());
}

async fn a_row_that_cannot_be_decoded_is_an_error_of_its_own<T: StoreDb>(db: &Fresh<T>) {
    let good = db.publish_one(Message::to("d").payload("good")).await;
    db.run("INSERT INTO {message} (destination, headers) VALUES ('d', '[1]')").await;
    let bad = db.int("SELECT max(id) FROM {message}").await;
    let after = db.publish_one(Message::to("d").payload("after").header("n", "1")).await;
    db.run("INSERT INTO {message} (destination, headers) VALUES ('d', 'null')").await;
    let null = db.int("SELECT max(id) FROM {message}").await;

    assert_eq!(db.eligible().await.len(), 4, "it is found like any other");
    let mut loaded = db.store.load(&[null, after, bad, good, i64::MAX]).await.unwrap();
    loaded.sort_by_key(|l| l.0);
    assert_eq!(loaded.iter().map(|l| l.0).collect::<Vec<_>>(), [good, bad, after, null], "an id without a row has no answer");
    assert_eq!(loaded[0].1.as_ref().unwrap().payload, b"good");
    let error = loaded[1].1.as_ref().unwrap_err();
    assert!(error.contains("headers"), "{error}");
    assert_eq!(loaded[2].1.as_ref().unwrap().payload, b"after");
    assert!(db.store.load(&[]).await.unwrap().is_empty());
}
