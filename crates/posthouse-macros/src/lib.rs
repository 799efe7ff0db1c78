//! The attribute `#[posthouse::transactional]`. Use it through the crate `posthouse` with its feature `macros`; how it behaves
//! is told there, in the module `transactional`.
//!
//! ```
//! use posthouse::{Error, Message, Tx};
//!
//! #[posthouse::transactional]
//! async fn place(tx: &mut Tx<sqlx::Sqlite>, order: i64) -> Result<(i64, Message), Error> {
//!     sqlx::query("INSERT INTO orders (id) VALUES (?)").bind(order).execute(&mut **tx).await?;
//!     Ok((order, Message::to("orders").key(order)))
//! }
//! ```

mod expand;

use proc_macro::TokenStream;

/// Makes an async function open or join a transaction, publish what it returns, and commit what it opened.
#[proc_macro_attribute]
pub fn transactional(arguments: TokenStream, item: TokenStream) -> TokenStream {
    match expand::transactional(arguments.into(), item.into()) {
        Ok(function) => function.into(),
        Err(e) => e.into_compile_error().into(),
    }
}
