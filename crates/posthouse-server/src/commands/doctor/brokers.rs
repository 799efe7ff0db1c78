//! Whether brokers can be reached at all.

use std::time::Duration;

use posthouse::store::Finding;
use tokio::net::TcpStream;

use super::Examined;
use crate::config::Config;
use crate::output::span;

/// How long a broker may take to accept a connection.
const PATIENCE: Duration = Duration::from_secs(5);

/// Each broker, each of its addresses. Nobody logs in: what else may be wrong with it, its destinations tell.
pub(super) async fn examine(config: &Config) -> Vec<Examined> {
    let brokers = config.transports.iter().filter(|(_, t)| t.is_broker());
    futures_util::future::join_all(brokers.map(|(name, transport)| async move {
        let mut out = Examined::new(format!("transport {name}"));
        out.what = Some(transport.kind().to_owned());
        let servers = transport.servers();
        let answers = futures_util::future::join_all(servers.iter().map(|server| connect(server))).await;
        let reached = answers.iter().any(Result::is_ok);
        for (server, answer) in servers.iter().zip(answers) {
            out.findings.push(match answer {
                Ok(()) => Finding::ok("connection", format!("{server} accepts connections")),
                // Of several servers one is enough to find the others.
                Err(why) if reached => {
                    Finding::warning("connection", format!("{server}: {why}"), "start it, or take it out of the configuration")
                }
                Err(why) => {
                    out.unreachable = true;
                    let fix = "start it, or correct its address in the configuration; messages wait until it is there";
                    Finding::error("connection", format!("{server}: {why}"), fix)
                }
            });
        }
        out
    }))
    .await
}

async fn connect(server: &str) -> Result<(), String> {
    match tokio::time::timeout(PATIENCE, TcpStream::connect(server)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(e)) => Err(format!("can't be reached: {e}")),
        Err(_) => Err(format!("no answer within {}", span(PATIENCE))),
    }
}
