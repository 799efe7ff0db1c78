//! What requests say, with refusals in the API's own words.

use std::marker::PhantomData;

use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::request::Parts;
use futures_util::StreamExt;
use serde::de::DeserializeOwned;

use crate::ops::{Refusal, Refused};

/// The parameters behind `?`.
pub(super) struct Asked<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = Refused;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refused> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(asked)) => Ok(Self(asked)),
            Err(QueryRejection::FailedToDeserializeQueryString(e)) => Err(Refused::new(Refusal::Invalid, e.body_text())),
            Err(e) => Err(Refused::new(Refusal::Invalid, e.body_text())),
        }
    }
}

/// How large a body may be.
pub(super) trait Most {
    const BYTES: usize;
}

/// Lists of ids and filters.
pub(super) struct Small;

impl Most for Small {
    const BYTES: usize = 512 << 10;
}

/// A message: the largest payload as base64, and headers.
pub(super) struct Large;

impl Most for Large {
    const BYTES: usize = (8 << 20) / 3 * 4 + (256 << 10);
}

/// A JSON body. Its text goes along, for what must be kept as it was written.
pub(super) struct Body<T, M = Small>(pub(super) T, pub(super) PhantomData<M>);

impl<T: DeserializeOwned, M: Most, S: Send + Sync> FromRequest<S> for Body<T, M> {
    type Rejection = Refused;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refused> {
        let body = read(request.into_body(), M::BYTES).await?;
        let body = if body.iter().all(u8::is_ascii_whitespace) { &b"{}"[..] } else { &body };
        let mut json = serde_json::Deserializer::from_slice(body);
        let value = serde_path_to_error::deserialize(&mut json).map_err(|e| {
            let path = e.path().to_string();
            let why = e.into_inner();
            Refused::new(Refusal::Invalid, if path == "." { format!("body: {why}") } else { format!("{path}: {why}") })
        })?;
        json.end().map_err(|e| Refused::new(Refusal::Invalid, format!("body: {e}")))?;
        Ok(Self(value, PhantomData))
    }
}

/// Of a body that is too large so much more is read and thrown away: a client that is still sending wouldn't read the answer.
const DISCARDED: usize = 32 << 20;

async fn read(body: axum::body::Body, most: usize) -> Result<Vec<u8>, Refused> {
    let (mut kept, mut seen) = (Vec::new(), 0_usize);
    let mut stream = body.into_data_stream();
    while let Some(part) = stream.next().await {
        let part = part.map_err(|e| Refused::new(Refusal::Invalid, format!("body: {e}")))?;
        seen = seen.saturating_add(part.len());
        if seen <= most {
            kept.extend_from_slice(&part);
        } else if seen > most.saturating_add(DISCARDED) {
            break;
        }
    }
    if seen <= most {
        Ok(kept)
    } else {
        Err(Refused::new(Refusal::Large, format!("the body may have {most} bytes")).limit(most as u64))
    }
}
