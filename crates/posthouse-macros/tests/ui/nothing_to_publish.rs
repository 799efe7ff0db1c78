use posthouse::store::Backend;
use posthouse::{Error, Tx};

#[posthouse::transactional]
async fn nothing<DB: Backend>(tx: &mut Tx<DB>) -> Result<(), Error> { //~ returns nothing to publish: `()` is no message
    let _ = tx;
    Ok(())
}

#[posthouse::transactional]
async fn only_an_id<DB: Backend>(tx: &mut Tx<DB>) -> Result<u64, Error> { //~ returns nothing to publish: `u64` is no message
    let _ = tx;
    Ok(7)
}

#[posthouse::transactional]
async fn a_pair<DB: Backend>(tx: &mut Tx<DB>) -> Result<(u64, String), Error> { //~ returns nothing to publish: `
    let _ = tx;
    Ok((7, String::new()))
}
