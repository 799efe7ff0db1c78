//! Reads a receiver's response, or the lack of one, into an outcome.

use std::time::{Duration, SystemTime};

use reqwest::header::{DATE, HeaderMap, HeaderName, LOCATION, RETRY_AFTER};
use reqwest::{StatusCode, Url};

use super::address::{Refused, causes};
use super::request::shown;
use crate::error::storable;
use crate::transport::{Failure, Outcome};

/// No receiver can make a message wait longer than this.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// What came of a request that has a status. `cut_short` says why the response is incomplete.
pub(super) fn of_response(url: &Url, status: StatusCode, headers: &HeaderMap, body: Option<String>, cut_short: &str) -> Outcome {
    if status.is_success() {
        return Outcome::Delivered;
    }
    let name = status.canonical_reason().unwrap_or_default();
    let mut error = format!("{} answered {} {name}", shown(url), status.as_u16()).trim_end().to_owned();
    let never = matches!(status.as_u16(), 400 | 410 | 413 | 414 | 415 | 422);
    match status.as_u16() {
        _ if never => error.push_str(": it will not take this message"),
        300..=399 => {
            let points = match location(url, headers) {
                Some(target) => format!("it points to {target}; if that is right, make it the route's `to`"),
                None => "it says not where to".to_owned(),
            };
            error.push_str(&format!(", and redirects are not followed: {points}"));
        }
        401 | 403 => error.push_str("; check the route's http.authorization"),
        404 | 405 => error.push_str("; check the route's `to` and http.method"),
        _ => {}
    }
    error.push_str(cut_short);
    let failure = Failure { error, response: body };
    #[expect(
        clippy::disallowed_methods,
        reason = "only to read a date in Retry-After of a receiver that doesn't tell its own time"
    )]
    let now = SystemTime::now();
    if never { Outcome::Rejected(failure) } else { Outcome::Retry { after: retry_after(headers, now), error: failure } }
}

/// What came of a request that got no status. The rule's refusal is recognised by type.
pub(super) fn of_error(url: &Url, error: reqwest::Error, connect_timeout: Duration) -> Outcome {
    let to = shown(url);
    if let Some(refused) = Refused::among(&error) {
        return Outcome::Rejected(refused.to_string().into());
    }
    // The causes carry no URL; the outermost error does, and is used only where nothing lies below it.
    let error = error.without_url();
    let cause = storable(&causes(&error).last().map(ToString::to_string).unwrap_or_default(), 300);
    if error.is_builder() {
        Outcome::Rejected(format!("can't make a request to {to}: {cause}").into())
    } else if error.is_connect() && error.is_timeout() {
        let wait = format!("can't connect to {to}: no connection within {connect_timeout:?} (transports.http.connect_timeout)");
        Outcome::Unavailable(wait.into())
    } else if error.is_connect() {
        Outcome::Unavailable(format!("can't connect to {to}: {cause}").into())
    } else {
        let error = format!("{to} gave no valid response, so whether it took the message is unknown: {cause}").into();
        Outcome::Retry { after: None, error }
    }
}

/// Where a redirect points, as it may be shown.
fn location(url: &Url, headers: &HeaderMap) -> Option<String> {
    headers.get(LOCATION)?.to_str().ok().and_then(|target| url.join(target).ok()).map(|target| shown(&target))
}

/// How long the receiver asks to wait: seconds, or a date that counts from the receiver's own clock if it tells its time.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let value = |name: HeaderName| headers.get(name).and_then(|v| v.to_str().ok()).map(str::trim);
    let asked = value(RETRY_AFTER)?;
    let wait = if !asked.is_empty() && asked.bytes().all(|b| b.is_ascii_digit()) {
        // Only a number too large to count fails to parse.
        asked.parse().map_or(LONGEST_WAIT, Duration::from_secs)
    } else {
        let until = httpdate::parse_http_date(asked).ok()?;
        let now = value(DATE).and_then(|date| httpdate::parse_http_date(date).ok()).unwrap_or(now);
        until.duration_since(now).unwrap_or_default()
    };
    Some(wait.min(LONGEST_WAIT))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOON: &str = "Sun, 06 Nov 1994 12:00:00 GMT";

    fn wait(retry_after: &str, date: Option<&str>) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, retry_after.parse().unwrap());
        if let Some(date) = date {
            headers.insert(DATE, date.parse().unwrap());
        }
        super::retry_after(&headers, httpdate::parse_http_date(NOON).unwrap())
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let secs = |s| Some(Duration::from_secs(s));
        assert_eq!(wait("0", None), secs(0));
        assert_eq!(wait(" 120 ", None), secs(120));
        assert_eq!(wait("86400", None), secs(86_400));
        assert_eq!(wait("86401", None), secs(86_400));
        assert_eq!(wait("99999999999999999999999999", None), secs(86_400));
        assert_eq!(wait("Sun, 06 Nov 1994 12:00:30 GMT", None), secs(30));
        assert_eq!(wait("Sun, 06 Nov 1994 11:59:59 GMT", None), secs(0), "the past is now");
        assert_eq!(wait("Wed, 09 Nov 1994 12:00:00 GMT", None), secs(86_400));
        assert_eq!(wait("Sunday, 06-Nov-94 12:00:05 GMT", None), secs(5), "obsolete date forms count");
        // The receiver's clock is an hour ahead; it means 30 seconds.
        assert_eq!(wait("Sun, 06 Nov 1994 13:00:30 GMT", Some("Sun, 06 Nov 1994 13:00:00 GMT")), secs(30));
        assert_eq!(wait("Sun, 06 Nov 1994 12:00:30 GMT", Some("yesterday")), secs(30));
        for nonsense in ["", "soon", "-1", "1.5", "+3"] {
            assert_eq!(wait(nonsense, None), None, "{nonsense:?}");
        }
        assert_eq!(super::retry_after(&HeaderMap::new(), httpdate::parse_http_date(NOON).unwrap()), None);
    }
}
