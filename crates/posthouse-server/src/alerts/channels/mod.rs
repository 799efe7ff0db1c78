//! Ways to tell people: each in a file of its own, with what goes over the wire and what counts as taken.

mod dingtalk;
mod feishu;
mod http;
mod slack;
mod smtp;
mod webhook;
mod wecom;

use std::collections::BTreeMap;
use std::time::Duration;

use self::http::Post;
use self::smtp::Smtp;
use super::notice::{Letter, Notice};
use crate::config::{ChannelConfig, ChannelKind};
use crate::failure::Failure;

/// The channel that there is where none is configured.
pub(crate) const LOG: &str = "log";

/// Why a channel didn't take a letter. The text holds no secret: addresses of webhooks are secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NotTaken {
    pub(crate) why: String,
    /// When it asks to be tried again, where it says so.
    pub(crate) after: Option<Duration>,
}

impl NotTaken {
    fn because(why: impl Into<String>) -> Self {
        Self { why: why.into(), after: None }
    }
}

/// A channel that is configured.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) kind: &'static str,
    template: Option<String>,
    timeout: Duration,
    way: Way,
}

#[derive(Debug)]
enum Way {
    Post(Post),
    Smtp(Smtp),
    Log,
}

/// All channels by name.
#[derive(Debug)]
pub(crate) struct Channels(BTreeMap<String, Channel>);

impl Channels {
    /// Connects to nothing.
    pub(crate) fn new(config: &BTreeMap<String, ChannelConfig>) -> Result<Self, Failure> {
        let told = |name: &str, why: String| Failure::usage(format!("channel {name:?}: {why}"));
        let mut client = None;
        let mut all = BTreeMap::new();
        for (name, config) in config {
            let way = match &config.kind {
                ChannelKind::Log => Way::Log,
                ChannelKind::Smtp(settings) => Way::Smtp(Smtp::new(settings, config.timeout).map_err(|why| told(name, why))?),
                ChannelKind::Post(settings) => {
                    let client = match &client {
                        Some(client) => client,
                        None => client.insert(http::client().map_err(|why| told(name, why))?),
                    };
                    Way::Post(Post::new(settings, client).map_err(|why| told(name, why))?)
                }
            };
            let channel = Channel { kind: config.kind.name(), template: config.template.clone(), timeout: config.timeout, way };
            all.insert(name.clone(), channel);
        }
        Ok(Self(all))
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Channel> {
        self.0.get(name)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

impl Channel {
    /// Tells several notices in one message. What is longer than the channel takes is cut.
    pub(crate) async fn tell(&self, notices: Vec<Notice>) -> Result<(), NotTaken> {
        let template = self.template.as_deref();
        let sending = async {
            match &self.way {
                Way::Log => {
                    log(&Letter::new(notices, template));
                    Ok(())
                }
                Way::Smtp(smtp) => smtp.send(&Letter::new(notices, template)).await,
                Way::Post(post) => post.send(notices, template).await,
            }
        };
        match tokio::time::timeout(self.timeout, sending).await {
            Ok(result) => result,
            Err(_) => Err(NotTaken::because(format!("no answer within {}", humantime::format_duration(self.timeout)))),
        }
    }
}

/// One line of the log for each notice.
fn log(letter: &Letter) {
    for (notice, text) in letter.notices.iter().zip(&letter.texts) {
        let state = format!("{:?}", notice.state).to_lowercase();
        match notice.state {
            super::notice::State::Firing | super::notice::State::Repeated => {
                tracing::error!(target: "posthouse::alerts", state, rule = notice.rule, subject = notice.subject, database = notice.database, "{text}");
            }
            _ => {
                tracing::warn!(target: "posthouse::alerts", state, rule = notice.rule, subject = notice.subject, database = notice.database, "{text}");
            }
        }
    }
}
