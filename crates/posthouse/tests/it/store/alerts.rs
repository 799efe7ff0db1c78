//! Alerts: how they stand, what happened, whom to tell, and what is measured for them.

use std::time::Duration;

use posthouse::Message;
use posthouse::store::{
    ALERTS, AlertChange, AlertFilter, AlertKind, AlertNews, AlertReport, AlertStanding, NoticeOutcome, OutboxWaiting, RetryShare,
};

use crate::store::tables::{Fresh, StoreDb, on_all_stores, setback};

on_all_stores!(only_who_has_the_duty_judges, notices_are_open_until_they_are_over, silences_and_reports, what_is_measured);

const LONG: Duration = Duration::from_secs(3600);

fn fired(rule: &str, subject: &str, channels: &[&str]) -> AlertChange {
    let news = AlertNews {
        kind: AlertKind::Fired,
        since_us: 1_700_000_000_123_000,
        value: 3.5,
        threshold: 1.0,
        detail: Some("a\0b ü".into()),
        silenced: false,
        channels: channels.iter().map(|&c| c.to_owned()).collect(),
    };
    let standing = AlertStanding {
        firing: true,
        since_us: news.since_us,
        value: 3.5,
        threshold: 1.0,
        detail: None,
        told_us: Some(1_700_000_000_456_000),
    };
    AlertChange { rule: rule.into(), subject: subject.into(), standing: Some(standing), news: Some(news) }
}

async fn only_who_has_the_duty_judges<T: StoreDb>(db: &Fresh<T>) {
    let alerts = db.store.alerts();
    let changes = [fired("r", "s", &["ops"])];
    assert!(!alerts.judged("a", &changes).await.unwrap(), "nobody has the duty");
    assert!(db.store.duty(ALERTS, "a", LONG).await.unwrap());
    assert!(!alerts.judged("b", &changes).await.unwrap(), "it is a's");
    assert_eq!(db.int("SELECT count(*) FROM {alert_event}").await, 0);
    assert!(alerts.judged("a", &changes).await.unwrap());
    let watch = alerts.watch().await.unwrap();
    assert_eq!(watch.judge.as_deref(), Some("a"));
    let [row] = &watch.alerts[..] else { panic!("{watch:?}") };
    assert_eq!((row.rule.as_str(), row.subject.as_str(), row.firing, row.value), ("r", "s", true, 3.5));
    assert_eq!((row.since_us, row.told_us), (1_700_000_000_123_000, Some(1_700_000_000_456_000)));
    assert!(row.seen_us <= watch.now_us && watch.now_us - row.seen_us < 60_000_000, "{watch:?}");

    // One that can't be written takes nothing with it.
    let bad = [fired("r", "t", &[]), fired("", "u", &[])];
    alerts.judged("a", &bad).await.unwrap_err();
    assert_eq!(alerts.watch().await.unwrap().alerts.len(), 1);

    // Its lease is over.
    db.store.lay_down(ALERTS, "a").await.unwrap();
    assert!(!alerts.judged("a", &changes).await.unwrap());
    assert!(!alerts.sending("a", "ops", &[1], LONG).await.unwrap());
    assert_eq!(alerts.watch().await.unwrap().judge, None);
    assert_eq!(db.int("SELECT count(*) FROM {alert_event}").await, 1);

    assert!(db.store.duty(ALERTS, "b", LONG).await.unwrap());
    let fine = AlertChange { standing: None, news: None, ..changes[0].clone() };
    assert!(alerts.judged("b", &[fine]).await.unwrap());
    assert!(alerts.watch().await.unwrap().alerts.is_empty());
}

async fn notices_are_open_until_they_are_over<T: StoreDb>(db: &Fresh<T>) {
    let alerts = db.store.alerts();
    assert!(db.store.duty(ALERTS, "a", LONG).await.unwrap());
    let changes = [fired("r", "1", &["x", "ü"]), fired("r", "2", &["x"]), fired("q", "3", &[])];
    assert!(alerts.judged("a", &changes).await.unwrap());
    let open = alerts.open_notices().await.unwrap();
    let told = open.iter().map(|n| (n.event.subject.as_str(), n.channel.as_str(), n.attempts, n.due)).collect::<Vec<_>>();
    assert_eq!(told, [("1", "x", 0, true), ("1", "ü", 0, true), ("2", "x", 0, true)]);
    assert!(open.iter().all(|n| n.age < Duration::from_secs(60)), "{open:?}");
    assert_eq!(open[0].event.detail.as_deref(), Some("a\u{fffd}b ü"));
    let ids: Vec<i64> = open.iter().filter(|n| n.channel == "x").map(|n| n.event.id).collect();

    // While it is being sent its time hasn't come.
    assert!(alerts.sending("a", "x", &ids, LONG).await.unwrap());
    let open = alerts.open_notices().await.unwrap();
    assert_eq!(open.iter().filter(|n| n.channel == "x").map(|n| (n.attempts, n.due)).collect::<Vec<_>>(), [(1, false); 2]);
    // Nobody said what came of it.
    assert!(alerts.sending("a", "x", &ids, Duration::ZERO).await.unwrap());
    assert!(alerts.open_notices().await.unwrap().iter().all(|n| n.due));

    alerts.sent("x", &ids[..1], NoticeOutcome::Sent).await.unwrap();
    alerts.sent("x", &ids[..1], NoticeOutcome::Retry("late", Duration::ZERO)).await.unwrap();
    alerts.sent("x", &ids[1..], NoticeOutcome::Retry("no", Duration::ZERO)).await.unwrap();
    let open = alerts.open_notices().await.unwrap();
    let told = open.iter().map(|n| (n.event.subject.as_str(), n.channel.as_str(), n.attempts)).collect::<Vec<_>>();
    assert_eq!(told, [("1", "ü", 0), ("2", "x", 2)], "what was sent stays so");
    alerts.sent("x", &ids[1..], NoticeOutcome::GivenUp("for good")).await.unwrap();
    assert_eq!(alerts.open_notices().await.unwrap().len(), 1);

    let history = alerts.events(&AlertFilter { limit: 10, ..AlertFilter::default() }).await.unwrap();
    assert_eq!(history.iter().map(|e| e.subject.as_str()).collect::<Vec<_>>(), ["3", "2", "1"]);
    let [sent, waiting] = &history[2].notices[..] else { panic!("{history:?}") };
    assert!(sent.sent_us.is_some() && sent.due_us.is_none() && sent.error.is_none(), "{sent:?}");
    assert!(waiting.sent_us.is_none() && waiting.due_us.is_some() && waiting.channel == "ü", "{waiting:?}");
    let given_up = &history[1].notices[0];
    assert_eq!((given_up.sent_us, given_up.due_us, given_up.error.as_deref()), (None, None, Some("for good")));
    let page = AlertFilter { rule: Some("r".into()), before: Some(history[1].id), limit: 10 };
    assert_eq!(alerts.events(&page).await.unwrap().len(), 1);

    assert_eq!(alerts.tidy_alerts(LONG).await.unwrap(), 0);
    db.run("UPDATE {alert_event} SET at = {PAST} WHERE subject <> '3'").await;
    assert_eq!(alerts.tidy_alerts(LONG).await.unwrap(), 2);
    assert_eq!(db.int("SELECT count(*) FROM {alert_notice}").await, 0);
    assert_eq!(db.int("SELECT count(*) FROM {alert_event}").await, 1);
}

async fn silences_and_reports<T: StoreDb>(db: &Fresh<T>) {
    let alerts = db.store.alerts();
    alerts.silence("r", "s", LONG, "ann", "ü").await.unwrap();
    alerts.silence("r", "s", 2 * LONG, "bob", "more time").await.unwrap();
    alerts.silence("", "", Duration::ZERO, "ann", "over at once").await.unwrap();
    let watch = alerts.watch().await.unwrap();
    let [silence] = &watch.silences[..] else { panic!("{watch:?}") };
    assert_eq!((silence.actor.as_str(), silence.reason.as_str()), ("bob", "more time"));
    let left = silence.until_us - watch.now_us;
    assert!((3_600_000_000..=7_200_000_000).contains(&left), "{watch:?}");
    assert!(!alerts.unsilence("r", "t", "bob").await.unwrap());
    assert!(!alerts.unsilence("", "", "bob").await.unwrap(), "it is over");
    assert!(alerts.unsilence("r", "s", "bob").await.unwrap());
    assert!(alerts.watch().await.unwrap().silences.is_empty());
    let audit = db.texts("SELECT action FROM {audit} ORDER BY id").await;
    let audit: Vec<&str> = audit.iter().flatten().map(String::as_str).collect();
    assert_eq!(audit, ["alert silence", "alert silence", "alert silence", "alert unsilence"]);
    alerts.silence(&"x".repeat(65), "", LONG, "ann", "").await.unwrap_err();

    let report =
        |subject: &str, value| AlertReport { rule: "down".into(), subject: subject.into(), value, detail: Some("why".into()) };
    alerts.report("a", &[report("x", 1.0), report("y", 2.0)]).await.unwrap();
    alerts.report("b", &[report("x", 3.0)]).await.unwrap();
    alerts.report("a", &[report("y", 4.0)]).await.unwrap();
    let reports = alerts.watch().await.unwrap().reports;
    let told: Vec<_> = reports.iter().map(|(by, _, r)| (by.as_str(), r.subject.as_str(), r.value)).collect();
    assert_eq!(told, [("b", "x", 3.0), ("a", "y", 4.0)]);
    assert!(
        reports.iter().all(|(_, age, r)| *age < Duration::from_secs(60) && r.detail.as_deref() == Some("why")),
        "{reports:?}"
    );
    alerts.report("a", &[]).await.unwrap();
    db.run("UPDATE {alert_report} SET at = {PAST}").await;
    alerts.tidy_alerts(LONG).await.unwrap();
    assert!(alerts.watch().await.unwrap().reports.is_empty());
}

async fn what_is_measured<T: StoreDb>(db: &Fresh<T>) {
    let alerts = db.store.alerts();
    assert_eq!(alerts.outbox_retries(LONG).await.unwrap(), RetryShare::default());
    assert!(alerts.outbox_waiting().await.unwrap().is_empty() && alerts.inbox_waiting().await.unwrap().is_empty());
    let later = || Message::to("later").deliver_in(LONG);
    let ids = db.publish([Message::to("a"), later(), Message::to("b"), later(), Message::to("a"), Message::to("a")]).await;
    db.store.setback("i", &[setback(&db.thin(ids[2]).await, None)]).await.unwrap();
    db.run(&format!("UPDATE {{message}} SET created_at = {{PAST}} WHERE id = {}", ids[1])).await;
    // One that was delayed, and is due: it has waited since then, not since it was published.
    db.run(&format!("UPDATE {{pending}} SET due_at = {{PAST}} WHERE id = {}", ids[1])).await;
    let mut waiting = alerts.outbox_waiting().await.unwrap();
    waiting.sort_by(|x, y| x.destination.cmp(&y.destination));
    let counted: Vec<_> = waiting.iter().map(|w| (w.destination.as_str(), w.waiting, w.failed)).collect();
    assert_eq!(counted, [("a", 3, 0), ("b", 0, 1), ("later", 1, 0)]);
    let old = |w: &OutboxWaiting| w.oldest.is_some_and(|oldest| oldest > Duration::from_secs(365 * 86_400));
    assert!(!old(&waiting[0]) && waiting[1].oldest.is_none() && !old(&waiting[2]), "{waiting:?}");
    db.run(&format!("UPDATE {{message}} SET created_at = {{PAST}} WHERE id = {}", ids[0])).await;
    assert!(alerts.outbox_waiting().await.unwrap().iter().any(|w| w.destination == "a" && old(w)));

    // Three messages are old, of which one was tried twice lately; of the new ones one was tried four times.
    db.run(&format!("UPDATE {{message}} SET created_at = {{PAST}} WHERE id <= {}", ids[2])).await;
    for (id, attempts) in [(ids[0], 1..=2), (ids[5], 1..=4)] {
        for attempt in attempts {
            let values = format!("({id}, {attempt}, 'i', 'retry', 'e', 1)");
            db.run(&format!("INSERT INTO {{attempt}} (row_id, attempt, instance, outcome, error, took_ms) VALUES {values}"))
                .await;
        }
    }
    assert_eq!(alerts.outbox_retries(LONG).await.unwrap(), RetryShare { messages: 4, retried: 1 });
    db.run("UPDATE {attempt} SET at = {PAST}").await;
    assert_eq!(alerts.outbox_retries(LONG).await.unwrap(), RetryShare { messages: 3, retried: 0 });

    for (consumer, id, status, attempts, due, done) in [
        ("c", "1", "SUCCESS", 0, "NULL", true),
        ("c", "2", "SUCCESS", 3, "NULL", true),
        ("c", "3", "PENDING_RETRY", 4, "{PAST}", false),
        ("c", "4", "FAILED", 1, "'9999-12-31'", false),
        ("d", "1", "SUCCESS", 9, "NULL", true),
    ] {
        let due = if T::NAME == "sqlite" { due.replace("'9999-12-31'", "253402214400000") } else { due.to_owned() };
        let values = format!("('{consumer}', '{id}', '{status}', {attempts}, {due})");
        db.run(&format!("INSERT INTO {{inbox}} (consumer, message_id, status, attempts, next_attempt_at) VALUES {values}")).await;
        if done {
            db.run(&format!("UPDATE {{inbox}} SET success_at = last_at WHERE consumer = '{consumer}' AND message_id = '{id}'"))
                .await;
        }
    }
    let waiting = alerts.inbox_waiting().await.unwrap();
    let told: Vec<_> = waiting.iter().map(|w| (w.consumer.as_str(), w.waiting, w.failed)).collect();
    assert_eq!(told, [("c", 1, 1)]);
    assert!(waiting[0].oldest.is_some_and(|oldest| oldest < Duration::from_secs(60)), "{waiting:?}");
    db.run("UPDATE {inbox} SET first_at = {PAST} WHERE message_id = '3'").await;
    assert!(alerts.inbox_waiting().await.unwrap()[0].oldest.is_some_and(|oldest| oldest > LONG));
    let share = |messages, retried| RetryShare { messages, retried };
    let shares = alerts.inbox_retries(LONG).await.unwrap();
    assert_eq!(shares, [("c".to_owned(), share(4, 2)), ("d".to_owned(), share(1, 1))]);
    db.run("UPDATE {inbox} SET success_at = {PAST} WHERE success_at IS NOT NULL").await;
    db.run("UPDATE {inbox} SET last_at = {PAST} WHERE message_id = '4'").await;
    assert_eq!(alerts.inbox_retries(LONG).await.unwrap(), [("c".to_owned(), share(1, 1)), ("d".to_owned(), share(0, 0))]);
}
