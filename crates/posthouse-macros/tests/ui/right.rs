//! What is right, in the forms that the mistakes vary.

use posthouse::store::Backend;
use posthouse::{Error, Message, Outbox, Tx};

#[posthouse::transactional]
async fn place<DB: Backend>(tx: &mut Tx<DB>, order: i64) -> Result<(i64, Message), Error> {
    let _ = tx;
    Ok((order, Message::to("orders")))
}

struct Shop;

impl Shop {
    #[posthouse::transactional]
    pub async fn place<DB: Backend>(&self, tx: &mut Tx<DB>) -> Result<Vec<Message>, Error> {
        place(&mut *tx, 1).await?;
        place(tx, 1).await?;
        Ok(vec![])
    }
}

pub async fn calls<DB: Backend>(outbox: &Outbox<DB>) -> Result<i64, Error> {
    Shop.place(outbox).await?;
    let mut tx = outbox.begin().await?;
    Shop.place(&mut tx).await?;
    tx.commit().await?;
    place(outbox, 7).await
}

fn send<F: Future + Send>(_: F) {}

pub fn in_tasks<DB: Backend>(outbox: Outbox<DB>) {
    send(async move { calls(&outbox).await });
}
