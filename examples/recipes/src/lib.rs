//! Short pieces to copy into a service. `tests/it.rs` runs each of them.
//!
//! | file | what it shows |
//! |---|---|
//! | `sea_orm.rs` | a business row and a message in one transaction of SeaORM 2 |
//! | `diesel.rs` | the same with diesel-async |
//! | `tokio_postgres.rs` | the same with tokio-postgres |
//! | `function.rs` | a program that only publishes, as a cloud function does: no relay, no broker client |
//! | `transport.rs` | a transport of your own |
//!
//! How to test a service without a broker is shown by the tests themselves: `posthouse::testing`.

pub mod diesel;
pub mod function;
pub mod sea_orm;
pub mod tokio_postgres;
pub mod transport;
