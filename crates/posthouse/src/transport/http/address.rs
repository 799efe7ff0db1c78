//! The address rule: which addresses the `http` transport may call.
//!
//! Whoever can write a destination can make this process send requests, so without a rule a message could reach cloud
//! metadata services or the unprotected neighbours of the relay ("server-side request forgery"). The rule is applied to
//! addresses, never to names: to a literal address before the request, to a name in the resolver, whose checked result
//! is what gets dialled. A name that resolves differently a moment later ("rebinding") gains nothing.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// What may be called: public addresses and those allowed by name.
#[derive(Debug)]
pub(super) struct Rule {
    everything: bool,
    allowed: Vec<IpNet>,
}

impl Rule {
    /// Reads the `allow` entries; returns what is wrong with each bad one.
    pub(super) fn new(everything: bool, allow: &[String]) -> Result<Self, Vec<String>> {
        let mut allowed = Vec::new();
        let mut bad = Vec::new();
        for entry in allow {
            match parse(entry.trim()) {
                Some(network) => allowed.push(network),
                None => bad.push(format!("{entry:?} is neither an IP address nor a network such as \"10.0.0.0/8\"")),
            }
        }
        if bad.is_empty() { Ok(Self { everything, allowed }) } else { Err(bad) }
    }

    /// Says what kind of address it is if it may not be called.
    fn check(&self, ip: IpAddr) -> Result<(), &'static str> {
        // An IPv4-mapped address is dialled as IPv4, so it is judged as that.
        let ip = ip.to_canonical();
        if self.everything || self.allowed.iter().any(|network| network.contains(&ip)) {
            return Ok(());
        }
        let kind = match ip {
            IpAddr::V4(ip) => kind_of_v4(ip),
            IpAddr::V6(ip) => match translated(ip) {
                Some(ip) => return self.check(ip.into()),
                None => kind_of_v6(ip),
            },
        };
        kind.map_or(Ok(()), Err)
    }

    /// Checks what a name resolved to. All must pass, because the connection may be made to any of them.
    fn check_all(&self, host: &str, found: &[SocketAddr]) -> Result<(), Refused> {
        for address in found {
            let ip = address.ip();
            self.check(ip).map_err(|kind| Refused { host: Some(host.to_owned()), ip, kind })?;
        }
        Ok(())
    }

    /// Checks the host of a URL if it is a literal address; names are checked by [`Resolver`].
    ///
    /// `host` comes from a parsed URL, where decimal, octal and hexadecimal forms of IPv4 have become the dotted one.
    pub(super) fn check_literal(&self, host: &str) -> Result<(), Refused> {
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        match bare.parse::<IpAddr>() {
            Ok(ip) => self.check(ip).map_err(|kind| Refused { host: None, ip, kind }),
            Err(_) => Ok(()),
        }
    }
}

/// A network or a single address; what is written as IPv4-mapped IPv6 becomes IPv4, as the checked addresses do.
fn parse(entry: &str) -> Option<IpNet> {
    let network = entry.parse::<IpNet>().or_else(|_| entry.parse::<IpAddr>().map(IpNet::from)).ok()?;
    if let IpNet::V6(v6) = network
        && let Some(v4) = v6.addr().to_ipv4_mapped()
        && let Some(prefix) = v6.prefix_len().checked_sub(96)
    {
        return Ipv4Net::new(v4, prefix).ok().map(IpNet::V4);
    }
    Some(network)
}

/// The IPv4 address that a translator or tunnel on the way would call for this address (NAT64, 6to4).
fn translated(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    let s = ip.segments();
    let v4 = |high: u16, low: u16| Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low));
    match s {
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(v4(high, low)),
        [0x2002, high, low, ..] => Some(v4(high, low)),
        _ => None,
    }
}

/// The special kind of an IPv4 address, after the IANA special-purpose address registry; none if it is public.
fn kind_of_v4(ip: Ipv4Addr) -> Option<&'static str> {
    Some(match ip.octets() {
        [0, ..] => "\"this network\"",
        [10, ..] | [172, 16..=31, ..] | [192, 168, ..] => "private",
        [100, 64..=127, ..] => "carrier-grade NAT",
        [127, ..] => "loopback",
        [169, 254, ..] => "link-local, where cloud metadata services live",
        [192, 0, 0, _] => "reserved for protocols",
        [192, 0, 2, _] | [198, 51, 100, _] | [203, 0, 113, _] => "documentation",
        [192, 88, 99, _] => "6to4 relay",
        [198, 18..=19, ..] => "benchmarking",
        [224..=239, ..] => "multicast",
        [255, 255, 255, 255] => "broadcast",
        [240..=255, ..] => "reserved",
        _ => return None,
    })
}

/// The special kind of an IPv6 address that translates to no IPv4 address; none if it is public.
fn kind_of_v6(ip: Ipv6Addr) -> Option<&'static str> {
    Some(match ip.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0] => "unspecified",
        [0, 0, 0, 0, 0, 0, 0, 1] => "loopback",
        [0, 0, 0, 0, 0, 0, ..] => "IPv4-compatible",
        [0x64, 0xff9b, 1, ..] => "local NAT64",
        [0xfc00..=0xfdff, ..] => "unique local",
        [0xfe80..=0xfebf, ..] => "link-local",
        [0xff00..=0xffff, ..] => "multicast",
        [0x2001, 0, ..] => "Teredo",
        [0x2001, 0x0db8, ..] | [0x3fff, 0..=0x0fff, ..] => "documentation",
        [0x2001, 1..=0x01ff, ..] => "reserved for protocols",
        // Global unicast is 2000::/3; what lies outside is public in no sense, whatever it may be used for one day.
        [0x2000..=0x3fff, ..] => return None,
        _ => "reserved",
    })
}

/// An address was refused by the rule. Trying again changes nothing; changing the rule does.
#[derive(Debug)]
pub(super) struct Refused {
    /// The name that resolved to it; none for a literal address.
    host: Option<String>,
    ip: IpAddr,
    kind: &'static str,
}

impl Refused {
    /// Finds a refusal among the causes of an error.
    pub(super) fn among<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a Self> {
        causes(error).find_map(|cause| cause.downcast_ref())
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, ip, kind } = self;
        if let Some(host) = host {
            write!(f, "{host} resolves to ")?;
        }
        write!(f, "{ip} ({kind}), which messages may not be sent to; if it is meant, add it to transports.http.allow")
    }
}

impl StdError for Refused {}

/// The error and what caused it, outermost first.
pub(super) fn causes<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |&e| match e.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        // io::Error::source is the cause of the error inside and would skip the latter.
        Some(inside) => Some(inside as &(dyn StdError + 'static)),
        None => e.source(),
    })
}

/// Resolves names through the system and refuses a name if any of its addresses may not be called.
#[derive(Debug)]
pub(super) struct Resolver(pub(super) Arc<Rule>);

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let rule = self.0.clone();
        Box::pin(async move {
            // Port 0 stands for the port of the URL.
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            rule.check_all(name.as_str(), &found)?;
            if found.is_empty() {
                return Err("the name has no addresses".into());
            }
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(allow: &[&str]) -> Rule {
        Rule::new(false, &allow.iter().map(|&a| a.to_owned()).collect::<Vec<_>>()).unwrap()
    }

    fn allowed(rule: &Rule, ip: &str) -> bool {
        rule.check(ip.parse().unwrap()).is_ok()
    }

    #[test]
    fn special_addresses_are_refused_up_to_their_edges() {
        let rule = rule(&[]);
        let refused = [
            ("0.0.0.0", "\"this network\""),
            ("0.255.255.255", "\"this network\""),
            ("10.0.0.0", "private"),
            ("10.255.255.255", "private"),
            ("100.64.0.0", "carrier-grade NAT"),
            ("100.127.255.255", "carrier-grade NAT"),
            ("127.0.0.1", "loopback"),
            ("127.255.255.255", "loopback"),
            ("169.254.0.0", "link-local, where cloud metadata services live"),
            ("169.254.169.254", "link-local, where cloud metadata services live"),
            ("172.16.0.0", "private"),
            ("172.31.255.255", "private"),
            ("192.0.0.1", "reserved for protocols"),
            ("192.0.2.1", "documentation"),
            ("192.88.99.1", "6to4 relay"),
            ("192.168.0.0", "private"),
            ("192.168.255.255", "private"),
            ("198.18.0.0", "benchmarking"),
            ("198.19.255.255", "benchmarking"),
            ("198.51.100.7", "documentation"),
            ("203.0.113.7", "documentation"),
            ("224.0.0.0", "multicast"),
            ("239.255.255.255", "multicast"),
            ("240.0.0.0", "reserved"),
            ("255.255.255.254", "reserved"),
            ("255.255.255.255", "broadcast"),
            ("::", "unspecified"),
            ("::1", "loopback"),
            ("::2", "IPv4-compatible"),
            ("::8.8.8.8", "IPv4-compatible"),
            ("::ffff:127.0.0.1", "loopback"),
            ("::ffff:169.254.169.254", "link-local, where cloud metadata services live"),
            ("::ffff:0:8.8.8.8", "reserved"),
            ("64:ff9b::127.0.0.1", "loopback"),
            ("64:ff9b::10.1.2.3", "private"),
            ("64:ff9b:0:0:0:1::", "reserved"),
            ("64:ff9b:1::8.8.8.8", "local NAT64"),
            ("100::1", "reserved"),
            ("2001::1", "Teredo"),
            ("2001:0:ffff::", "Teredo"),
            ("2001:2::1", "reserved for protocols"),
            ("2001:1ff:ffff::", "reserved for protocols"),
            ("2001:db8::1", "documentation"),
            ("2002:7f00:1::", "loopback"),
            ("2002:a9fe:a9fe::1", "link-local, where cloud metadata services live"),
            ("3fff::1", "documentation"),
            ("3fff:fff::1", "documentation"),
            ("1fff:ffff::", "reserved"),
            ("4000::", "reserved"),
            ("5f00::1", "reserved"),
            ("fbff::", "reserved"),
            ("fc00::1", "unique local"),
            ("fd00:ec2::254", "unique local"),
            ("fdff:ffff::", "unique local"),
            ("fe80::1", "link-local"),
            ("febf:ffff::", "link-local"),
            ("fec0::1", "reserved"),
            ("ff02::1", "multicast"),
        ];
        for (ip, kind) in refused {
            assert_eq!(rule.check(ip.parse().unwrap()), Err(kind), "{ip}");
        }
        let public = [
            "1.0.0.0",
            "8.8.8.8",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.0.3.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "::ffff:8.8.8.8",
            "64:ff9b::8.8.8.8",
            "2000::",
            "2001:200::1",
            "2001:db7:ffff::",
            "2001:db9::",
            "2002:808:808::1",
            "2606:4700::1111",
            "3fff:1000::",
        ];
        for ip in public {
            assert_eq!(rule.check(ip.parse().unwrap()), Ok(()), "{ip}");
        }
    }

    #[test]
    fn allowed_networks_hold_in_every_form_of_their_addresses_and_no_further() {
        let r = rule(&["10.0.0.0/8", " 192.168.1.7 ", "fd12::/16", "::1"]);
        for ip in ["10.0.0.0", "10.255.255.255", "::ffff:10.1.1.1", "64:ff9b::10.1.1.1", "192.168.1.7", "fd12:ffff::1", "::1"] {
            assert!(allowed(&r, ip), "{ip}");
        }
        for ip in ["127.0.0.1", "192.168.1.8", "fd13::1", "::2"] {
            assert!(!allowed(&r, ip), "{ip}");
        }
        let mapped = rule(&["::ffff:127.0.0.0/104", "::ffff:192.168.0.1"]);
        assert!(allowed(&mapped, "127.9.9.9") && allowed(&mapped, "::ffff:127.0.0.1") && allowed(&mapped, "192.168.0.1"));
        assert!(!allowed(&mapped, "192.168.0.2"));
        assert!(Rule::new(true, &[]).unwrap().check("169.254.169.254".parse().unwrap()).is_ok());
    }

    #[test]
    fn one_refused_address_among_several_is_enough() {
        let found = |list: &[&str]| list.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 0)).collect::<Vec<_>>();
        let r = rule(&["10.0.0.0/8"]);
        assert!(r.check_all("example.com", &found(&["8.8.8.8", "10.0.0.1", "2606:4700::1111"])).is_ok());
        let refused = r.check_all("example.com", &found(&["8.8.8.8", "2606:4700::1111", "::ffff:127.0.0.1"])).unwrap_err();
        let text = refused.to_string();
        assert!(text.starts_with("example.com resolves to ::ffff:127.0.0.1 (loopback)"), "{text}");
    }

    #[test]
    fn every_bad_entry_is_named() {
        let bad = Rule::new(false, &["10.0.0.0/33".into(), "10.0.0.0/8".into(), "db.internal".into()]).unwrap_err();
        assert_eq!(bad.len(), 2);
        assert!(bad[0].contains("10.0.0.0/33") && bad[1].contains("db.internal"), "{bad:?}");
    }

    #[test]
    fn a_refusal_is_found_however_deep_it_lies() {
        #[derive(Debug)]
        struct Outer(io::Error);
        impl fmt::Display for Outer {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("outer")
            }
        }
        impl StdError for Outer {
            fn source(&self) -> Option<&(dyn StdError + 'static)> {
                Some(&self.0)
            }
        }
        let refused = Refused { host: None, ip: Ipv4Addr::LOCALHOST.into(), kind: "loopback" };
        assert!(Refused::among(&Outer(io::Error::other(refused))).is_some());
        // The same words from elsewhere are no refusal.
        assert!(Refused::among(&Outer(io::Error::other("127.0.0.1 (loopback)"))).is_none());
    }
}
