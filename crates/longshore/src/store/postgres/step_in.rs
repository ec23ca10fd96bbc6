//! Steps whose work runs in a transaction that also journals them (`Context::step_in`).

use sqlx::PgConnection;

use super::PostgresStore;
use super::pool::{Class, PooledConnection};
use super::run::{DEADLINE, QUICK, within};
use super::steps::save_steps;
use super::tx::{Fault, Transaction, Tx};
use crate::error::Result;
use crate::store::lease::assert_lease;
use crate::store::{Fenced, Lease, NewStep};

/// A connection for a step whose work runs in a transaction. If it is dropped instead of
/// released, the connection is closed.
pub(crate) struct StepConnection {
    store: PostgresStore,
    connection: PooledConnection,
}

impl PostgresStore {
    /// Steps in transactions leave some connections free: user code decides how long they take.
    pub(crate) async fn step_connection(&self) -> Result<StepConnection> {
        let connection = self.0.pool.acquire(Class::Slow, DEADLINE).await?;
        Ok(StepConnection { store: self.clone(), connection })
    }
}

impl StepConnection {
    /// Begins a transaction and locks the lease, so that no other worker gets the job until the
    /// transaction ends. `None` means that the lease is lost.
    pub(crate) async fn begin(&mut self, lease: &Lease) -> Result<Option<StepTransaction<'_>>> {
        let begin = async {
            let mut transaction = Tx::new(&self.store.0, &mut self.connection).begin_step().await?;
            let held = assert_lease(&mut transaction.tx(), *lease).await.map_err(Fault::from)?;
            Ok((held == Fenced::Held).then_some(StepTransaction(transaction)))
        };
        Ok(within(QUICK, begin).await?)
    }

    /// Makes the connection available again, and rolls back a transaction that was dropped.
    pub(crate) async fn release(self) {
        self.connection.release(None).await;
    }
}

/// The transaction of a step. It rolls back unless it is committed.
pub(crate) struct StepTransaction<'c>(Transaction<'c>);

impl StepTransaction<'_> {
    pub(crate) fn connection(&mut self) -> &mut PgConnection {
        self.0.tx().connection
    }

    /// Journals the step and commits, if the lease is live. After an error, it is unknown whether the
    /// transaction was committed.
    pub(crate) async fn commit(mut self, step: &NewStep) -> Result<Fenced> {
        let commit = async {
            let held = save_steps(&mut self.0.tx(), std::slice::from_ref(step)).await?;
            if held == [Fenced::Held] {
                self.0.commit().await?;
            }
            Ok(held[0])
        };
        Ok(within(QUICK, commit).await?)
    }
}
