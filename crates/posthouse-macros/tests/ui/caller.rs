use posthouse::store::Backend;
use posthouse::{Error, Message, Outbox, Tx};

#[posthouse::transactional]
async fn place<DB: Backend>(tx: &mut Tx<DB>) -> Result<Message, Error> {
    let _ = tx;
    Ok(Message::to("orders"))
}

pub async fn by_value<DB: Backend>(outbox: Outbox<DB>) -> Result<(), Error> {
    place::<DB>(outbox).await //~ is called with an outbox or a transaction of one, not with `Outbox<DB>`
}
