//! Runs both services against real databases and a broker of its own, breaks things meanwhile, and settles the books of both
//! databases at the end: every order that was committed was taken from the stock, exactly once.

use std::process::{ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use order_inventory::{TOPIC, asked_to_stop};
use posthouse_faults::Server;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use sqlx::{MySqlPool, PgPool};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    Rabbitmq,
    Kafka,
}

/// Breaks things while orders are placed, then settles the books.
#[derive(Debug, Clone, Parser)]
struct Options {
    /// What stands between the services.
    #[arg(long, value_enum, default_value = "rabbitmq")]
    broker: Kind,
    /// Orders to place; one in ten is refused by the order service, which rolls its transaction back.
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(10..))]
    orders: u32,
    /// How often the inventory service is killed with SIGKILL.
    #[arg(long, default_value_t = 5)]
    kills: u32,
    /// How often the order service is killed with SIGKILL.
    #[arg(long, default_value_t = 2)]
    order_kills: u32,
    /// How often the broker is stopped and started again.
    #[arg(long, default_value_t = 1)]
    broker_restarts: u32,
    /// How many of 100 runs of the inventory's handler fail.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=90))]
    fail_percent: u32,
    /// Seconds until everything must be settled.
    #[arg(long, default_value_t = 600)]
    deadline: u64,
}

const CLIENTS: usize = 8;

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    let ended = tokio::select! {
        ended = run(&options) => ended,
        // Dropping the run ends the services and removes the broker.
        () = asked_to_stop() => Err("stopped before the books were settled".into()),
    };
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(e) => {
            eprintln!("faults: {e}");
            ExitCode::from(3)
        }
    }
}

async fn run(options: &Options) -> Outcome<bool> {
    let started = Instant::now();
    let deadline = started + Duration::from_secs(options.deadline);
    let mut broker = match options.broker {
        Kind::Rabbitmq => Server::start(posthouse_faults::Kind::RabbitMq, "").await?,
        Kind::Kafka => Server::start(posthouse_faults::Kind::Kafka, "").await?,
    };
    if options.broker == Kind::Kafka {
        make_topic(&broker).await?;
    }
    let databases = Databases::new().await?;
    let orders = Service::new("order-service", &broker, &databases, options);
    let inventory = Service::new("inventory-service", &broker, &databases, options);
    let address = orders.start().await?;
    inventory.start().await?;
    if options.broker == Kind::Rabbitmq {
        // A queue that RabbitMQ declared a moment before it is killed may be gone afterwards; this puts it on its disk.
        settle_topology(&address, &databases, deadline).await?;
        broker.restart().await?;
    }

    let address = Arc::new(Mutex::new(address));
    let placed = Arc::new(AtomicU64::new(0));
    let allowed = Arc::new(AtomicU64::new(0));
    let done = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| tokio::spawn(place(client, options.orders, address.clone(), placed.clone(), allowed.clone(), deadline)))
        .collect();
    let progress = tokio::spawn(report(options.orders, placed.clone(), databases.clone(), done.clone()));

    // Spread over the orders, in no particular order.
    let mut faults: Vec<&str> = Vec::new();
    for (fault, times) in
        [("kill inventory", options.kills), ("kill orders", options.order_kills), ("restart broker", options.broker_restarts)]
    {
        faults.extend((0..times).map(|_| fault));
    }
    fastrand::shuffle(&mut faults);
    let share = |n: usize| u64::from(options.orders) * n as u64 / (faults.len() as u64 + 1);
    for (n, fault) in faults.iter().enumerate() {
        // As many orders lie between two faults as between others, and some of them are on their way when the next one comes.
        allowed.store(share(n + 2), Relaxed);
        while placed.load(Relaxed) < share(n + 1) {
            in_time(deadline, "orders to be placed")?;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let before = databases.books().await?.movements;
        // After a broker's restart, or the order service's death (its houses wait for their lease), nothing comes for a while.
        let long_enough = Instant::now() + Duration::from_secs(10);
        while databases.books().await?.movements == before && Instant::now() < long_enough {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        eprintln!("{:>6.1} s  {fault}", started.elapsed().as_secs_f64());
        match *fault {
            "kill inventory" => {
                inventory.kill().await?;
                inventory.start().await?;
            }
            "kill orders" => {
                orders.kill().await?;
                let new = orders.start().await?;
                *address.lock().map_err(|_| "a client panicked")? = new;
            }
            _ => broker.restart().await?,
        }
    }
    allowed.store(u64::MAX, Relaxed);
    for client in clients {
        client.await??;
    }
    let books = loop {
        let books = databases.books().await?;
        if books.settled() || Instant::now() > deadline {
            break books;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    done.store(true, Relaxed);
    progress.await?;
    orders.stop().await?;
    inventory.stop().await?;
    // What a service still had in hand has no effect any more.
    let last = databases.books().await?;
    println!("{}", last.table(options, started.elapsed()));
    broker.remove()?;
    Ok(books.settled() && last.balanced())
}

fn in_time(deadline: Instant, what: &str) -> Outcome<()> {
    if Instant::now() > deadline { Err(format!("gave up waiting for {what} (--deadline)").into()) } else { Ok(()) }
}

/// One order that goes all the way, so that everything that is declared on the way is there.
async fn settle_topology(address: &str, databases: &Databases, deadline: Instant) -> Outcome<()> {
    reqwest::Client::new()
        .post(format!("{address}/orders"))
        .json(&serde_json::json!({ "sku": "lamp", "count": 1 }))
        .send()
        .await?;
    while !databases.books().await?.settled() {
        in_time(deadline, "the first order")?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// Places its share of the orders, whatever becomes of the order service meanwhile. An order without an answer is placed again:
/// it may be there twice then, and each is an order of its own.
async fn place(
    client: usize,
    orders: u32,
    address: Arc<Mutex<String>>,
    placed: Arc<AtomicU64>,
    allowed: Arc<AtomicU64>,
    deadline: Instant,
) -> Outcome<()> {
    let http = reqwest::Client::new();
    for n in (client as u32..orders).step_by(CLIENTS) {
        let order = serde_json::json!({ "sku": (["lamp", "chair", "desk"])[n as usize % 3], "count": if n % 10 == 9 { 0 } else { n % 5 + 1 } });
        while placed.load(Relaxed) >= allowed.load(Relaxed) {
            in_time(deadline, "a fault")?;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        loop {
            let url = format!("{}/orders", address.lock().map_err(|_| "a fault panicked")?);
            match http.post(url).json(&order).send().await {
                Ok(answer) if answer.status().as_u16() == 201 || answer.status().as_u16() == 422 => break,
                _ => in_time(deadline, "the order service")?,
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        placed.fetch_add(1, Relaxed);
    }
    Ok(())
}

async fn report(orders: u32, placed: Arc<AtomicU64>, databases: Databases, done: Arc<AtomicBool>) {
    let mut last = Instant::now();
    while !done.load(Relaxed) {
        tokio::time::sleep(Duration::from_millis(50)).await;
        if last.elapsed() >= Duration::from_secs(2) {
            last = Instant::now();
            if let Ok(books) = databases.books().await {
                eprintln!(
                    "          placed {} of {orders}, {} taken from the stock, {} waiting for another run",
                    placed.load(Relaxed),
                    books.movements,
                    books.unfinished
                );
            }
        }
    }
}

/// One of the two services, as a process.
struct Service {
    name: &'static str,
    variables: Vec<(&'static str, String)>,
    child: tokio::sync::Mutex<Option<Child>>,
}

impl Service {
    fn new(name: &'static str, broker: &Server, databases: &Databases, options: &Options) -> Self {
        let variables = vec![
            ("BROKER_URL", broker_url(options.broker, broker)),
            ("ORDERS_DATABASE_URL", databases.orders_url.clone()),
            ("INVENTORY_DATABASE_URL", databases.inventory_url.clone()),
            ("FAIL_PERCENT", options.fail_percent.to_string()),
            ("LISTEN", "127.0.0.1:0".into()),
            ("INSTANCE", name.into()),
            ("RUST_LOG", "off".into()),
        ];
        Self { name, variables, child: Default::default() }
    }

    /// Starts it; what stands after `http` in its first line is where it listens.
    async fn start(&self) -> Outcome<String> {
        let program = std::env::current_exe()?.with_file_name(self.name);
        let mut child = Command::new(&program)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| format!("{}: {e}; build the whole example first: cargo build -p order-inventory", program.display()))?;
        let out = child.stdout.take().ok_or("no output")?;
        let line = BufReader::new(out).lines().next_line().await?.ok_or_else(|| format!("{} ended at once", self.name))?;
        *self.child.lock().await = Some(child);
        Ok(line.rsplit(' ').next().unwrap_or_default().to_owned())
    }

    /// SIGKILL.
    async fn kill(&self) -> Outcome<()> {
        if let Some(mut child) = self.child.lock().await.take() {
            child.kill().await?;
        }
        Ok(())
    }

    /// SIGTERM, and waits until it is gone.
    async fn stop(&self) -> Outcome<()> {
        if let Some(mut child) = self.child.lock().await.take() {
            if let Some(id) = child.id() {
                Command::new("kill").arg(id.to_string()).status().await?;
            }
            child.wait().await?;
        }
        Ok(())
    }
}

/// Where the services find a broker of this kind.
fn broker_url(kind: Kind, broker: &Server) -> String {
    match kind {
        Kind::Rabbitmq => broker.url().to_owned(),
        Kind::Kafka => format!("kafka://{}", broker.url()),
    }
}

async fn make_topic(broker: &Server) -> Outcome<()> {
    let admin: AdminClient<DefaultClientContext> =
        rdkafka::ClientConfig::new().set("bootstrap.servers", broker.url()).create()?;
    let topic = NewTopic::new(TOPIC, 6, TopicReplication::Fixed(1));
    for made in admin.create_topics([&topic], &AdminOptions::new().operation_timeout(Some(Duration::from_secs(30)))).await? {
        made.map_err(|(topic, why)| format!("topic {topic}: {why}"))?;
    }
    Ok(())
}

/// A database for each service, made for this run.
#[derive(Clone)]
struct Databases {
    orders_url: String,
    inventory_url: String,
    orders: PgPool,
    inventory: MySqlPool,
}

/// What both databases say.
#[derive(Debug, Default)]
struct Books {
    orders: i64,
    unsent: i64,
    received: i64,
    unfinished: i64,
    failed: i64,
    movements: i64,
    distinct: i64,
    ordered: i64,
    taken_by_movements: i64,
    taken_from_stock: i64,
}

impl Databases {
    async fn new() -> Outcome<Self> {
        let server = |variable: &str| {
            std::env::var(variable)
                .map_err(|_| format!("{variable} is not set; run: scripts/services start && eval \"$(scripts/services env)\""))
        };
        let (postgres, mariadb) = (server("POSTHOUSE_TEST_POSTGRES_URL")?, server("POSTHOUSE_TEST_MYSQL_URL")?);
        let name = format!("shop_{:016x}", fastrand::u64(..));
        let sql = || sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"));
        sqlx::query(sql()).execute(&PgPool::connect(&postgres).await?).await?;
        sqlx::query(sql()).execute(&MySqlPool::connect(&mariadb).await?).await?;
        let beside = |url: &str| url.rsplit_once('/').map_or_else(|| url.to_owned(), |(base, _)| format!("{base}/{name}"));
        let (orders_url, inventory_url) = (beside(&postgres), beside(&mariadb));
        Ok(Self {
            orders: PgPool::connect(&orders_url).await?,
            inventory: MySqlPool::connect(&inventory_url).await?,
            orders_url,
            inventory_url,
        })
    }

    async fn books(&self) -> Outcome<Books> {
        let (orders, ordered): (i64, i64) =
            sqlx::query_as("SELECT count(*), coalesce(sum(count), 0)::bigint FROM orders").fetch_one(&self.orders).await?;
        let unsent: i64 =
            sqlx::query_scalar("SELECT count(*) FROM posthouse_outbox WHERE status <> 'SENT'").fetch_one(&self.orders).await?;
        let (received, unfinished, failed): (i64, i64, i64) = sqlx::query_as(
            "SELECT count(*), CAST(coalesce(sum(status IN ('PENDING_RETRY', 'RETRYING')), 0) AS SIGNED), \
             CAST(coalesce(sum(status = 'FAILED'), 0) AS SIGNED) FROM posthouse_inbox",
        )
        .fetch_one(&self.inventory)
        .await?;
        let (movements, distinct, taken_by_movements): (i64, i64, i64) =
            sqlx::query_as("SELECT count(*), count(DISTINCT order_id), CAST(coalesce(sum(count), 0) AS SIGNED) FROM movement")
                .fetch_one(&self.inventory)
                .await?;
        let taken_from_stock: i64 =
            sqlx::query_scalar("SELECT CAST(3 * 1000000 - sum(count) AS SIGNED) FROM stock").fetch_one(&self.inventory).await?;
        Ok(Books {
            orders,
            unsent,
            received,
            unfinished,
            failed,
            movements,
            distinct,
            ordered,
            taken_by_movements,
            taken_from_stock,
        })
    }
}

impl Books {
    /// Nothing is on its way any more.
    fn settled(&self) -> bool {
        self.orders > 0 && self.unsent == 0 && self.unfinished == 0 && self.received >= self.orders
    }

    fn balanced(&self) -> bool {
        self.settled()
            && self.failed == 0
            && [self.received, self.movements, self.distinct].iter().all(|n| *n == self.orders)
            && [self.taken_by_movements, self.taken_from_stock].iter().all(|n| *n == self.ordered)
    }

    fn table(&self, options: &Options, took: Duration) -> String {
        let lost = self.orders - self.distinct;
        let twice = self.movements - self.distinct;
        format!(
            "orders committed (PostgreSQL)        {:>9}   articles ordered      {:>9}\n\
             messages not sent                    {:>9}\n\
             messages received (MariaDB)          {:>9}   articles in movements {:>9}\n\
             waiting for another run              {:>9}   taken from the stock  {:>9}\n\
             given up                             {:>9}\n\
             orders lost                          {lost:>9}\n\
             orders taken twice                   {twice:>9}\n\
             {:?}: {} kills of the inventory, {} of the order service, {} broker restarts, {} % failures, {:.1} s: the books {}",
            self.orders,
            self.ordered,
            self.unsent,
            self.received,
            self.taken_by_movements,
            self.unfinished,
            self.taken_from_stock,
            self.failed,
            options.broker,
            options.kills,
            options.order_kills,
            options.broker_restarts,
            options.fail_percent,
            took.as_secs_f64(),
            if self.balanced() { "balance" } else { "DO NOT BALANCE" },
        )
    }
}
