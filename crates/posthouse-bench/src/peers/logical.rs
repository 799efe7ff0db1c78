//! A PostgreSQL whose log can be read logically, which Debezium needs and most servers aren't set to: an instance of its own.

use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::Stdio;

use tokio::process::Command;

use super::{at, install};

#[derive(Debug)]
pub(super) struct Logical {
    home: PathBuf,
    port: u16,
}

impl Logical {
    pub(super) async fn start() -> Result<Self, String> {
        // Below 32768, where Linux begins to give out ports to connections.
        let free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
        let port = (20_000..30_000).find(free).ok_or("no free port")?;
        let own = Self { home: install::target().join("services"), port };
        own.services("start").await?;
        Ok(own)
    }

    pub(super) fn url(&self) -> String {
        format!("postgres://posthouse@127.0.0.1:{}/posthouse_test", self.port)
    }

    /// Stops it and removes its data.
    pub(super) async fn remove(self) -> Result<(), String> {
        self.services("remove").await
    }

    async fn services(&self, action: &str) -> Result<(), String> {
        let mut services = Command::new(install::services());
        services
            .args([action, "postgres"])
            .env("POSTHOUSE_SERVICES_HOME", &self.home)
            .env("POSTHOUSE_POSTGRES_PORT", self.port.to_string())
            // The rest as in the server that the other peers are measured on.
            .env("POSTHOUSE_POSTGRES_CONF", "wal_level=logical\nshared_preload_libraries=pg_stat_statements")
            .stdin(Stdio::null())
            .stdout(std::io::stderr());
        match at("scripts/services", services.status().await)? {
            status if status.success() => Ok(()),
            status => Err(format!("scripts/services {action} postgres: {status}")),
        }
    }
}
