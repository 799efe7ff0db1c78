//! The play itself: starts everybody, kills the relay in mid-delivery, takes the receiver away for a moment, waits until
//! everything is delivered, and asks the books.
//!
//! Every turn of it waits for something that was seen (orders placed, a call held, the breaker open), never for time to pass.

use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use super::books::Books;
use super::child::{Child, Setup};
use super::inventory::{HOLD, InventoryReport};
use super::relay::{LEASE, RelayReport};
use super::report::{Course, Report};
use super::scratch::Scratch;
use super::shop::{Placed, Shop};
use super::view::View;
use super::{Cook, Failure, Role};

/// What is to be played.
#[derive(Debug, Clone, Copy)]
pub(super) struct Play {
    pub(super) orders: u64,
    pub(super) seed: u64,
    pub(super) keep: bool,
    pub(super) cook: Option<Cook>,
}

/// The first child's answer must be there by now.
const START: Duration = Duration::from_secs(20);

/// How often the files are looked at.
const LOOK: Duration = Duration::from_millis(100);

/// A receiver that nobody missed (everything was delivered already) comes back after this.
const OUTAGE: Duration = Duration::from_secs(3);

/// Where the play is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// Orders are taken and delivered.
    Opening,
    /// The receiver will keep the next call waiting, for the relay to be killed in the middle of it.
    Holding,
    /// A new relay waits for the killed one's lease to run out.
    Orphaned,
    /// Deliveries go on.
    Resumed,
    /// The receiver's port is closed, and so many tries have found that.
    Outage { since: Instant, found: u64 },
    /// Nothing more will be broken.
    Last,
}

struct Stage<'a> {
    play: Play,
    dir: &'a Path,
    port: u16,
    act: Act,
    relay: Child<RelayReport>,
    inventory: Option<Child<InventoryReport>>,
    view: View,
    course: Course,
}

/// Plays it to the end. Whatever way this ends, the children do too, and the files are removed unless they are kept.
pub(super) async fn run(play: Play) -> Result<Report, Failure> {
    let scratch = Scratch::new(play.keep)?;
    let view = View::new(play.orders);
    view.event(&format!("{} orders, seed {}", play.orders, play.seed));
    if play.keep {
        view.event(&format!("files: {}", scratch.path().display()));
    }
    let mut stop = std::pin::pin!(interrupted());
    let opened = tokio::select! {
        opened = open(play, scratch.path(), view) => opened,
        () = &mut stop => Err(Failure::Interrupted),
    };
    let (mut stage, shop) = opened?;
    let pool = shop.pool();
    let mut shops = JoinSet::new();
    let (sender, placed) = watch::channel(0);
    shops.spawn(shop.take_orders(sender));
    let played = stage.play(&mut shops, placed, stop).await;
    // However it went: nobody has the files open when they are removed.
    shops.shutdown().await;
    pool.close().await;
    stage.clear().await?;
    played
}

/// Ctrl-C, or a polite request to end.
async fn interrupted() {
    #[cfg(unix)]
    let terminated = async {
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(mut signal) => signal.recv().await,
            Err(_) => std::future::pending().await,
        }
    };
    #[cfg(not(unix))]
    let terminated = std::future::pending::<Option<()>>();
    tokio::select! {
        // If it can't be listened for, the default holds: this process ends at once, and the children with it.
        Ok(()) = tokio::signal::ctrl_c() => {}
        Some(()) = terminated => {}
        else => std::future::pending().await,
    }
}

async fn open(play: Play, dir: &Path, view: View) -> Result<(Stage<'_>, Shop), Failure> {
    let shop = Shop::new(dir, play.orders, play.seed, play.cook).await?;
    let (inventory, port) = start_inventory(Setup { dir, port: 0, seed: play.seed, cook: play.cook }).await?;
    let relay = Child::start(Role::Relay, Setup { dir, port, seed: play.seed, cook: play.cook })?;
    let course = Course { seed: play.seed, placed: play.orders, ..Course::default() };
    Ok((Stage { play, dir, port, act: Act::Opening, relay, inventory: Some(inventory), view, course }, shop))
}

/// Starts the receiver and waits until it listens.
async fn start_inventory(setup: Setup<'_>) -> Result<(Child<InventoryReport>, u16), Failure> {
    let mut inventory = Child::start(Role::Inventory, setup)?;
    match tokio::time::timeout(START, inventory.next()).await {
        Ok(Ok(InventoryReport::Listening(port))) => Ok((inventory, port)),
        Ok(Ok(other)) => Err(unexpected(format!("reported {other:?} before it listened"))),
        Ok(Err(e)) => Err(e),
        Err(_) => Err(unexpected(format!("did not listen within {START:?}"))),
    }
}

fn unexpected(what: String) -> Failure {
    Failure::Child { name: Role::Inventory.name(), what, log: String::new() }
}

impl Stage<'_> {
    fn setup(&self) -> Setup<'_> {
        Setup { dir: self.dir, port: self.port, seed: self.play.seed, cook: self.play.cook }
    }

    async fn play(
        &mut self,
        shops: &mut JoinSet<Result<(), Failure>>,
        mut placed: watch::Receiver<Placed>,
        mut stop: Pin<&mut impl Future<Output = ()>>,
    ) -> Result<Report, Failure> {
        let limit = Duration::from_secs(70) + Duration::from_millis(20) * u32::try_from(self.play.orders).unwrap_or(u32::MAX);
        let give_up = Instant::now() + limit;
        let mut books = Books::open(self.dir).await?;
        let mut shop_open = true;
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = &mut stop => return Err(Failure::Interrupted),
                Some(closed) = shops.join_next() => {
                    shop_open = false;
                    closed.map_err(|e| Failure::io("the shop")(e.into()))??;
                    self.view.event("all orders are placed");
                }
                Ok(()) = placed.changed() => {
                    let n = *placed.borrow_and_update();
                    self.on_placed(n).await?;
                }
                report = self.relay.next() => self.on_relay(report?).await?,
                report = next_of(&mut self.inventory) => self.on_inventory(report?).await?,
                _ = look.tick() => {
                    let now = books.glance().await?;
                    self.view.show(&now);
                    if let Act::Outage { since, .. } = self.act && since.elapsed() > OUTAGE {
                        self.reopen().await?;
                    }
                    let done = !shop_open && now.pending == 0 && self.inventory.is_some();
                    if done || Instant::now() > give_up {
                        self.course.gave_up = (!done).then_some(limit);
                        break;
                    }
                }
            }
        }
        self.view.finish();
        self.course.took = self.view.elapsed();
        // One after the other: what the relay still has on its way ends before the receiver does.
        self.relay.stop().await?;
        if let Some(inventory) = &mut self.inventory {
            inventory.stop().await?;
        }
        let totals = books.totals().await?;
        books.close().await?;
        self.course.files = self.play.keep.then(|| self.dir.to_owned());
        Ok(Report::new(totals, std::mem::take(&mut self.course)))
    }

    /// Ends what still runs.
    async fn clear(&mut self) -> Result<(), Failure> {
        self.view.finish();
        self.relay.kill().await?;
        match &mut self.inventory {
            Some(inventory) => inventory.kill().await,
            None => Ok(()),
        }
    }

    async fn on_placed(&mut self, placed: Placed) -> Result<(), Failure> {
        if self.act == Act::Opening
            && placed >= self.play.orders / 3
            && let Some(inventory) = &mut self.inventory
        {
            inventory.tell(HOLD).await?;
            self.act = Act::Holding;
        }
        Ok(())
    }

    async fn on_inventory(&mut self, report: InventoryReport) -> Result<(), Failure> {
        match (report, self.act) {
            (InventoryReport::Held { order }, Act::Holding) => {
                self.relay.kill().await?;
                self.relay = Child::start(Role::Relay, self.setup())?;
                self.course.relay_kills += 1;
                self.view.event(&format!(
                    "relay killed (SIGKILL) while order {order} is applied but not yet confirmed; a new one started"
                ));
                self.act = Act::Orphaned;
            }
            (InventoryReport::Applied(n), Act::Resumed) if n >= self.play.orders / 2 => {
                if let Some(mut inventory) = self.inventory.take() {
                    inventory.kill().await?;
                }
                self.view.event("receiver killed (SIGKILL): its port is closed");
                self.act = Act::Outage { since: Instant::now(), found: 0 };
            }
            _ => {}
        }
        Ok(())
    }

    async fn on_relay(&mut self, report: RelayReport) -> Result<(), Failure> {
        match self.act {
            Act::Orphaned if report.works => {
                self.view.event(&format!("the killed relay's lease ({LEASE:?}) has run out: the new one goes on"));
                self.act = Act::Resumed;
            }
            Act::Outage { since, found } if report.unavailable > found => {
                if found == 0 {
                    self.view.event("relay found it down: the breaker is open, messages wait, no attempts are counted");
                    self.act = Act::Outage { since, found: report.unavailable };
                } else {
                    self.view.event("relay probed it again: still down");
                    self.reopen().await?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    async fn reopen(&mut self) -> Result<(), Failure> {
        let (inventory, _) = start_inventory(self.setup()).await?;
        self.inventory = Some(inventory);
        self.course.receiver_restarts += 1;
        self.view.event("receiver restarted");
        self.act = Act::Last;
        Ok(())
    }
}

/// Its next report; never while there is none.
async fn next_of(inventory: &mut Option<Child<InventoryReport>>) -> Result<InventoryReport, Failure> {
    match inventory {
        Some(inventory) => inventory.next().await,
        None => std::future::pending().await,
    }
}
