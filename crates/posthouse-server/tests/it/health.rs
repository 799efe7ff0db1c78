//! `posthouse health`, which containers ask about themselves.

use std::net::TcpListener;

use serde_json::Value;

use crate::support::{Dir, Receiver, Running, Schema, ph, posthouse, wait_for};

/// A configuration that listens on this address.
fn listens(dir: &Dir, schema: &Schema, receiver: &Receiver, address: &str, rest: &str) {
    let to = receiver.address;
    dir.write(
        "posthouse.toml",
        &schema.config(&format!(
            "[transports.http]\nallow = [\"127.0.0.1\"]\n[routes.orders]\nto = \"http://{to}/\"\n\
             [server]\nlisten = \"{address}\"\n{rest}"
        )),
    );
}

#[test]
fn tells_whether_the_relay_that_runs_here_is_ready() {
    let (dir, schema, receiver) = (Dir::new(), Schema::new(), Receiver::start());
    // Nobody listens on a port that was just given out and given back.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    listens(&dir, &schema, &receiver, &free, "");
    for args in [&["health"][..], &["health", "--live"]] {
        let ran = ph(&dir, args).code(3);
        assert!(ran.stderr.contains(&free), "{}", ran.stderr);
    }
    listens(&dir, &schema, &receiver, "127.0.0.1:0", "");
    ph(&dir, &["migrate"]).code(0);
    let relay = Running::start(&mut posthouse(&dir));
    listens(&dir, &schema, &receiver, &relay.address, "");
    wait_for("it is ready", || (ph(&dir, &["health"]).code == 0).then_some(()));
    assert_eq!(ph(&dir, &["health"]).code(0).stdout, "ready\n");
    assert_eq!(ph(&dir, &["health", "--live"]).code(0).stdout, "alive\n");
    assert_eq!(ph(&dir, &["health", "--json"]).code(0).json()["databases"]["main"]["ready"], true);
    assert_eq!(ph(&dir, &["health", "--live", "--json"]).code(0).json()["alive"], true);

    // While it drains it is alive and not ready.
    receiver.open(false);
    ph(&dir, &["publish", "orders", "{}"]).code(0);
    wait_for("the request arrives", || (!receiver.seen().is_empty()).then_some(()));
    relay.signal("TERM");
    wait_for("it drains", || relay.log().contains("stopping").then_some(()));
    let ran = ph(&dir, &["health"]).code(1);
    assert!(ran.stderr.contains("not ready: it is stopping"), "{}", ran.stderr);
    assert_eq!(ph(&dir, &["health", "--json"]).code(1).json()["ready"], false);
    ph(&dir, &["health", "--live"]).code(0);
    receiver.open(true);
    assert_eq!(relay.ended().0, 0);
}

#[test]
fn on_a_public_address_the_relay_is_asked_with_the_token_that_it_wants() {
    let (dir, schema, receiver) = (Dir::new(), Schema::new(), Receiver::start());
    const TOKEN: &str = "token = \"operator-token-0123\"\n";
    const SCRAPER: &str = "metrics_token = \"scraper-token-01234\"\n";
    listens(&dir, &schema, &receiver, "0.0.0.0:0", &format!("{TOKEN}{SCRAPER}"));
    ph(&dir, &["migrate"]).code(0);
    let relay = Running::start(&mut posthouse(&dir));
    let asked_with = |token: &str| listens(&dir, &schema, &receiver, &relay.address, token);
    asked_with(TOKEN);
    wait_for("it is ready", || (ph(&dir, &["health"]).code == 0).then_some(()));
    let why = || ph(&dir, &["destinations", "--json"]).code(0).json()["relay_error"].clone();
    assert_eq!(why(), Value::Null);
    let told = ph(&dir, &["health", "--json"]).code(0).json();
    assert!(told["databases"]["main"]["instance"].is_string(), "{told}");
    asked_with(&format!("{SCRAPER}token = \"another-token-01234\"\n"));
    assert_eq!(why(), Value::Null, "the token that may do least is taken");
    // Without a token that it knows, it tells whether it is ready, and no more.
    asked_with("token = \"another-token-01234\"\n");
    assert!(why().as_str().unwrap().contains("another one"));
    assert_eq!(ph(&dir, &["health", "--json"]).code(0).json(), serde_json::json!({ "ready": true }));
}
