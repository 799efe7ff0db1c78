//! Publishers: business rows and messages in one transaction each, some of which are rolled back.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthouse::{Message, Outbox};
use sqlx::pool::PoolOptions;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::check::{Outcome, Published};
use super::content::{Booking, TYPE};
use super::source::Source;
use super::{ACCOUNTS, Sabotage};

/// A transaction that takes longer is given up; its connection may be dead.
const DEADLINE: Duration = Duration::from_secs(8);

/// One of several, a task of its own.
pub(super) struct Publisher {
    pub(super) number: usize,
    pub(super) random: fastrand::Rng,
    /// Of the database, through a proxy.
    pub(super) url: String,
    /// From one transaction to the next.
    pub(super) pace: Duration,
    pub(super) sabotage: Option<Sabotage>,
    /// What all publishers did.
    pub(super) record: Arc<Mutex<Vec<Published>>>,
    pub(super) stop: Arc<AtomicBool>,
}

/// What shall happen in a transaction.
struct Plan {
    account: &'static str,
    keyed: bool,
    /// Of each booking.
    amounts: Vec<i64>,
    /// How long it stays open although all is written.
    open: Duration,
    roll_back: bool,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

impl Publisher {
    pub(super) async fn run<DB: Source>(mut self) {
        let mut outbox = self.connect::<DB>();
        let mut ticks = interval(self.pace);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut made = 0;
        while !self.stop.load(Relaxed) {
            ticks.tick().await;
            let plan = self.plan();
            let (mut bookings, mut asked) = (Vec::new(), false);
            let written = timeout(DEADLINE, self.write(&outbox, &plan, made, &mut bookings, &mut asked)).await;
            made += plan.amounts.len();
            let done = matches!(written, Ok(Ok(())));
            let outcome = match asked {
                false => Outcome::RolledBack,
                true if done => Outcome::Committed,
                true => Outcome::Unknown,
            };
            if let Ok(mut record) = self.record.lock() {
                record.extend(bookings.into_iter().map(|booking| Published { booking, outcome }));
            }
            if !done {
                // What the connections are in is not known.
                outbox = self.connect();
                sleep(Duration::from_millis(50)).await;
            }
        }
    }

    fn connect<DB: Source>(&self) -> Outbox<DB> {
        let options = PoolOptions::new().max_connections(2).acquire_timeout(Duration::from_secs(3));
        // Checked when the run began: it is a URL.
        Outbox::new(options.connect_lazy(&self.url).expect("the URL of the sender's database"))
    }

    fn plan(&mut self) -> Plan {
        let random = &mut self.random;
        let count = random.usize(1..=3);
        Plan {
            account: ACCOUNTS[random.usize(..ACCOUNTS.len())],
            keyed: random.u8(0..3) > 0,
            amounts: (0..count).map(|_| random.i64(-100..=100)).collect(),
            open: match random.u8(0..40) {
                0 => Duration::from_millis(random.u64(200..3_000)),
                _ => Duration::ZERO,
            },
            roll_back: random.u8(0..10) == 0,
        }
    }

    /// `bookings` gets what is published, and `asked` becomes true when the commit is asked for.
    async fn write<DB: Source>(
        &self,
        outbox: &Outbox<DB>,
        plan: &Plan,
        made: usize,
        bookings: &mut Vec<Booking>,
        asked: &mut bool,
    ) -> Result<(), Failure> {
        let mut tx = outbox.begin().await?;
        let count = plan.amounts.len() as i64;
        let last = DB::draw(&mut tx, plan.account, if plan.keyed { count } else { 0 }, plan.amounts.iter().sum()).await?;
        for (n, amount) in plan.amounts.iter().enumerate() {
            let booking = Booking {
                id: format!("p{}-{}", self.number, made + n),
                account: plan.account.into(),
                seq: if plan.keyed { last - count + 1 + n as i64 } else { 0 },
                amount: *amount,
            };
            bookings.push(booking.clone());
            DB::book(&mut tx, &booking).await?;
            let message = message(&booking);
            if plan.roll_back && self.sabotage == Some(Sabotage::RolledBack) {
                outbox.publish_alone(message).await?;
            } else {
                outbox.publish(&mut tx, message).await?;
            }
        }
        if !plan.open.is_zero() {
            sleep(plan.open).await;
        }
        if plan.roll_back {
            return Ok(tx.rollback().await?);
        }
        *asked = true;
        Ok(outbox.commit(tx).await?)
    }
}

fn message(booking: &Booking) -> Message {
    let to = if booking.key().is_some() { "keyed" } else { "loose" };
    let message = Message::to(to).typed(TYPE).id(booking.id.as_str()).payload(booking.payload());
    match booking.key() {
        Some(key) => message.key(key),
        None => message,
    }
}
