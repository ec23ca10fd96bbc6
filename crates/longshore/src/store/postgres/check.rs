//! The consistency check: every job is in exactly one table, keys belong to live
//! jobs, and the tallies match the rows. Also the check whether commits are durable.

use super::RequiredDurability;
use super::tx::{Sql, Tx};
use crate::store::{CheckReport, Durability};

/// Each statement returns one sentence per problem. The sentences are the same as those
/// of the SQLite engine.
const CHECKS: &[&str] = &[
    "select format('job %s is in %s of the tables ready, running and finished, not in exactly one', j.id,
                   (w.id is not null)::int + (r.id is not null)::int + (f.id is not null)::int)
       from longshore.jobs j
       left join longshore.ready w on w.id = j.id
       left join longshore.running r on r.id = j.id
       left join longshore.finished f on f.id = j.id
      where (w.id is not null)::int + (r.id is not null)::int + (f.id is not null)::int <> 1
      limit 100",
    "select format('job %s is in %s but not in jobs', s.id, s.table_name)
       from (select id, 'ready' as table_name from longshore.ready
             union all
             select id, 'running' from longshore.running
             union all
             select id, 'finished' from longshore.finished) s
      where not exists (select 1 from longshore.jobs j where j.id = s.id)
      limit 100",
    "select format('waiting job %s differs from its row in jobs in queue, kind, priority, max_attempts or unique key', w.id)
       from longshore.ready w
       join longshore.jobs j on j.id = w.id
      where (w.queue, w.kind, w.priority, w.max_attempts, w.keyed)
            is distinct from (j.queue, j.kind, j.priority, j.max_attempts, j.unique_key is not null)
      limit 100",
    "select format('unique key `%s` belongs to job %s, which is not live or has another key', k.key, k.job)
       from longshore.keys k
      where not exists (
              select 1
                from longshore.jobs j
                left join longshore.ready w on w.id = j.id
                left join longshore.running r on r.id = j.id and not r.superseded
               where j.id = k.job
                 and j.unique_key = k.key
                 and (w.id is not null or r.id is not null))
      limit 100",
    "select format('job %s is live but does not own its unique key `%s`', j.id, j.unique_key)
       from longshore.jobs j
       left join longshore.ready w on w.id = j.id
       left join longshore.running r on r.id = j.id and not r.superseded
      where j.unique_key is not null
        and (w.id is not null or r.id is not null)
        and not exists (select 1 from longshore.keys k where k.job = j.id and k.key = j.unique_key)
      limit 100",
    "select format('the tallies count %s %s jobs of kind `%s` in queue `%s`, but there are %s',
                   coalesce(t.n, 0), coalesce(t.outcome, f.outcome), coalesce(t.kind, f.kind),
                   coalesce(t.queue, f.queue), coalesce(f.n, 0))
       from (select outcome, queue, kind, sum(kept) as n
               from longshore.tallies
              group by outcome, queue, kind) t
       full join (select e.outcome, j.queue, j.kind, count(*) as n
                    from longshore.finished e
                    join longshore.jobs j on j.id = e.id
                   group by e.outcome, j.queue, j.kind) f
         on f.outcome = t.outcome
        and f.queue = t.queue
        and f.kind = t.kind
      where coalesce(t.n, 0) <> coalesce(f.n, 0)
      limit 100",
];

pub(super) async fn check(tx: &mut Tx<'_>) -> Sql<CheckReport> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    // All checks need the same snapshot: a job that moves between two statements would
    // be seen twice or not at all.
    sqlx::query("set transaction isolation level repeatable read, read only")
        .execute(&mut *tx.connection)
        .await?;
    let jobs: i64 = sqlx::query_scalar(tx.sql("select count(*) from longshore.jobs"))
        .fetch_one(&mut *tx.connection)
        .await?;
    let mut report = CheckReport { jobs: jobs as u64, problems: Vec::new() };
    for check in CHECKS {
        let found: Vec<String> = sqlx::query_scalar(tx.sql(check)).fetch_all(&mut *tx.connection).await?;
        report.problems.extend(found);
    }
    transaction.commit().await?;
    Ok(report)
}

/// The settings of our own session: a role, a database or the URL may change them.
const DURABILITY: &str = "
    select coalesce(current_setting('fsync', true) = 'off', false),
           coalesce(current_setting('synchronous_commit', true) = 'off', false),
           coalesce(current_setting('full_page_writes', true) = 'off', false)";

pub(super) async fn durability(tx: &mut Tx<'_>) -> Sql<Durability> {
    let (no_fsync, no_synchronous_commit, no_full_page_writes): (bool, bool, bool) =
        sqlx::query_as(DURABILITY).fetch_one(&mut *tx.connection).await?;
    let mut durability =
        Durability { accepted: tx.store.durability == RequiredDurability::Relaxed, ..Durability::default() };
    if no_fsync {
        durability.risks.push(
            "the database has fsync = off: after a crash of its host, stored jobs may be lost and the tables damaged"
                .into(),
        );
    }
    if no_synchronous_commit {
        durability.risks.push(
            "the database has synchronous_commit = off: after a crash of the server, the jobs of the last moments \
             may be lost"
                .into(),
        );
    }
    if no_full_page_writes {
        durability.warnings.push(
            "the database has full_page_writes = off: unless its file system writes pages atomically, a crash of its \
             host may damage the tables"
                .into(),
        );
    }
    Ok(durability)
}
