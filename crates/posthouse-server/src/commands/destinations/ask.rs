//! Asks the running relay at `server.listen` how it and its destinations stand.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::config::ServerConfig;
use crate::http::Destinations;
use crate::output::span;

/// It answers from memory, so one that takes longer than this doesn't answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// More than any relay tells: it has no more destinations in memory than messages.
const LARGEST: u64 = 64 << 20;

/// What the relay tells; why there is nothing if it doesn't.
pub(in crate::commands) async fn relay(server: &ServerConfig) -> Result<Destinations, String> {
    read(&get(server, "/destinations").await?)
}

/// The answer to a GET, head and all.
pub(in crate::commands) async fn get(server: &ServerConfig, path: &str) -> Result<Vec<u8>, String> {
    let address = reachable(server.listen);
    if address.port() == 0 {
        return Err("server.listen names no port at which it could be asked".into());
    }
    // Away from loopback only those are told who send a token. The one that may do least is enough.
    let token = server.metrics_token.as_ref().or(server.viewer_token.as_ref()).or(server.token.as_ref());
    let bearer = token.map(|t| format!("Authorization: Bearer {}\r\n", t.expose())).unwrap_or_default();
    let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n{bearer}\r\n");
    match tokio::time::timeout(PATIENCE, send(address, &request)).await {
        Ok(answer) => answer.map_err(|e| e.to_string()),
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
async fn send(address: SocketAddr, request: &str) -> std::io::Result<Vec<u8>> {
    let mut conn = TcpStream::connect(address).await?;
    conn.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    conn.take(LARGEST).read_to_end(&mut answer).await?;
    Ok(answer)
}

/// Status and body of an answer; None if it isn't one.
pub(in crate::commands) fn parts(answer: &[u8]) -> Option<(u16, &[u8])> {
    let head = answer.windows(4).position(|w| w == b"\r\n\r\n")?;
    let status = answer.strip_prefix(b"HTTP/")?.split(|b| *b == b' ').nth(1)?;
    Some((std::str::from_utf8(status).ok()?.parse().ok()?, &answer[head + 4..]))
}

fn read(answer: &[u8]) -> Result<Destinations, String> {
    let other = || "what answers there is no posthouse of this version".to_owned();
    match parts(answer) {
        Some((200, body)) => serde_json::from_slice(body).map_err(|_| other()),
        Some((401 | 403, _)) => Err("it tells nobody without a token; this configuration has none, or another one".into()),
        _ => Err(other()),
    }
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
        assert!(read(b"HTTP/1.0 401 Unauthorized\r\n\r\n").unwrap_err().contains("a token"));
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
