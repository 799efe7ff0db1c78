//! Takes what was ordered from the stock, once per order: the message id and the effect are in one MariaDB transaction, and the
//! message is acknowledged after its commit.

use std::time::Duration;

use order_inventory::{Broker, DeductStock, QUEUE, TOPIC, asked_to_stop, setting, start_log};
use posthouse::consumer::{KafkaConsumer, RabbitMqConsumer};
use posthouse::inbox::{Handler, HandlerError, Inbox};
use posthouse::transport::KafkaSettings;
use posthouse::{Event as _, Tx};
use sqlx::{MySql, MySqlPool};

/// Takes from the stock.
struct Deduct {
    /// How many of 100 runs fail although nothing is wrong, to see what becomes of them.
    fail_percent: u32,
}

impl Handler<MySql> for Deduct {
    type Message = DeductStock;

    async fn handle(&self, tx: &mut Tx<MySql>, m: DeductStock) -> Result<(), HandlerError> {
        let taken =
            sqlx::query("UPDATE stock SET count = count - ? WHERE sku = ?").bind(m.count).bind(&m.sku).execute(&mut **tx).await?;
        if taken.rows_affected() == 0 {
            // Nothing that a later run could change: FAILED at once, for a person to look at.
            return Err(HandlerError::reject(format!("there is no article {:?}", m.sku)));
        }
        // No unique key here: it is the inbox that keeps an order from being taken twice.
        sqlx::query("INSERT INTO movement (order_id, sku, count) VALUES (?, ?, ?)")
            .bind(m.order)
            .bind(&m.sku)
            .bind(m.count)
            .execute(&mut **tx)
            .await?;
        if fastrand::u32(0..100) < self.fail_percent {
            // What was written above is rolled back, and the message is run again later.
            return Err(HandlerError::retry("a failure that was asked for"));
        }
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    start_log();
    let pool = MySqlPool::connect(&setting("INVENTORY_DATABASE_URL", "mysql://localhost/inventory")).await?;
    for table in [
        "CREATE TABLE IF NOT EXISTS stock (sku VARCHAR(100) PRIMARY KEY, count BIGINT NOT NULL)",
        "CREATE TABLE IF NOT EXISTS movement \
         (id BIGINT AUTO_INCREMENT PRIMARY KEY, order_id BIGINT NOT NULL, sku VARCHAR(100) NOT NULL, count INT NOT NULL)",
        "INSERT IGNORE INTO stock VALUES ('lamp', 1000000), ('chair', 1000000), ('desk', 1000000)",
    ] {
        sqlx::query(table).execute(&pool).await?;
    }
    let fail_percent = setting("FAIL_PERCENT", "0").parse()?;
    let inbox = Inbox::new(pool, "inventory")?.on(DeductStock::TYPE, Deduct { fail_percent });
    inbox.outbox().migrate().await?;

    let consumer = match Broker::from_env()? {
        Broker::RabbitMq(url) => RabbitMqConsumer::new(&*url, QUEUE)?.start(&inbox).await?,
        Broker::Kafka(brokers) => {
            let mut kafka = KafkaSettings::from(&*brokers);
            if let Ok(name) = std::env::var("INSTANCE") {
                // A member with a name of its own has its partitions back at once when it was killed and is started again; without
                // one the group waits for session.timeout.ms first.
                kafka.properties.insert("group.instance.id".into(), name);
            }
            KafkaConsumer::new(kafka, "inventory", [TOPIC])?.start(&inbox).await?
        }
    };
    println!("consuming");
    asked_to_stop().await;
    // What runs is finished and acknowledged; the rest goes back to the broker.
    consumer.shutdown(Duration::from_secs(30)).await;
    Ok(())
}
