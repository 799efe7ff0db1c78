use posthouse::store::Backend;
use posthouse::{Message, Tx};

pub struct Refused;

#[posthouse::transactional]
async fn place<DB: Backend>(tx: &mut Tx<DB>) -> Result<Message, Refused> { //~ the error of a transactional function must be made of posthouse's own: `Refused` isn't
    let _ = tx;
    Err(Refused)
}
