//! The [`Store`] operations that have no trait of their own. Each passes its arguments to
//! the function of the same name in the file named by the section.

use async_trait::async_trait;

use super::{SqliteStore, inspect};
use crate::error::Result;
use crate::job::{JobId, JobRecord};
use crate::store::*;

#[async_trait]
impl Store for SqliteStore {
    // ---- inspect ----------------------------------------------------------

    async fn get(&self, id: JobId) -> Result<Option<JobRecord>> {
        self.engine.read(move |tx| inspect::get(tx, id)).await
    }

    async fn list(&self, filter: &ListFilter) -> Result<Page> {
        filter.validate()?;
        let filter = filter.clone();
        self.engine.read(move |tx| inspect::list(tx, &filter)).await
    }

    async fn glance(&self, limit: u32, also: &[JobId]) -> Result<Vec<Glance>> {
        let also = also.to_vec();
        self.engine.read(move |tx| inspect::glance(tx, limit, &also)).await
    }
}
