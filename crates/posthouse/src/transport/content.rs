//! What is sent of a message: the payload as it is, or a CloudEvent, as the route says.

use std::borrow::Cow;

use super::Delivery;

/// Content of a message as one transport sends it.
#[derive(Debug)]
pub(crate) struct Content<'d> {
    /// Media type of `payload`; empty when there is none to tell.
    pub(crate) content_type: Cow<'d, str>,
    /// The bytes to send.
    pub(crate) payload: Cow<'d, [u8]>,
    /// CloudEvents attributes that belong into headers, without the transport's prefix (`ce-`, `ce_`, …). Empty unless the
    /// route sends binary CloudEvents.
    pub(crate) attributes: Vec<(&'static str, Cow<'d, str>)>,
}

/// The content of a delivery.
///
/// # Errors
/// Why it can't be sent in the form that its route asks for: it can never work.
pub(crate) fn content(delivery: &Delivery) -> Result<Content<'_>, String> {
    let message = delivery.message();
    Ok(Content {
        content_type: Cow::Borrowed(&message.content_type),
        payload: Cow::Borrowed(&message.payload),
        attributes: Vec::new(),
    })
}
