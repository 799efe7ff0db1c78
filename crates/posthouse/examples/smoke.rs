use posthouse::{Message, Outbox, Relay};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use std::time::{Duration, Instant};
#[tokio::main(flavor = "multi_thread")]
async fn main() {
    let pool = sqlx::PgPool::connect(&std::env::var("POSTHOUSE_TEST_POSTGRES_URL").unwrap()).await.unwrap();
    let schema = format!("smoke{}", fastrand::u32(..));
    let outbox = Outbox::builder(pool.clone()).schema(&schema).build().unwrap();
    let t = Instant::now();
    outbox.migrate().await.unwrap();
    println!("migrated {:?}", t.elapsed());
    let n = Arc::new(AtomicU64::new(0));
    let last = Arc::new(std::sync::Mutex::new(std::collections::HashMap::<String, i64>::new()));
    let (n2, l2) = (n.clone(), last.clone());
    let relay = Relay::builder(&outbox)
        .local_envelope("x", move |e: posthouse::Envelope| {
            n2.fetch_add(1, Ordering::Relaxed);
            if let Some(k) = e.key {
                let mut l = l2.lock().unwrap();
                let p = l.insert(k, e.id);
                if p.is_some_and(|p| p >= e.id) {
                    println!("order violation");
                }
            }
            async { Ok::<_, std::io::Error>(()) }
        })
        .start()
        .await
        .unwrap();
    for round in 0..3 {
        let t = Instant::now();
        for _ in 0..10 {
            let mut tx = outbox.begin().await.unwrap();
            outbox
                .publish_many(
                    &mut tx,
                    (0..1000).map(|i| {
                        let m = Message::to("local:x").payload(vec![0; 100]);
                        if round > 0 { m.key(i % 200) } else { m }
                    }),
                )
                .await
                .unwrap();
            outbox.commit(tx).await.unwrap();
        }
        println!("published {:?}", t.elapsed());
        let d = tokio::time::timeout(Duration::from_secs(20), relay.drain_once()).await;
        println!("drained {:?} {:?} {}", t.elapsed(), d.is_ok(), n.load(Ordering::Relaxed));
    }
    println!("{:#?}", relay.stats());
    for _ in 0..3 {
        let t = Instant::now();
        let before = n.load(Ordering::Relaxed);
        outbox.publish_alone(Message::to("local:x").payload("a")).await.unwrap();
        let p = t.elapsed();
        while n.load(Ordering::Relaxed) == before {
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
        println!("publish {p:?} latency {:?}", t.elapsed());
    }
    let t = Instant::now();
    relay.shutdown(Duration::from_secs(5)).await;
    println!("shut down {:?}", t.elapsed());
}
