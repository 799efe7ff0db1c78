//! Telling admins where we are, again and again, and that we are gone.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::admins::{Admins, told};
use super::wire;

/// An admin forgets an executor that it hasn't heard of for 90 s.
const BEAT: Duration = Duration::from_secs(30);

/// Every so many beats without an answer there is another warning.
const WARN_EVERY: u32 = 10;

/// Registers until told to stop. Then it takes the registration back.
pub(super) async fn run(admins: Arc<Admins>, app_name: String, address: String, mut stop: watch::Receiver<bool>) {
    let body = wire::registry(&app_name, &address);
    let mut ticks = interval(BEAT);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failed_beats = 0_u32;
    let mut registered = false;
    loop {
        tokio::select! {
            // The sender lives as long as the executor; without it there is nobody to register for.
            _ = stop.wait_for(|stop| *stop) => break,
            _ = ticks.tick() => {}
        }
        let beat = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => break,
            beat = admins.first("registry", &body) => beat,
        };
        match beat {
            Ok(()) => {
                if !registered || failed_beats > 0 {
                    tracing::info!(app_name, address, "registered with an XXL-JOB admin");
                }
                (registered, failed_beats) = (true, 0);
            }
            Err(why) => {
                if failed_beats.is_multiple_of(WARN_EVERY) {
                    let admins = told(&why);
                    tracing::warn!(
                        app_name,
                        address,
                        admins,
                        "no XXL-JOB admin takes the registration: it can trigger no runs here"
                    );
                }
                failed_beats += 1;
            }
        }
    }
    // A beat that was cut off may have arrived, so even without a success there may be something to take back.
    match admins.first("registryRemove", &body).await {
        Ok(()) => tracing::info!(app_name, address, "registration with the XXL-JOB admin taken back"),
        Err(why) => tracing::warn!(admins = told(&why), "the registration stays with the XXL-JOB admin until it times out"),
    }
}
