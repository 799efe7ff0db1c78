//! `exchange/routing.key`: where a message goes.

use crate::message::MAX_NAME;

/// Exchange and routing key. The default exchange has no name; its routing keys are names of queues.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Address<'a> {
    pub(super) exchange: &'a str,
    pub(super) routing_key: &'a str,
}

/// The routing key is everything after the first `/`.
///
/// # Errors
/// What is wrong with the address and how to write it.
pub(super) fn parse(address: &str) -> Result<Address<'_>, String> {
    let Some((exchange, routing_key)) = address.split_once('/') else {
        return Err(format!(
            "the address {address:?} has no slash; write \"exchange/routing.key\", or \"/queue\" to send straight to a queue"
        ));
    };
    for (what, name) in [("exchange", exchange), ("routing key", routing_key)] {
        if name.len() > MAX_NAME {
            return Err(format!("the {what} has {} bytes; RabbitMQ takes {MAX_NAME} at most", name.len()));
        }
    }
    if exchange.is_empty() && routing_key.is_empty() {
        return Err("the address \"/\" names neither exchange nor queue; write \"exchange/routing.key\" or \"/queue\"".into());
    }
    Ok(Address { exchange, routing_key })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_slash_divides() {
        fn both(address: &str) -> Result<(&str, &str), String> {
            parse(address).map(|a| (a.exchange, a.routing_key))
        }
        assert_eq!(both("orders/placed.v1"), Ok(("orders", "placed.v1")));
        assert_eq!(both("orders/a/b"), Ok(("orders", "a/b")));
        assert_eq!(both("orders/"), Ok(("orders", "")));
        assert_eq!(both("/mails"), Ok(("", "mails")));
        assert!(both("/").is_err());
        assert!(both("orders").unwrap_err().contains("/queue"));
        let longest = "x".repeat(255);
        assert!(both(&format!("{longest}/{longest}")).is_ok());
        assert!(both(&format!("{longest}x/a")).unwrap_err().contains("the exchange has 256 bytes"));
        assert!(both(&format!("a/{longest}x")).unwrap_err().contains("the routing key has 256 bytes"));
    }
}
