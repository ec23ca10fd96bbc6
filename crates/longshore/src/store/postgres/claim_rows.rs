//! The rows of a claim: how the statements that lease are bound, and how their rows become [`Claimed`] jobs.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use super::claim_sql::skipping_unsound;
use super::tx::{Query, Sql, Tx};
use crate::job::{FlowId, JobId, WorkerId};
use crate::rules::enqueue::Options;
use crate::rules::turns::Rate;
use crate::store::{ClaimRequest, Claimed, Lease, shared};

/// A statement of a claim, which skips rows that cannot be claimed if one was found lately.
pub(super) fn statement<'q>(tx: &Tx<'_>, text: &'static str) -> Query<'q> {
    if tx.store.unsound.are_skipped() {
        sqlx::query(AssertSqlSafe(tx.fill(&skipping_unsound(text))))
    } else {
        sqlx::query(tx.sql(text))
    }
}

/// Binds the three parameters that decide which jobs the worker takes.
pub(super) fn bind_filter<'q>(query: Query<'q>, request: &ClaimRequest) -> Query<'q> {
    query
        .bind(request.kinds.clone())
        .bind((!request.accept_flags.is_empty()).then(|| request.accept_flags.clone()))
        .bind((!request.forbid_flags.is_empty()).then(|| request.forbid_flags.clone()))
}

/// A number of jobs as a parameter.
pub(super) fn jobs(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

/// A rate as it is stored; the three columns are set together.
pub(super) fn rate(starts: Option<i32>, period_ms: Option<i64>, burst: Option<i32>) -> Option<Rate> {
    let (starts, period_ms, burst) = (starts? as u32, period_ms? as u64, burst? as u32);
    Some(Rate { starts, period_ms, burst })
}

/// Reads the rows of a claim. Kinds and queues that repeat from row to row share memory.
pub(super) struct Reader {
    worker: WorkerId,
    claimed_at: DateTime<Utc>,
    queue: Arc<str>,
    kind: Arc<str>,
}

impl Reader {
    pub(super) fn new(worker: WorkerId, claimed_at: DateTime<Utc>) -> Self {
        Reader { worker, claimed_at, queue: "".into(), kind: "".into() }
    }

    /// Reads a row; `None` if it has no job.
    pub(super) fn read(&mut self, row: &PgRow) -> Sql<Option<Claimed>> {
        let Some(id) = row.try_get::<Option<Uuid>, _>(1)?.map(JobId) else { return Ok(None) };
        Ok(Some(Claimed {
            kind: shared(&mut self.kind, row.try_get(2)?),
            queue: shared(&mut self.queue, row.try_get(12)?),
            priority: row.try_get(13)?,
            attempt: row.try_get::<i32, _>(3)? as u16,
            max_attempts: row.try_get::<i16, _>(4)? as u16,
            interruptions: row.try_get::<i16, _>(14)? as u16,
            lease: Lease { id, lease_no: row.try_get(5)?, worker: self.worker },
            timeout: row.try_get::<Option<i64>, _>(6)?.map(|ms| Duration::from_millis(ms as u64)),
            flags: row
                .try_get::<Option<Vec<Option<String>>>, _>(7)?
                .unwrap_or_default()
                .into_iter()
                .flatten()
                .collect(),
            run_at: row.try_get(8)?,
            claimed_at: self.claimed_at,
            payload: row.try_get(9)?,
            // The claim is committed: one bad row must not affect the others.
            options: Options::from_stored(row.try_get(10)?).unwrap_or_else(|error| {
                tracing::error!(job_id = %id, %error, "cannot read the options of the job; running it without them");
                Options::default()
            }),
            group: None,
            gated: false,
            flow: row.try_get::<Option<Uuid>, _>(11)?.map(FlowId),
        }))
    }
}
