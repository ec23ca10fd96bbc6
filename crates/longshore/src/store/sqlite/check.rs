//! The consistency check: every job is in exactly one table, keys belong to live
//! jobs, and the tallies match the rows. Also the check whether commits are durable.

use super::tx::{Columns, Sql, Tx};
use crate::store::{CheckReport, Durability};

/// The maximum number of problems listed of each type.
const MAX_PROBLEMS: u32 = 100;

pub(super) fn check(tx: &Tx<'_>) -> Sql<CheckReport> {
    const JOBS: &str = "
        select count(*)
          from jobs";
    const NOT_IN_ONE_TABLE: &str = "
        select j.id,
               (select count(*) from ready w where w.id = j.id)
                 + (select count(*) from running r where r.id = j.id)
                 + (select count(*) from finished f where f.id = j.id)
          from jobs j
         where 1 <> (select count(*) from ready w where w.id = j.id)
                  + (select count(*) from running r where r.id = j.id)
                  + (select count(*) from finished f where f.id = j.id)
         limit ?1";
    const ORPHANS: &str = "
        select 'ready', id from ready where id not in (select id from jobs)
         union all
        select 'running', id from running where id not in (select id from jobs)
         union all
        select 'finished', id from finished where id not in (select id from jobs)
         limit ?1";
    const DIFFERENT: &str = "
        select w.id
          from ready w
          join jobs j on j.id = w.id
         where w.queue <> j.queue
            or w.kind <> j.kind
            or w.priority <> j.priority
            or w.max_attempts <> j.max_attempts
            or w.keyed <> (j.unique_key is not null)
         limit ?1";
    const KEYS_WITHOUT_OWNER: &str = "
        select k.key,
               k.job
          from keys k
          left join jobs j on j.id = k.job
         where j.unique_key is not k.key
            or (not exists (select 1 from ready w where w.id = k.job)
                and not exists (select 1 from running r where r.id = k.job and not r.superseded))
         limit ?1";
    const JOBS_WITHOUT_KEY: &str = "
        select j.id,
               j.unique_key
          from (select id, keyed from ready
                 union all
                select id, keyed from running where not superseded) live
          join jobs j on j.id = live.id
          left join keys k on k.job = live.id
         where (j.unique_key is not null or live.keyed)
           and k.key is not j.unique_key
         limit ?1";
    const MISCOUNTED: &str = "
        select queue,
               kind,
               outcome,
               sum(tallied),
               sum(found)
          from (select queue, kind, outcome, kept as tallied, 0 as found
                  from tallies
                 union all
                select j.queue, j.kind, f.outcome, 0, 1
                  from finished f
                  join jobs j on j.id = f.id)
         group by queue, kind, outcome
        having sum(tallied) <> sum(found)
         limit ?1";
    let jobs = tx.row(JOBS, [], |row| row.get::<_, i64>(0))?.unwrap_or(0);
    let mut problems = tx.rows(NOT_IN_ONE_TABLE, [MAX_PROBLEMS], |row| {
        Ok(format!(
            "job {} is in {} of the tables ready, running and finished, not in exactly one",
            row.job(0)?,
            row.get::<_, u32>(1)?
        ))
    })?;
    problems.extend(tx.rows(ORPHANS, [MAX_PROBLEMS], |row| {
        Ok(format!("job {} is in {} but not in jobs", row.job(1)?, row.get::<_, String>(0)?))
    })?);
    problems.extend(tx.rows(DIFFERENT, [MAX_PROBLEMS], |row| {
        Ok(format!(
            "waiting job {} differs from its row in jobs in queue, kind, priority, max_attempts or unique key",
            row.job(0)?
        ))
    })?);
    problems.extend(tx.rows(KEYS_WITHOUT_OWNER, [MAX_PROBLEMS], |row| {
        Ok(format!(
            "unique key `{}` belongs to job {}, which is not live or has another key",
            row.get::<_, String>(0)?,
            row.job(1)?
        ))
    })?);
    problems.extend(tx.rows(JOBS_WITHOUT_KEY, [MAX_PROBLEMS], |row| {
        let key = row.get::<_, Option<String>>(1)?.unwrap_or_default();
        Ok(format!("job {} is live but does not own its unique key `{key}`", row.job(0)?))
    })?);
    problems.extend(tx.rows(MISCOUNTED, [MAX_PROBLEMS], |row| {
        Ok(format!(
            "the tallies count {} {} jobs of kind `{}` in queue `{}`, but there are {}",
            row.get::<_, i64>(3)?,
            row.get::<_, String>(2)?,
            row.get::<_, String>(1)?,
            row.get::<_, String>(0)?,
            row.get::<_, i64>(4)?
        ))
    })?);
    Ok(CheckReport { jobs: jobs.unsigned_abs(), problems })
}

/// The engine itself sets `synchronous = full` on every connection, so nothing can be
/// relaxed.
pub(super) fn durability(_: &Tx<'_>) -> Sql<Durability> {
    Ok(Durability::default())
}
