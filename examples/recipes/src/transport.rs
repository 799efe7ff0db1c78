//! A transport of your own: messages as lines of a file. What is confirmed is on the disk.

use std::path::PathBuf;

use futures_util::future::BoxFuture;
use posthouse::transport::{Delivery, Transport};
use tokio::io::AsyncWriteExt;

/// Appends to files in a directory: a route's `to` is `lines:NAME`.
#[derive(Debug, Clone)]
pub struct Lines {
    directory: PathBuf,
}

impl Lines {
    /// The directory must be there.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    async fn append(&self, name: &str, payload: &[u8]) -> std::io::Result<()> {
        let path = self.directory.join(name);
        let mut file = tokio::fs::OpenOptions::new().create(true).append(true).open(path).await?;
        file.write_all(&[payload, b"\n"].concat()).await?;
        // Only now may it be called delivered.
        file.sync_data().await
    }
}

impl Transport for Lines {
    fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            for delivery in batch {
                let name = delivery.address().to_owned();
                if name.is_empty() || name.contains(['/', '\\']) || name.starts_with('.') {
                    // Trying again can't help: FAILED, for a person to look at.
                    delivery.rejected(format!("{name:?} is no name of a file"));
                    continue;
                }
                let written = self.append(&name, &delivery.message().payload).await;
                match written {
                    Ok(()) => delivery.delivered(),
                    // The whole disk, and nothing about this message: it counts no attempt, and the destination rests a while.
                    Err(e) => delivery.unavailable(format!("{}: {e}", self.directory.display())),
                }
            }
        })
    }
}
