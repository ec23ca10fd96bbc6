//! Groups of failures. There is one writer, so a settle changes the row of the group directly.

use rusqlite::{Row, params};

use super::tx::{Columns, Sql, Tx};
use crate::failure::Fingerprint;
use crate::job::JobId;
use crate::store::{FailureFilter, FailureRecord};

/// Notes one failure. Only the beginning of its error is kept.
pub(super) fn note_failure(
    tx: &Tx<'_>,
    failure: Fingerprint,
    job: JobId,
    kind: &str,
    error: &str,
) -> Sql<()> {
    const NOTE: &str = "
        insert into failures (fingerprint, kind, attempts, first_seen, last_seen, job, error)
        values (?1, ?2, 1, ?3, ?3, ?4, ?5)
            on conflict (fingerprint) do update
           set attempts = attempts + 1,
               first_seen = min(first_seen, excluded.first_seen),
               last_seen = max(last_seen, excluded.last_seen),
               job = iif((excluded.last_seen, excluded.job) >= (last_seen, job), excluded.job, job),
               error = iif((excluded.last_seen, excluded.job) >= (last_seen, job), excluded.error, error)";
    let end = error.char_indices().nth(FailureRecord::MAX_ERROR).map_or(error.len(), |(end, _)| end);
    tx.execute(NOTE, params![failure.0, kind, tx.now()?, job.0.as_bytes(), &error[..end]])?;
    Ok(())
}

pub(super) fn failures(tx: &Tx<'_>, filter: &FailureFilter) -> Sql<Vec<FailureRecord>> {
    const PAGE: &str = "
        select p.*,
               (select count(*)
                  from (select 1
                          from finished f
                         where f.failure = p.fingerprint
                         limit ?7))
          from (select fingerprint,
                       kind,
                       attempts,
                       first_seen,
                       last_seen,
                       job,
                       error
                  from failures
                 where (?1 is null or fingerprint = ?1)
                   and (?2 is null or kind = ?2)
                   and (?3 is null or last_seen >= ?3)
                   and (?4 is null or (last_seen, fingerprint) < (?4, ?5))
                 order by last_seen desc, fingerprint desc
                 limit ?6) p
         order by p.last_seen desc, p.fingerprint desc";
    let params = params![
        filter.fingerprint.map(|fingerprint| fingerprint.0),
        filter.kind,
        filter.seen_after.map(|at| at.timestamp_micros()),
        filter.after.map(|(at, _)| at.timestamp_micros()),
        filter.after.map(|(_, fingerprint)| fingerprint.0),
        filter.page_size(),
        FailureRecord::MAX_DEAD as i64 + 1,
    ];
    tx.rows(PAGE, params, read_failure)
}

fn read_failure(row: &Row<'_>) -> rusqlite::Result<FailureRecord> {
    let dead = row.get::<_, i64>(7)?.unsigned_abs();
    Ok(FailureRecord {
        fingerprint: Fingerprint(row.get(0)?),
        kind: row.get(1)?,
        attempts: row.get::<_, i64>(2)?.unsigned_abs(),
        dead: dead.min(FailureRecord::MAX_DEAD),
        dead_or_more: dead > FailureRecord::MAX_DEAD,
        first_seen: row.time(3)?,
        last_seen: row.time(4)?,
        job: row.job(5)?,
        error: row.get(6)?,
    })
}

/// There is nothing to add: settles have done so.
pub(super) fn fold_failures(tx: &Tx<'_>, step: u32) -> Sql<u64> {
    const FORGET: &str = "
        delete from failures
         where fingerprint in (
               select f.fingerprint
                 from failures f
                where f.last_seen < ?1
                  and not exists (select 1 from finished d where d.failure = f.fingerprint)
                order by f.last_seen
                limit ?2)
            or fingerprint in (
               select fingerprint
                 from failures
                order by last_seen desc, fingerprint
                limit ?2 offset ?3)";
    let kept = chrono::TimeDelta::days(FailureRecord::KEPT_DAYS).num_microseconds().unwrap_or(i64::MAX);
    tx.execute(FORGET, params![tx.now()? - kept, step, FailureRecord::MAX_GROUPS])?;
    Ok(0)
}
