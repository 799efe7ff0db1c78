use posthouse::store::Backend;
use posthouse::{Error, Message, Tx};

#[posthouse::transactional]
fn place<DB: Backend>(_tx: &mut Tx<DB>) -> Result<Message, Error> { //~ a transactional function is `async`
    Ok(Message::to("orders"))
}

#[posthouse::transactional(readonly)] //~ takes no arguments
async fn arguments<DB: Backend>(_tx: &mut Tx<DB>) -> Result<Message, Error> {
    Ok(Message::to("orders"))
}

pub trait Shop<DB: Backend> {
    #[posthouse::transactional]
    async fn place(&self, tx: &mut Tx<DB>) -> Result<Message, Error>; //~ goes on an async function with a body
}
