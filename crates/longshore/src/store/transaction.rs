//! The one place where a caller's own transaction enters the engines.

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
