//! Progress on stderr: bars on a terminal, lines elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::books::Glance;

/// Without a terminal, the counts are shown this often.
const LINES: Duration = Duration::from_secs(2);

/// What people see while it runs.
pub(super) struct View {
    started: Instant,
    bars: Option<Bars>,
    said: Instant,
}

struct Bars {
    all: MultiProgress,
    orders: ProgressBar,
    delivered: ProgressBar,
    receiver: ProgressBar,
}

impl View {
    pub(super) fn new(orders: u64) -> Self {
        let now = Instant::now();
        Self { started: now, bars: std::io::stderr().is_terminal().then(|| Bars::new(orders)), said: now }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Something happened that is worth a line.
    pub(super) fn event(&self, what: &str) {
        let line = format!("{:>5.1}s  {what}", self.elapsed().as_secs_f64());
        match &self.bars {
            // Fails only if stderr does, and then there is nobody to tell.
            Some(bars) => drop(bars.all.println(line)),
            None => eprintln!("{line}"),
        }
    }

    /// How things stand.
    pub(super) fn show(&mut self, now: &Glance) {
        if let Some(bars) = &self.bars {
            bars.show(now);
        } else if self.said.elapsed() >= LINES {
            self.said = Instant::now();
            self.event(&format!("{}; {}; {}", orders(now), messages(now), receiver(now)));
        }
    }

    /// Takes the bars away: the report says it all.
    pub(super) fn finish(&self) {
        if let Some(bars) = &self.bars {
            // As above.
            drop(bars.all.clear());
        }
    }
}

impl Bars {
    fn new(count: u64) -> Self {
        let style = |template| ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let all = MultiProgress::new();
        let bar = |template| all.add(ProgressBar::new(count).with_style(style(template)));
        Self {
            orders: bar("orders    [{bar:30.cyan}] {msg}"),
            delivered: bar("messages  [{bar:30.green}] {msg}"),
            receiver: bar("receiver  {msg}"),
            all,
        }
    }

    fn show(&self, now: &Glance) {
        self.orders.set_position(now.committed + now.rolled_back);
        self.orders.set_message(orders(now));
        // Those that were rolled back have no message to deliver.
        self.delivered.set_length(self.orders.length().unwrap_or_default().saturating_sub(now.rolled_back));
        self.delivered.set_position(now.sent);
        self.delivered.set_message(messages(now));
        self.receiver.set_message(receiver(now));
    }
}

fn orders(now: &Glance) -> String {
    format!("{} committed, {} rolled back", now.committed, now.rolled_back)
}

fn messages(now: &Glance) -> String {
    format!("{} pending, {} sent, {} failed", now.pending, now.sent, now.failed)
}

fn receiver(now: &Glance) -> String {
    format!(
        "{} calls, {} failed on purpose, {} effects, {} duplicates absorbed",
        now.calls, now.faults, now.applied, now.duplicates
    )
}
