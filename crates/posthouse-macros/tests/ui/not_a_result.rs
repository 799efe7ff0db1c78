use posthouse::store::Backend;
use posthouse::{Message, Tx};

#[posthouse::transactional]
async fn no_result<DB: Backend>(tx: &mut Tx<DB>) -> Message { //~ a transactional function returns a `Result`, and not `
    let _ = tx;
    Message::to("orders")
}

#[posthouse::transactional]
async fn no_return<DB: Backend>(tx: &mut Tx<DB>) { //~ a transactional function returns a `Result`
    let _ = tx;
}
