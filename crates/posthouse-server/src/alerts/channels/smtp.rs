//! E-mail.

use std::time::Duration;

use lettre::message::{Mailbox, header};
use lettre::transport::smtp::authentication::Credentials;
use lettre::transport::smtp::client::{Certificate, Tls, TlsParameters};
use lettre::transport::smtp::extension::ClientId;
use lettre::{AsyncSmtpTransport, AsyncTransport, Message, Tokio1Executor};

use super::{NotTaken, webhook};
use crate::alerts::notice::{Letter, cut};
use crate::config::{SmtpSettings, SmtpTls};
use crate::output::clean;

/// The text takes at most this many bytes.
const TEXT: usize = 64 << 10;

/// A subject takes one line.
const SUBJECT: usize = 200;

pub(super) struct Smtp {
    transport: AsyncSmtpTransport<Tokio1Executor>,
    from: Mailbox,
    to: Vec<Mailbox>,
}

impl std::fmt::Debug for Smtp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Smtp").field("from", &self.from).finish_non_exhaustive()
    }
}

impl Smtp {
    pub(super) fn new(settings: &SmtpSettings, timeout: Duration) -> Result<Self, String> {
        let parameters = || {
            let mut tls = TlsParameters::builder(settings.host.clone());
            if let Some(file) = &settings.ca_file {
                let pem = std::fs::read(file).map_err(|e| format!("{file} can't be read: {e}"))?;
                let certificate = Certificate::from_pem(&pem).map_err(|e| format!("{file} holds no certificate: {e}"))?;
                tls = tls.add_root_certificate(certificate);
            }
            tls.build().map_err(|e| format!("TLS can't be set up: {e}"))
        };
        let tls = match settings.tls {
            SmtpTls::None => Tls::None,
            SmtpTls::StartTls => Tls::Required(parameters()?),
            SmtpTls::Tls => Tls::Wrapper(parameters()?),
        };
        let mut builder = AsyncSmtpTransport::<Tokio1Executor>::builder_dangerous(&settings.host)
            .port(settings.port)
            .tls(tls)
            .timeout(Some(timeout));
        if let Ok(name) = whoami::hostname() {
            builder = builder.hello_name(ClientId::Domain(name));
        }
        if let Some((name, password)) = &settings.login {
            builder = builder.credentials(Credentials::new(name.clone(), password.clone()));
        }
        Ok(Self { transport: builder.build(), from: settings.from.clone(), to: settings.to.clone() })
    }

    /// One mail to all.
    pub(super) async fn send(&self, letter: &Letter) -> Result<(), NotTaken> {
        let mut mail = Message::builder()
            .from(self.from.clone())
            .subject(cut(clean(&letter.title).as_ref(), SUBJECT))
            // The same when it is sent again, so that mailboxes show it once.
            .message_id(Some(format!("<{}@posthouse>", webhook::id(letter))))
            .header(header::ContentType::TEXT_PLAIN);
        for to in &self.to {
            mail = mail.to(to.clone());
        }
        let mail = mail.body(letter.text(TEXT)).map_err(|e| NotTaken::because(format!("the mail can't be written: {e}")))?;
        match self.transport.send(mail).await {
            Ok(_) => Ok(()),
            Err(e) => Err(NotTaken::because(clean(&causes(&e)).into_owned())),
        }
    }
}

/// An error and what lies behind it, each part once.
fn causes(e: &lettre::transport::smtp::Error) -> String {
    let mut text = e.to_string();
    let mut source = std::error::Error::source(e);
    while let Some(cause) = source {
        let part = cause.to_string();
        if !text.contains(&part) {
            text.push_str(&format!(": {part}"));
        }
        source = cause.source();
    }
    text
}
