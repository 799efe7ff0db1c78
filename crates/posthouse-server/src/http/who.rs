//! Who asks, and what they may do.

use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::{Deserialize, Serialize};

/// What somebody may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    /// Look.
    Viewer,
    /// Look and act.
    Operator,
}

/// How somebody was recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum By {
    /// On the machine itself, where no token is set.
    Local,
    /// Sent a token.
    Token,
    /// Logged in.
    Login,
    /// A trusted proxy says so.
    Proxy,
}

/// Who asks. Every handler behind [`known`](super::guard::known) can take it.
#[derive(Debug, Clone)]
pub(crate) struct Who {
    /// For the audit log.
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) by: By,
    /// What forms of this person must send back, as the header `X-CSRF-Token` or the field `csrf`.
    pub(crate) csrf: String,
}

impl<S: Sync> FromRequestParts<S> for Who {
    type Rejection = StatusCode;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, StatusCode> {
        parts.extensions.get::<Self>().cloned().ok_or(StatusCode::UNAUTHORIZED)
    }
}
