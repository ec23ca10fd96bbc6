//! The caller's own transaction: the only place where a driver's connection enters the store. Code with such
//! a connection has to know which engine the store is.

use super::{NewFlow, PutFlow, Store};
use crate::error::Result;
use crate::rules::enqueue::{Enqueued, ValidJob};

/// The caller's own transaction: `&mut sqlx::Transaction` or `&mut sqlx::PgConnection` for
/// Postgres, `&rusqlite::Transaction` or `&rusqlite::Connection` for SQLite. Only the
/// engines implement this trait.
#[expect(async_fn_in_trait, reason = "only the engines implement it")]
pub trait CallerTransaction {
    /// Stores the jobs on the caller's connection.
    #[doc(hidden)]
    async fn enqueue(self, store: &dyn Store, jobs: &[ValidJob]) -> Result<Vec<Enqueued>>;

    /// Stores the flow on the caller's connection.
    #[doc(hidden)]
    async fn put_flow(self, store: &dyn Store, flow: &NewFlow) -> Result<PutFlow>;
}

/// Which engine a store is. Only code with a connection of the engine's driver needs to know it.
pub trait EngineOf {
    /// The engine, if it is Postgres.
    #[cfg(feature = "postgres")]
    fn as_postgres(&self) -> Option<&super::postgres::PostgresStore>;

    /// The engine, if it is SQLite.
    #[cfg(feature = "sqlite")]
    fn as_sqlite(&self) -> Option<&super::sqlite::SqliteStore>;
}
