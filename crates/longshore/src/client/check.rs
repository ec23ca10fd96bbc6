//! The consistency check, the safe repairs of what it finds, and whether commits are durable.

use super::Client;
use crate::error::Result;
use crate::store::{CheckReport, Durability, Repair};

/// Whether [`Client::repair`] changes anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepairMode {
    /// Make the repairs.
    Repair,
    /// List the repairs that would be made now, at most a thousand of each type.
    DryRun,
}

impl Client {
    /// Checks that every job is in exactly one table, that keys belong to live jobs and
    /// that the tallies match the rows.
    pub async fn check(&self) -> Result<CheckReport> {
        self.store.check().await
    }

    /// Reports the settings of the database with which a crash may lose stored jobs.
    pub async fn durability(&self) -> Result<Durability> {
        self.store.durability().await
    }

    /// Makes the safe repairs of what [`check`](Client::check) finds, and returns them. Each
    /// one is tested again and made in its own transaction. Problems that could be repaired
    /// in more than one way stay: check again to see them.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = longshore::Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// use longshore::RepairMode;
    /// for repair in client.repair(RepairMode::DryRun).await? {
    ///     println!("would {repair}");
    /// }
    /// assert!(client.repair(RepairMode::Repair).await?.is_empty(), "the tables are consistent");
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn repair(&self, mode: RepairMode) -> Result<Vec<Repair>> {
        let mut made = Vec::new();
        loop {
            let found = self.store.repairs().await?;
            if mode == RepairMode::DryRun {
                return Ok(found);
            }
            let before = made.len();
            for repair in found {
                if self.store.repair(&repair).await? {
                    tracing::warn!(repair = %repair, "repaired the tables");
                    made.push(repair);
                }
            }
            // A list is bounded, and a repair can make others possible.
            if made.len() == before {
                return Ok(made);
            }
        }
    }
}
