//! Draws prizes with a lottery whose own first send is broken, lets Posthouse send what was left, and settles the books: every
//! prize that was drawn is delivered, and has its effect once.

use std::collections::HashSet;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use lottery::{DATABASES, Failure, FirstSend, Invoice, Lottery, TABLES, table};
use posthouse::consumer::KafkaConsumer;
use posthouse::inbox::{Handler, HandlerError, Inbox};
use posthouse::transport::{Kafka, KafkaSettings};
use posthouse::{Adopted, AdoptedPayload, AdoptedPreset, AdoptedRelay, ConsumerSettings, Outbox, Tx};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use sqlx::{AssertSqlSafe, MySql, MySqlPool};

/// Draws prizes, breaks some of the lottery's own sends, then settles the books.
#[derive(Debug, Parser)]
struct Options {
    /// Prizes to draw.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
    prizes: u32,
    /// Of how many of 100 prizes the lottery's own first send goes wrong.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=100))]
    broken: u32,
    /// The topic for the invoices; it is made if it isn't there.
    #[arg(long, default_value = "lottery_invoice")]
    topic: String,
    /// Seconds until everything must be settled.
    #[arg(long, default_value_t = 120)]
    deadline: u64,
}

/// Accounting: writes each invoice down. There is no unique key: it is the inbox that keeps an invoice from being written twice.
struct WriteDown;

impl Handler<MySql> for WriteDown {
    type Message = Invoice;

    async fn handle(&self, tx: &mut Tx<MySql>, invoice: Invoice) -> Result<(), HandlerError> {
        sqlx::query("INSERT INTO invoice (uuid, u_id, order_id) VALUES (?, ?, ?)")
            .bind(&invoice.uuid)
            .bind(&invoice.u_id)
            .bind(invoice.order_id)
            .execute(&mut **tx)
            .await?;
        Ok(())
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match run(&Options::parse()).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(e) => {
            eprintln!("lottery: {e}");
            ExitCode::from(3)
        }
    }
}

fn setting(name: &str) -> Result<String, String> {
    std::env::var(name).map_err(|_| format!("{name} is not set; run: scripts/services start && eval \"$(scripts/services env)\""))
}

/// A database of this run's own.
async fn database(server: &str, run: &str, name: &str) -> Result<MySqlPool, Failure> {
    let name = format!("lottery_{run}_{name}");
    let admin = MySqlPool::connect(server).await?;
    sqlx::query(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&admin).await?;
    admin.close().await;
    let base = server.rsplit_once('/').map_or(server, |(base, _)| base);
    Ok(MySqlPool::connect(&format!("{base}/{name}")).await?)
}

async fn make_topic(brokers: &str, topic: &str) -> Result<(), Failure> {
    let admin: AdminClient<DefaultClientContext> = rdkafka::ClientConfig::new().set("bootstrap.servers", brokers).create()?;
    let topic = NewTopic::new(topic, 4, TopicReplication::Fixed(1));
    for made in admin.create_topics([&topic], &AdminOptions::new().operation_timeout(Some(Duration::from_secs(30)))).await? {
        match made {
            Ok(_) | Err((_, rdkafka::types::RDKafkaErrorCode::TopicAlreadyExists)) => {}
            Err((topic, why)) => return Err(format!("topic {topic}: {why}").into()),
        }
    }
    Ok(())
}

async fn run(options: &Options) -> Result<bool, Failure> {
    let started = Instant::now();
    let (server, brokers) = (setting("POSTHOUSE_TEST_MYSQL_URL")?, setting("POSTHOUSE_TEST_KAFKA_URL")?);
    let run = format!("{:012x}", fastrand::u64(..) & 0xffff_ffff_ffff);
    make_topic(&brokers, &options.topic).await?;
    let mut databases = Vec::new();
    for n in 1..=DATABASES {
        databases.push(database(&server, &run, &format!("{n:02}")).await?);
    }
    let lottery = Lottery::open(databases.clone(), &brokers, &options.topic).await?;

    // Accounting, with its own database.
    let ledger = database(&server, &run, "accounting").await?;
    let create =
        "CREATE TABLE invoice (id BIGINT AUTO_INCREMENT PRIMARY KEY, uuid VARCHAR(128), u_id VARCHAR(32), order_id BIGINT)";
    sqlx::query(create).execute(&ledger).await?;
    // The lottery's own records have no type.
    let inbox = Inbox::new(ledger.clone(), "accounting")?.on("", WriteDown);
    inbox.outbox().migrate().await?;
    let mut by_uuid = ConsumerSettings::default();
    by_uuid.id_from = "json:/uuid".parse()?;
    let group = format!("accounting-{run}");
    let consumer =
        KafkaConsumer::new(KafkaSettings::from(&*brokers), group, [&*options.topic])?.settings(by_uuid).start(&inbox).await?;

    // Posthouse, beside the lottery: its own tables in the same databases, and a mapping.
    let mut relays = Vec::new();
    for (n, pool) in databases.iter().enumerate() {
        let outbox = Outbox::new(pool.clone());
        outbox.migrate().await?;
        let mut prizes = Adopted::preset(AdoptedPreset::MqState);
        prizes.destination = Some(format!("kafka:{}", options.topic));
        let columns = ["u_id", "order_id", "award_id", "uuid"].map(String::from).to_vec();
        prizes.payload = Some(AdoptedPayload::Columns { columns });
        // Long enough for the lottery's own first send, which comes right after its commit.
        prizes.unsent_after = Some(Duration::from_secs(2));
        prizes.interval = Some(Duration::from_millis(500));
        let relay = AdoptedRelay::builder(&outbox, format!("prizes-{}", n + 1), prizes)
            .transport("kafka", Kafka::new(&*brokers)?)
            .start()
            .await?;
        relays.push(relay);
    }
    for relay in &relays {
        println!("{}: {}", relay.name(), relay.stats().coverage.tables.join(", "));
    }

    let mut drawn = Vec::new();
    let mut broken = [0u32; 3];
    for n in 0..options.prizes {
        let first = if fastrand::u32(0..100) < options.broken {
            let how = fastrand::usize(0..3);
            broken[how] += 1;
            [FirstSend::Fails, FirstSend::Dies, FirstSend::DiesAfter][how]
        } else {
            FirstSend::Works
        };
        drawn.push(lottery.draw(&format!("user-{}", fastrand::u32(0..5_000)), i64::from(n), first).await?);
    }
    let deadline = started + Duration::from_secs(options.deadline);
    let books = loop {
        let books = books(&databases, &ledger, &drawn).await?;
        if (books.unsent == 0 && books.lost == 0) || Instant::now() > deadline {
            break books;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let mut sent = 0;
    for relay in relays {
        sent += relay.stats().tables.values().map(|t| t.sent).sum::<u64>();
        relay.shutdown(Duration::from_secs(10)).await;
    }
    consumer.shutdown(Duration::from_secs(10)).await;

    let balanced = books.unsent == 0 && books.lost == 0 && books.twice == 0;
    println!(
        "prizes drawn                            {:>7}\n\
         first sends that failed (mq_state 2)    {:>7}\n\
         first sends that never came (NULL)      {:>7}\n\
         sent, but never marked (NULL)           {:>7}\n\
         sent by Posthouse                       {sent:>7}\n\
         rows not marked as sent                 {:>7}\n\
         prizes lost                             {:>7}\n\
         prizes delivered twice                  {:>7}\n\
         {:.1} s: the books {}",
        drawn.len(),
        broken[0],
        broken[1],
        broken[2],
        books.unsent,
        books.lost,
        books.twice,
        started.elapsed().as_secs_f64(),
        if balanced { "balance" } else { "DO NOT BALANCE" },
    );
    Ok(balanced)
}

/// What all databases say.
struct Books {
    unsent: i64,
    lost: usize,
    twice: usize,
}

async fn books(databases: &[MySqlPool], ledger: &MySqlPool, drawn: &[Invoice]) -> Result<Books, Failure> {
    let mut unsent = 0;
    for database in databases {
        for number in 0..TABLES {
            let sql = format!("SELECT count(*) FROM {} WHERE mq_state IS NULL OR mq_state <> 1", table(number));
            unsent += sqlx::query_scalar::<_, i64>(AssertSqlSafe(sql)).fetch_one(database).await?;
        }
    }
    let written: Vec<String> = sqlx::query_scalar("SELECT uuid FROM invoice").fetch_all(ledger).await?;
    let (mut once, mut twice) = (HashSet::new(), HashSet::new());
    for uuid in &written {
        if !once.insert(uuid.as_str()) {
            twice.insert(uuid.as_str());
        }
    }
    // Whatever else is in the topic is none of this run's.
    let lost = drawn.iter().filter(|i| !once.contains(i.uuid.as_str())).count();
    let twice = drawn.iter().filter(|i| twice.contains(i.uuid.as_str())).count();
    Ok(Books { unsent, lost, twice })
}
