//! What is new and what runs, without its contents.

use std::collections::BTreeMap;

use rusqlite::params;

use super::*;
use crate::job::Status;

pub(super) fn glance(tx: &Tx<'_>, most: u32, also: &[JobId]) -> Sql<Vec<Glance>> {
    const NEWEST: &str = "
        select id, kind, queue, status, attempts, cancel_requested
          from job_status
         where id in (select id from jobs order by id desc limit ?1)";
    const RUNNING: &str = "
        select id, kind, queue, status, attempts, cancel_requested
          from job_status
         where id in (select id from running order by id desc limit ?1)";
    const ONE: &str = "
        select id, kind, queue, status, attempts, cancel_requested
          from job_status
         where id = ?1";
    let read = |row: &Row<'_>| {
        Ok(Glance {
            id: row.job(0)?,
            kind: row.get(1)?,
            queue: row.get(2)?,
            status: decoded(row.get_ref(3)?, str::parse::<Status>)?,
            attempts: row.get(4)?,
            cancel_requested: row.get(5)?,
        })
    };
    let mut seen = tx.rows(NEWEST, [most], read)?;
    seen.extend(tx.rows(RUNNING, [most], read)?);
    for id in also {
        seen.extend(tx.row(ONE, params![id.0.as_bytes()], read)?);
    }
    let once: BTreeMap<JobId, Glance> = seen.into_iter().map(|job| (job.id, job)).collect();
    Ok(once.into_values().collect())
}
