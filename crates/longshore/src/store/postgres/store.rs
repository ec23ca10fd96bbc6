//! The [`Store`] operations that have no trait of their own. Each passes its arguments to
//! the function of the same name in the file named by the section.

use async_trait::async_trait;

use super::{PostgresStore, inspect};
use crate::error::Result;
use crate::job::{JobId, JobRecord};
use crate::store::*;

#[async_trait]
impl Store for PostgresStore {
    // ---- inspect ----------------------------------------------------------

    async fn get(&self, id: JobId) -> Result<Option<JobRecord>> {
        self.run_read(id, |tx, id| Box::pin(inspect::get(tx, *id))).await
    }

    async fn list(&self, filter: &ListFilter) -> Result<Page> {
        filter.validate()?;
        self.run(filter.clone(), |tx, filter| Box::pin(inspect::list(tx, filter))).await
    }

    async fn glance(&self, limit: u32, also: &[JobId]) -> Result<Vec<Glance>> {
        self.run((limit, also.to_vec()), |tx, (limit, also)| Box::pin(inspect::glance(tx, *limit, also)))
            .await
    }
}
