//! What a sender is told.

use std::time::Duration;

use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use futures_util::future::BoxFuture;
use tokio::sync::oneshot;

use crate::consumer::intake::{Answer, Answerable};
use crate::inbox::Handled;
use crate::webhook;

/// How the message was settled.
const OUTCOME: &str = "posthouse-outcome";

/// What becomes of one request.
#[derive(Debug)]
pub(super) enum Reply {
    Settled(Handled),
    Refused(String),
    Later(Duration),
    /// `prefetch` requests are in hand.
    NoPlace,
    /// It was being handled, or waited, when this receiver was ended.
    Ended,
    NotBelieved(webhook::Refused),
    TooLarge(usize),
    TooSlow,
    BrokenOff,
}

impl IntoResponse for Reply {
    fn into_response(self) -> Response {
        let settled = |status, outcome| (status, [(OUTCOME, outcome)]).into_response();
        let again = |wait: Duration, why: &str| {
            let seconds = (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1);
            (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, seconds.to_string())], why.to_owned()).into_response()
        };
        match self {
            Self::Settled(Handled::Processed) => settled(StatusCode::OK, "processed"),
            Self::Settled(Handled::Duplicate) => settled(StatusCode::OK, "duplicate"),
            Self::Settled(Handled::WillRetry(_)) => settled(StatusCode::ACCEPTED, "retry"),
            Self::Settled(Handled::Failed) => settled(StatusCode::ACCEPTED, "failed"),
            Self::Refused(why) => (StatusCode::UNPROCESSABLE_ENTITY, why).into_response(),
            // What is wrong with the database is none of the sender's business.
            Self::Later(wait) => again(wait, "not handled; send it again"),
            Self::NoPlace => again(Duration::ZERO, "too many requests are in hand; send it again"),
            Self::Ended => again(Duration::ZERO, "this receiver has stopped; send it again"),
            Self::NotBelieved(why) => (StatusCode::UNAUTHORIZED, why.to_string()).into_response(),
            Self::TooLarge(limit) => {
                (StatusCode::PAYLOAD_TOO_LARGE, format!("the body is larger than {limit} bytes")).into_response()
            }
            Self::TooSlow => (StatusCode::REQUEST_TIMEOUT, "the body did not come in time").into_response(),
            Self::BrokenOff => (StatusCode::BAD_REQUEST, "the body broke off").into_response(),
        }
    }
}

/// A request that waits for its answer.
#[derive(Debug)]
pub(super) struct Waiting(Option<oneshot::Sender<Reply>>);

impl Waiting {
    pub(super) fn new() -> (Self, oneshot::Receiver<Reply>) {
        let (tell, told) = oneshot::channel();
        (Self(Some(tell)), told)
    }

    fn tell(&mut self, reply: Reply) {
        // Whoever asked may have gone; the first answer counts.
        if let Some(tell) = self.0.take() {
            let _ = tell.send(reply);
        }
    }
}

impl Answerable for Waiting {
    fn settled(&mut self, handled: Handled) {
        self.tell(Reply::Settled(handled));
    }

    fn answer(mut self: Box<Self>, answer: Answer) -> BoxFuture<'static, ()> {
        match answer {
            Answer::Done => {}
            Answer::Refused(why) => self.tell(Reply::Refused(why)),
            Answer::Later(wait) => self.tell(Reply::Later(wait)),
        }
        Box::pin(std::future::ready(()))
    }
}
