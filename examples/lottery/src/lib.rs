//! The lottery as it is: prizes in two databases with four tables each, and an invoice for each to Kafka, which it sends itself
//! right after its commit. It knows nothing of Posthouse. What it doesn't get sent stays behind with `mq_state` NULL, 0 or 2.

use std::time::Duration;

use posthouse::{Place, Router};
use rdkafka::ClientConfig;
use rdkafka::producer::{FutureProducer, FutureRecord};
use serde::{Deserialize, Serialize};
use sqlx::{AssertSqlSafe, MySqlPool};

/// Anything that can go wrong here.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Databases of the lottery.
pub const DATABASES: usize = 2;
/// Tables in each of them.
pub const TABLES: usize = 4;

/// What accounting is told about a prize.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invoice {
    /// Who has won.
    pub u_id: String,
    /// The prize's own number.
    pub order_id: i64,
    /// What was won.
    pub award_id: String,
    /// Names the invoice: receivers recognise a second one by it.
    pub uuid: String,
}

/// How the lottery's own first send goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstSend {
    /// Sent, and marked as sent.
    Works,
    /// It fails, and the row is marked with 2.
    Fails,
    /// The process dies before it: the row stays NULL.
    Dies,
    /// The process dies after it: the invoice is out, and the row stays NULL.
    DiesAfter,
}

/// The lottery.
#[derive(Clone)]
pub struct Lottery {
    databases: Vec<MySqlPool>,
    router: Router,
    producer: FutureProducer,
    topic: String,
}

impl std::fmt::Debug for Lottery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lottery").field("topic", &self.topic).finish_non_exhaustive()
    }
}

/// The name of one of the tables.
pub fn table(number: usize) -> String {
    format!("user_strategy_export_{number:03}")
}

impl Lottery {
    /// A lottery in these databases, with its tables.
    ///
    /// # Errors
    /// The databases', the broker's settings'.
    pub async fn open(databases: Vec<MySqlPool>, brokers: &str, topic: &str) -> Result<Self, Failure> {
        for database in &databases {
            for number in 0..TABLES {
                let sql = format!(
                    "CREATE TABLE IF NOT EXISTS {} (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, u_id VARCHAR(32) NOT NULL, \
                     activity_id BIGINT NOT NULL, order_id BIGINT NOT NULL, strategy_id BIGINT NOT NULL, strategy_mode INT, \
                     grant_type INT, grant_date DATETIME, grant_state INT, award_id VARCHAR(64), award_type INT, award_name VARCHAR(64), \
                     award_content VARCHAR(128), uuid VARCHAR(128) NOT NULL, mq_state TINYINT, create_time DATETIME NOT NULL, \
                     update_time DATETIME NOT NULL, UNIQUE KEY uq_uuid (uuid), KEY idx_mq_state (mq_state, uuid))",
                    table(number)
                );
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(database).await?;
            }
        }
        let producer = ClientConfig::new().set("bootstrap.servers", brokers).set("acks", "all").set("linger.ms", "1").create()?;
        Ok(Self { databases, router: Router::compat(DATABASES, TABLES)?, producer, topic: topic.into() })
    }

    /// Draws a prize: one row in one transaction, and after its commit the first send.
    ///
    /// # Errors
    /// The database's; a first send that fails is none.
    pub async fn draw(&self, user: &str, order: i64, first: FirstSend) -> Result<Invoice, Failure> {
        let Place { database, table: number } = self.router.route(user);
        let pool = &self.databases[database];
        let uuid = format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
        let invoice = Invoice { u_id: user.into(), order_id: order, award_id: format!("award-{}", order % 9), uuid };
        let mut tx = pool.begin().await?;
        let insert = format!(
            "INSERT INTO {} (u_id, activity_id, order_id, strategy_id, award_id, award_type, award_name, uuid, create_time, update_time) \
             VALUES (?, 100001, ?, 10001, ?, 1, 'a prize', ?, NOW(), NOW())",
            table(number)
        );
        sqlx::query(AssertSqlSafe(insert))
            .bind(&invoice.u_id)
            .bind(invoice.order_id)
            .bind(&invoice.award_id)
            .bind(&invoice.uuid)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        let state = match first {
            FirstSend::Works => match self.send(&invoice).await {
                Ok(()) => Some(1),
                Err(_) => Some(2),
            },
            FirstSend::Fails => Some(2),
            FirstSend::Dies => None,
            FirstSend::DiesAfter => {
                self.send(&invoice).await?;
                None
            }
        };
        if let Some(state) = state {
            let update = format!("UPDATE {} SET mq_state = ?, update_time = NOW() WHERE uuid = ?", table(number));
            sqlx::query(AssertSqlSafe(update)).bind(state).bind(&invoice.uuid).execute(pool).await?;
        }
        Ok(invoice)
    }

    async fn send(&self, invoice: &Invoice) -> Result<(), Failure> {
        let payload = serde_json::to_vec(invoice)?;
        let record = FutureRecord::to(&self.topic).key(&invoice.uuid).payload(&payload);
        self.producer.send(record, Duration::from_secs(10)).await.map_err(|(e, _)| e)?;
        Ok(())
    }
}
