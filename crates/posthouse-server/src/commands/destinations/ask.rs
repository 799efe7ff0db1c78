//! Asks the running relay at `server.listen` how its destinations stand.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::http::Destinations;
use crate::output::span;

/// It answers from memory, so one that takes longer than this doesn't answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// More than any relay tells: it has no more destinations in memory than messages.
const LARGEST: u64 = 64 << 20;

/// What the relay tells; why there is nothing if it doesn't.
pub(in crate::commands) async fn relay(address: SocketAddr) -> Result<Destinations, String> {
    if address.port() == 0 {
        return Err("server.listen names no port at which it could be asked".into());
    }
    match tokio::time::timeout(PATIENCE, get(address)).await {
        Ok(answer) => read(&answer.map_err(|e| e.to_string())?),
        Err(_) => Err(format!("no answer within {}", span(PATIENCE))),
    }
}

/// Where a relay that listens on `listen` is reached from this machine.
pub(in crate::commands) fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

/// HTTP/1.0: the answer comes as it is, and ends with the connection.
async fn get(address: SocketAddr) -> std::io::Result<Vec<u8>> {
    let mut conn = TcpStream::connect(address).await?;
    conn.write_all(format!("GET /destinations HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes()).await?;
    let mut answer = Vec::new();
    conn.take(LARGEST).read_to_end(&mut answer).await?;
    Ok(answer)
}

fn read(answer: &[u8]) -> Result<Destinations, String> {
    let other = || "what answers there is no posthouse of this version".to_owned();
    let head = answer.windows(4).position(|w| w == b"\r\n\r\n").ok_or_else(other)?;
    let status = answer.split(|b| *b == b' ').nth(1);
    if status != Some(b"200") {
        return Err(other());
    }
    serde_json::from_slice(&answer[head + 4..]).map_err(|_| other())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wildcard_address_is_asked_on_loopback() {
        for (listen, asked) in [
            ("0.0.0.0:8420", "127.0.0.1:8420"),
            ("[::]:8420", "[::1]:8420"),
            ("127.0.0.2:1", "127.0.0.2:1"),
            ("[::1]:1", "[::1]:1"),
        ] {
            assert_eq!(reachable(listen.parse().unwrap()), asked.parse().unwrap());
        }
    }

    #[test]
    fn only_a_posthouse_is_believed() {
        assert!(read(b"HTTP/1.0 200 OK\r\n\r\n{\"databases\":{\"main\":null}}").is_ok());
        for answer in [
            &b""[..],
            b"HTTP/1.0 200 OK\r\n\r\n",
            b"HTTP/1.0 200 OK\r\n\r\n<html>",
            b"HTTP/1.0 404 Not Found\r\n\r\n{\"databases\":{}}",
            b"SSH-2.0-OpenSSH\r\n\r\n",
        ] {
            assert!(read(answer).is_err(), "{answer:?}");
        }
    }
}
