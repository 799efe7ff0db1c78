use posthouse::{Error, Message, Outbox, Tx};
use posthouse::store::Backend;

#[posthouse::transactional]
async fn none() -> Result<Message, Error> { //~ the first argument of a transactional function is `tx: &mut posthouse::Tx<DB>`
    Ok(Message::to("orders"))
}

#[posthouse::transactional]
async fn by_value<DB: Backend>(_tx: Tx<DB>) -> Result<Message, Error> { //~ the first argument of a transactional function is `tx: &mut posthouse::Tx<DB>`
    Ok(Message::to("orders"))
}

#[posthouse::transactional]
async fn shared<DB: Backend>(_outbox: &Outbox<DB>) -> Result<Message, Error> { //~ the first argument of a transactional function is `tx: &mut posthouse::Tx<DB>`
    Ok(Message::to("orders"))
}

#[posthouse::transactional]
async fn another(_text: &mut String) -> Result<Message, Error> { //~ the first argument of a transactional function is `tx: &mut posthouse::Tx<DB>`, and not a reference to `String`
    Ok(Message::to("orders"))
}
