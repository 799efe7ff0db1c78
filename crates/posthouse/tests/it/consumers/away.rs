//! An inbox whose database goes away and comes back.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthouse::inbox::{Handler, HandlerError, Inbox, Incoming};
use posthouse::{Error, Tx};
use sqlx::Postgres as Db;

use crate::inbox::{Fixture, quick, try_effect};
use crate::support::{Postgres, TestDb};
use posthouse_faults::Proxy;

pub(super) struct Away {
    pub(super) fixture: Fixture<Postgres>,
    pub(super) proxy: Proxy,
    /// Goes through the proxy; type `t`.
    pub(super) inbox: Inbox<Db>,
    /// Ids of messages in the order of their effects.
    pub(super) order: Arc<Mutex<Vec<String>>>,
}

struct Effect(String, Arc<Mutex<Vec<String>>>);

impl Handler<Db> for Effect {
    type Message = Incoming;

    async fn handle(&self, tx: &mut Tx<Db>, m: Incoming) -> Result<(), HandlerError> {
        let id = m.message_id.unwrap_or_default();
        try_effect::<Postgres>(tx, &self.0, &id).await.map_err(Error::from)?;
        self.1.lock().unwrap().push(id);
        Ok(())
    }

    fn decode(&self, incoming: &Incoming) -> Result<Incoming, HandlerError> {
        Ok(incoming.clone())
    }
}

impl Away {
    pub(super) async fn new() -> Self {
        let order = Arc::<Mutex<Vec<String>>>::default();
        let mut settings = quick();
        settings.database_timeout = Duration::from_secs(1);
        let fixture = Fixture::<Postgres>::with(settings.clone()).await;
        let url = &fixture.place.url;
        let address = url.split('@').nth(1).and_then(|rest| rest.split('/').next()).expect("host:port").to_owned();
        let proxy = Proxy::start(address.clone()).await;
        let through = Postgres::connect(&url.replace(&address, &proxy.address.to_string())).await;
        let inbox = fixture.beside(through, "inventory", settings).on("t", Effect(fixture.effects.clone(), order.clone()));
        Self { fixture, proxy, inbox, order }
    }
}
