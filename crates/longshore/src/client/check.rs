//! The consistency check, and whether commits are durable.

use super::Client;
use crate::error::Result;
use crate::store::{CheckReport, Durability};

impl Client {
    /// Checks that every job is in exactly one table, that keys belong to live jobs and
    /// that the tallies match the rows. Each problem comes with its remedy. The check changes
    /// nothing.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = longshore::Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// for problem in client.check().await?.problems {
    ///     println!("{problem}\n{}\n{}", problem.remedy, problem.sql.join("\n"));
    /// }
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn check(&self) -> Result<CheckReport> {
        self.store.check().await
    }

    /// Reports the settings of the database with which a crash may lose stored jobs.
    pub async fn durability(&self) -> Result<Durability> {
        self.store.durability().await
    }
}
