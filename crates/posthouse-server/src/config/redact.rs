//! Secrets taken out of what is shown.

use url::Url;

pub(crate) const REDACTED: &str = "[redacted]";

/// Parameters of a URL that carry no secret; every other value is taken out, since webhooks have tokens under any name.
const HARMLESS: [&str; 8] = ["sslmode", "ssl-mode", "mode", "cache", "application_name", "host", "port", "options"];

/// A URL (or `transport:address`) without its password, the values of its parameters, and its fragment.
pub(crate) fn url(text: &str) -> String {
    // A destination may carry its transport in front: `internal:https://…`.
    if let Some((scheme, rest)) = text.split_once(':')
        && (rest.starts_with("http://") || rest.starts_with("https://"))
    {
        return format!("{scheme}:{}", url(rest));
    }
    let Ok(mut parsed) = Url::parse(text) else {
        // What can't be taken apart is shown only where there is no place for a secret in it.
        return if text.contains(['@', '?', '#', '%', '$']) { REDACTED.into() } else { text.into() };
    };
    let suspicious = parsed.cannot_be_a_base() && text.contains(['@', '?', '#']);
    if suspicious {
        return REDACTED.into();
    }
    // Before an `@` there stands who logs in. Behind `?` or `#` it means that one of these was in a password.
    if parsed.fragment().is_some_and(|f| f.contains('@')) || parsed.query_pairs().any(|(name, _)| name.contains('@')) {
        return REDACTED.into();
    }
    if parsed.password().is_none() && parsed.query().is_none() && parsed.fragment().is_none() {
        return text.to_owned();
    }
    if parsed.password().is_some() && parsed.set_password(Some("REDACTED")).is_err() {
        return REDACTED.into();
    }
    let pairs: Vec<(String, String)> = parsed.query_pairs().into_owned().collect();
    parsed.set_query(None);
    parsed.set_fragment(None);
    let mut out = parsed.to_string().replacen(":REDACTED@", ":[redacted]@", 1);
    for (i, (name, value)) in pairs.iter().enumerate() {
        let value = if HARMLESS.contains(&name.as_str()) { value } else { REDACTED };
        out.push_str(&format!("{}{name}={value}", if i == 0 { '?' } else { '&' }));
    }
    out
}

/// Servers with commas between them (`nats://token@host:4222,host2`): what stands before an `@` is a secret even without a
/// password in it, and so is every part that might be one because a comma stood in it.
pub(crate) fn servers(text: &str) -> String {
    let logs_in = text.contains('@');
    let shown = text.split(',').map(|part| {
        let (scheme, rest) = part.split_once("://").map_or(("", part), |(scheme, rest)| (scheme, rest));
        let (who, host) = rest.rsplit_once('@').map_or(("", rest), |(_, host)| (REDACTED, host));
        let host = host.split(['/', '?', '#']).next().unwrap_or_default();
        match (who, scheme) {
            ("", _) if logs_in => REDACTED.to_owned(),
            ("", "") => host.to_owned(),
            ("", _) => format!("{scheme}://{host}"),
            (_, "") => format!("{who}@{host}"),
            _ => format!("{scheme}://{who}@{host}"),
        }
    });
    shown.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::{servers, url};

    #[test]
    fn no_secret_of_a_list_of_servers_is_left() {
        for (text, expected) in [
            ("h1:9092,h2:9092", "h1:9092,h2:9092"),
            ("nats://h:4222", "nats://h:4222"),
            ("nats://hunter2@h:4222", "nats://[redacted]@h:4222"),
            ("nats://u:hunter2@h,tls://u:hunter2@h2:4222", "nats://[redacted]@h,tls://[redacted]@h2:4222"),
            ("u:hunter2@h,h2", "[redacted]@h,[redacted]"),
            ("nats://u:hunter2,hunter2@h", "[redacted],[redacted]@h"),
            ("nats://u:hunter2#?/@h/?hunter2", "nats://[redacted]@h"),
            ("nats://h?token=hunter2", "nats://h"),
        ] {
            assert_eq!(servers(text), expected, "{text}");
        }
    }

    #[test]
    fn no_secret_of_a_url_is_left() {
        for (text, expected) in [
            ("postgres://u:hunter2@db/app", "postgres://u:[redacted]@db/app"),
            ("postgres://u@db/app?sslmode=require&password=hunter2", "postgres://u@db/app?sslmode=require&password=[redacted]"),
            ("https://u:hunter2@x.example/h?key=hunter2#hunter2", "https://u:[redacted]@x.example/h?key=[redacted]"),
            ("internal:https://u:hunter2@x.example/", "internal:https://u:[redacted]@x.example/"),
            ("sqlite:///var/lib/a.db", "sqlite:///var/lib/a.db"),
            ("orders", "orders"),
            ("https://x.example/a", "https://x.example/a"),
            ("postgres//u:hunter2@db", "[redacted]"),
            ("amqp:u:hunter2@x", "[redacted]"),
            ("amqps://u:hunter2@x/vhost", "amqps://u:[redacted]@x/vhost"),
            ("amqp://u:5#hunter2@x", "[redacted]"),
            ("amqp://u:5?hunter2@x", "[redacted]"),
        ] {
            assert_eq!(url(text), expected);
        }
    }
}
