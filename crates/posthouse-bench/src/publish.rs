//! What a publish costs inside a small business transaction.

use std::time::Instant;

use posthouse::{Message, Outbox};

use crate::database::{CONNECTIONS, Kind, Rig, must};
use crate::report::{Compared, Report, Row};

pub(crate) async fn run(kind: Kind, n: usize, payload: usize, rounds: usize, report: &mut Report) {
    match kind {
        Kind::Postgres => measure::<sqlx::Postgres>(n, payload, rounds, report).await,
        Kind::Mysql => measure::<sqlx::MySql>(n, payload, rounds, report).await,
        Kind::Sqlite => measure::<sqlx::Sqlite>(n, payload, rounds, report).await,
    }
}

#[derive(Clone, Copy)]
enum Shape {
    /// One business row.
    Alone,
    /// One business row and one plain row as large as the message.
    Plain,
    /// One business row and a message.
    Publish,
}

async fn measure<DB: Rig>(n: usize, payload: usize, rounds: usize, report: &mut Report) {
    let outbox = DB::fresh(CONNECTIONS).await;
    make_orders(&outbox).await;
    let plain = outbox.tables().name("bench_plain");
    let (serial, bytes) = match DB::KIND {
        Kind::Postgres => ("bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY", "bytea"),
        Kind::Mysql => ("bigint AUTO_INCREMENT PRIMARY KEY", "longblob"),
        Kind::Sqlite => ("integer PRIMARY KEY AUTOINCREMENT", "blob"),
    };
    let table = format!(
        "CREATE TABLE {plain} (id {serial}, order_id bigint NOT NULL, destination varchar(255) NOT NULL, payload {bytes} NOT NULL)"
    );
    must("plain", DB::execute(&outbox, table).await);
    let body = vec![b'x'; payload];
    let mut order = 0;
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    // In turn, in small blocks, so that the machine's drift meets all three alike.
    for _ in 0..rounds {
        let mut taken = [0.0; 3];
        for _ in 0..20 {
            for (i, shape) in [Shape::Alone, Shape::Plain, Shape::Publish].into_iter().enumerate() {
                let started = Instant::now();
                for _ in 0..(n / 20).max(1) {
                    order += 1;
                    transaction(&outbox, order, shape, &body).await;
                }
                taken[i] += started.elapsed().as_secs_f64() * 1e6 / n as f64;
            }
        }
        for (all, one) in times.iter_mut().zip(taken) {
            all.push(one);
        }
    }
    let [alone, plain, publish] = times;
    for (what, limits) in [("publish, beside the transaction alone", alone), ("publish, beside one more plain insert", plain)] {
        report.add(Row {
            database: DB::KIND.name(),
            what: what.to_owned(),
            unit: "µs/transaction",
            compared: Some(Compared::new(&publish, &limits)),
            figures: Vec::new(),
        });
    }
    DB::remove(outbox).await;
}

/// The table of the business.
pub(crate) async fn make_orders<DB: Rig>(outbox: &Outbox<DB>) {
    let orders = outbox.tables().name("bench_orders");
    let table = format!("CREATE TABLE {orders} (id bigint PRIMARY KEY, customer varchar(100) NOT NULL)");
    must("orders", DB::execute(outbox, table).await);
}

async fn transaction<DB: Rig>(outbox: &Outbox<DB>, order: i64, shape: Shape, body: &[u8]) {
    let mut tx = must("begin", outbox.begin().await);
    let plain = matches!(shape, Shape::Plain).then_some(body);
    must("business rows", DB::business(outbox, &mut tx, order, plain).await);
    if matches!(shape, Shape::Publish) {
        must("publish", tx.publish(Message::to("inventory.deduct").typed("order.placed").payload(body)).await);
    }
    must("commit", tx.commit().await);
}
