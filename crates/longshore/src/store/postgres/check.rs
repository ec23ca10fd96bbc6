//! The consistency check: every job is in exactly one table, keys belong to live
//! jobs, steps and waits belong to jobs, and the tallies match the rows; `check_flows.rs` has the part about
//! flows. Also the safe repairs, and the check whether commits are durable.

use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::RequiredDurability;
use super::check_flows::flow_problems;
use super::run::MAX_LOCK_WAIT;
use super::tx::{Sql, Tx};
use crate::enqueue::Options;
use crate::job::{JobId, Outcome};
use crate::store::{CheckReport, Durability, Repair, StateTable};

/// A unique key whose job is not live or has another key.
macro_rules! key_without_owner {
    () => {
        "not exists (
             select 1
               from longshore.jobs j
               left join longshore.ready w on w.id = j.id
               left join longshore.running r on r.id = j.id and not r.superseded
              where j.id = k.job
                and j.unique_key = k.key
                and (w.id is not null or r.id is not null))"
    };
}

/// A step or a wait, `o`, of a job that is in no table. A job that has lost only its request is
/// another problem.
macro_rules! journal_without_job {
    () => {
        "not exists (select 1 from longshore.jobs j where j.id = o.job)
           and not exists (select 1 from longshore.ready w where w.id = o.job)
           and not exists (select 1 from longshore.running r where r.id = o.job)
           and not exists (select 1 from longshore.finished f where f.id = o.job)"
    };
}

/// A wait, `s`, for an event, `e`, that counts as delivered. The job waits on. An event whose time
/// has passed counts as absent.
macro_rules! missed_delivery {
    () => {
        "s.event = e.name
            and not s.woken
            and not e.fresh
            and e.emitted_at >= longshore.clock() - interval '7 days'
            and exists (select 1 from longshore.ready w where w.id = s.job and w.lease_no = s.lease_no)"
    };
}

/// The groups and priorities with waiting jobs but no turn in time (as `w`). A group that may not
/// start a job is looked at again after ten seconds or, because of its rate, later.
macro_rules! without_turn {
    () => {
        "
       from (select queue, grp, priority, min(run_at) as run_at
               from longshore.ready
              where grp is not null
              group by queue, grp, priority) w
      where not exists (
              select 1
                from longshore.turns t
               where t.queue = w.queue
                 and t.grp = w.grp
                 and t.priority = w.priority
                 and (t.at <= greatest(w.run_at, longshore.clock()) + interval '10 seconds' or t.tat is not null))"
    };
}

/// What the tallies count, and what there is, where the two differ.
macro_rules! miscounted {
    ($filter:literal) => {
        concat!(
            "
       (select queue, kind, outcome, sum(tallied)::int8 as tallied, sum(found)::int8 as found
          from (select queue, kind, outcome, kept as tallied, 0 as found
                  from longshore.tallies
                 union all
                select j.queue, j.kind, f.outcome, 0, 1
                  from longshore.finished f
                  join longshore.jobs j on j.id = f.id) as counted
         ",
            $filter,
            "
         group by queue, kind, outcome
        having sum(tallied) <> sum(found)) as wrong"
        )
    };
}

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
    "select format('waiting job %s differs from its row in jobs in queue, kind, priority, max_attempts, group or unique key', w.id)
       from longshore.ready w
       join longshore.jobs j on j.id = w.id
      where (w.queue, w.kind, w.priority, w.max_attempts, w.grp, w.keyed)
            is distinct from (j.queue, j.kind, j.priority, j.max_attempts, j.grp, j.unique_key is not null)
      limit 100",
    concat!(
        "select format('group `%s` of queue `%s` has waiting jobs of priority %s, but no turn in time', w.grp, w.queue, w.priority)",
        without_turn!(),
        "
      limit 100"
    ),
    "select format('group `%s` of queue `%s` runs %s jobs, but its limit was never above %s', grp, queue, count(*), max(gate))
       from longshore.running
      where grp is not null
      group by queue, grp
     having count(*) > max(gate)
        and count(*) = count(gate)   -- none was claimed without a limit
      limit 100",
    concat!(
        "select format('unique key `%s` belongs to job %s, which is not live or has another key', k.key, k.job)
           from longshore.keys k
          where ",
        key_without_owner!(),
        "
          limit 100"
    ),
    "select format('job %s is live but does not own its unique key `%s`', j.id, j.unique_key)
       from longshore.jobs j
       left join longshore.ready w on w.id = j.id
       left join longshore.running r on r.id = j.id and not r.superseded
      where j.unique_key is not null
        and (w.id is not null or r.id is not null)
        and not exists (select 1 from longshore.keys k where k.job = j.id and k.key = j.unique_key)
      limit 100",
    concat!(
        "select format('the tallies count %s %s jobs of kind `%s` in queue `%s`, but there are %s',
                       tallied, outcome, kind, queue, found)
           from",
        miscounted!(""),
        "
          limit 100"
    ),
    concat!(
        "select format('steps or waits of job %s are left, but there is no such job', o.job)
           from (select job from longshore.steps
                 union
                 select job from longshore.waits) o
          where ",
        journal_without_job!(),
        "
          limit 100"
    ),
    "select format('job %s waits for event `%s` since lease %s, but that lease is running', s.job, s.event, s.lease_no)
       from longshore.waits s
       join longshore.running r on r.id = s.job
      where not s.woken
        and s.lease_no >= r.lease_no
      limit 100",
    concat!(
        "select format('job %s waits for event `%s`, which counts as delivered', s.job, e.name)
           from longshore.events e, longshore.waits s
          where ",
        missed_delivery!(),
        "
          limit 100"
    ),
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
    report.problems.extend(flow_problems(tx).await?);
    report.problems.extend(unreadable_options(tx).await?);
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

/// Jobs whose options the library cannot read. They run without them.
async fn unreadable_options(tx: &mut Tx<'_>) -> Sql<Vec<String>> {
    const PAGE: &str = "
        select id, options::text
          from longshore.jobs
         where options is not null
           and id > $1
         order by id
         limit 5000";
    let mut problems = Vec::new();
    let mut after = Uuid::nil();
    loop {
        let page: Vec<(Uuid, String)> =
            sqlx::query_as(tx.sql(PAGE)).bind(after).fetch_all(&mut *tx.connection).await?;
        let Some((last, _)) = page.last() else { return Ok(problems) };
        after = *last;
        for (id, options) in &page {
            if let Err(error) = Options::from_stored(Some(options)) {
                problems.push(format!(
                    "job {id} has options that cannot be read, and runs without them: {error}"
                ));
            }
        }
        problems.truncate(100);
    }
}

/// A waiting job, `w`, beside a row of another table, `kept`, with the same lease or a newer
/// one. The job must not be in `$other` too.
macro_rules! waits_beside {
    ($other:literal) => {
        concat!(
            "w.id = kept.id
           and kept.lease_no >= w.lease_no
           and not exists (select 1 from longshore.",
            $other,
            " o where o.id = w.id)
           and exists (select 1 from longshore.jobs j where j.id = w.id)"
        )
    };
}

/// A row, `s`, whose job has no request. The lease of a living worker is left to that worker.
macro_rules! without_request {
    ("running") => {
        "not exists (select 1 from longshore.jobs j where j.id = s.id)
           and not exists (select 1 from longshore.workers w where w.id = s.worker and w.dead_at is null)"
    };
    ($table:literal) => {
        "not exists (select 1 from longshore.jobs j where j.id = s.id)"
    };
}

/// Lists the repairs. Each statement returns the columns that its repair is made from: a
/// job, and for tallies the group and both numbers.
pub(super) async fn repairs(tx: &mut Tx<'_>) -> Sql<Vec<Repair>> {
    const KEEP_LEASE: &str = concat!(
        "select w.id
           from longshore.ready w, longshore.running kept
          where ",
        waits_beside!("finished"),
        "
          limit 1000"
    );
    const KEEP_OUTCOME: &str = concat!(
        "select w.id
           from longshore.ready w, longshore.finished kept
          where ",
        waits_beside!("running"),
        "
          limit 1000"
    );
    const WITHOUT_REQUEST: [(StateTable, &str); 3] = [
        (
            StateTable::Ready,
            concat!("select s.id from longshore.ready s where ", without_request!("ready"), " limit 1000"),
        ),
        (
            StateTable::Running,
            concat!(
                "select s.id from longshore.running s where ",
                without_request!("running"),
                " limit 1000"
            ),
        ),
        (
            StateTable::Finished,
            concat!(
                "select s.id from longshore.finished s where ",
                without_request!("finished"),
                " limit 1000"
            ),
        ),
    ];
    const FREE_KEY: &str =
        concat!("select k.key, k.job from longshore.keys k where ", key_without_owner!(), " limit 1000");
    const WITHOUT_JOB: &str = concat!(
        "select o.job
           from (select job from longshore.steps
                 union
                 select job from longshore.waits) o
          where ",
        journal_without_job!(),
        "
          limit 1000"
    );
    const MISSED: &str = concat!(
        "select distinct e.name
           from longshore.events e, longshore.waits s
          where ",
        missed_delivery!(),
        "
          limit 1000"
    );
    const NO_TURN: &str = concat!("select w.queue, w.grp, w.priority", without_turn!(), " limit 1000");
    const MISCOUNTED: &str = concat!(
        "select queue, kind, outcome::text, tallied, found
           from",
        miscounted!(""),
        "
          limit 1000"
    );
    let mut repairs = Vec::new();
    repairs.extend(jobs(tx, KEEP_LEASE).await?.into_iter().map(|job| Repair::KeepLease { job }));
    repairs.extend(jobs(tx, KEEP_OUTCOME).await?.into_iter().map(|job| Repair::KeepOutcome { job }));
    for (table, sql) in WITHOUT_REQUEST {
        let found = jobs(tx, sql).await?;
        repairs.extend(found.into_iter().map(|job| Repair::DropWithoutRequest { job, table }));
    }
    let keys: Vec<(String, Uuid)> = sqlx::query_as(tx.sql(FREE_KEY)).fetch_all(&mut *tx.connection).await?;
    repairs.extend(keys.into_iter().map(|(key, job)| Repair::FreeKey { key, job: JobId(job) }));
    repairs.extend(jobs(tx, WITHOUT_JOB).await?.into_iter().map(|job| Repair::DropJournal { job }));
    let events: Vec<String> = sqlx::query_scalar(tx.sql(MISSED)).fetch_all(&mut *tx.connection).await?;
    repairs.extend(events.into_iter().map(|event| Repair::Redeliver { event }));
    let groups: Vec<(String, String, i16)> =
        sqlx::query_as(tx.sql(NO_TURN)).fetch_all(&mut *tx.connection).await?;
    for (queue, group, priority) in groups {
        repairs.push(Repair::AddTurn { queue, group, priority });
    }
    let wrong = sqlx::query(tx.sql(MISCOUNTED)).fetch_all(&mut *tx.connection).await?;
    for row in &wrong {
        repairs.push(miscounted(row)?);
    }
    Ok(repairs)
}

async fn jobs(tx: &mut Tx<'_>, sql: &'static str) -> Sql<Vec<JobId>> {
    let ids: Vec<Uuid> = sqlx::query_scalar(tx.sql(sql)).fetch_all(&mut *tx.connection).await?;
    Ok(ids.into_iter().map(JobId).collect())
}

fn miscounted(row: &PgRow) -> Sql<Repair> {
    let outcome = Outcome::from_stored(row.try_get(2)?)?;
    Ok(Repair::CorrectTally {
        queue: row.try_get(0)?,
        kind: row.try_get(1)?,
        outcome,
        tallied: row.try_get(3)?,
        found: row.try_get(4)?,
    })
}

/// Each repair tests its reason again: other writes may have happened since it was listed.
pub(super) async fn repair(tx: &mut Tx<'_>, repair: &Repair) -> Sql<bool> {
    /// An operator may just be retrying the job: wait, so that the repair sees it waiting.
    const LOCK_OUTCOME: &str = "
        select id
          from longshore.finished
         where id = $1
           for update";
    const DROP_WAITING_OF_RUNNING: &str = concat!(
        "with kept as (
           select r.id, r.lease_no
             from longshore.running r
            where r.id = $1
              for update)
         delete from longshore.ready w
          using kept
          where ",
        waits_beside!("finished")
    );
    const DROP_WAITING_OF_FINISHED: &str = concat!(
        "with kept as (
           select f.id, f.lease_no
             from longshore.finished f
            where f.id = $1)
         delete from longshore.ready w
          using kept
          where ",
        waits_beside!("running")
    );
    const DROP_READY: &str =
        concat!("delete from longshore.ready s where s.id = $1 and ", without_request!("ready"));
    const DROP_RUNNING: &str =
        concat!("delete from longshore.running s where s.id = $1 and ", without_request!("running"));
    const DROP_FINISHED: &str =
        concat!("delete from longshore.finished s where s.id = $1 and ", without_request!("finished"));
    const DROP_KEY: &str =
        concat!("delete from longshore.keys k where k.job = $1 and k.key = $2 and ", key_without_owner!());
    const DROP_JOURNAL: &str = concat!(
        "with deleted_waits as (
           delete from longshore.waits o
            where o.job = $1
              and ",
        journal_without_job!(),
        "
          returning job),
         deleted_steps as (
           delete from longshore.steps o
            where o.job = $1
              and ",
        journal_without_job!(),
        "
          returning job)
         select job from deleted_waits
          union all
         select job from deleted_steps"
    );
    const REDELIVER: &str = concat!(
        "update longshore.events e
            set fresh = true
          where e.name = $1
            and exists (
                  select 1
                    from longshore.waits s
                   where ",
        missed_delivery!(),
        ")"
    );
    const ADD_TURN: &str = concat!(
        "insert into longshore.turns (at, queue, grp, priority)
         select longshore.clock(), w.queue, w.grp, w.priority",
        without_turn!(),
        "
            and w.queue = $1
            and w.grp = $2
            and w.priority = $3"
    );
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    tx.limit_lock_waits(MAX_LOCK_WAIT).await?;
    let (sql, job) = match repair {
        Repair::KeepLease { job } => (DROP_WAITING_OF_RUNNING, job),
        Repair::KeepOutcome { job } => (DROP_WAITING_OF_FINISHED, job),
        Repair::DropWithoutRequest { job, table: StateTable::Ready } => (DROP_READY, job),
        Repair::DropWithoutRequest { job, table: StateTable::Running } => (DROP_RUNNING, job),
        Repair::DropWithoutRequest { job, table: StateTable::Finished } => (DROP_FINISHED, job),
        Repair::FreeKey { job, .. } => (DROP_KEY, job),
        Repair::DropJournal { job } => (DROP_JOURNAL, job),
        Repair::Redeliver { event } => {
            let query = sqlx::query(tx.sql(REDELIVER)).bind(event);
            let redelivered = query.execute(&mut *tx.connection).await?.rows_affected() > 0;
            transaction.commit().await?;
            return Ok(redelivered);
        }
        Repair::AddTurn { queue, group, priority } => {
            let query = sqlx::query(tx.sql(ADD_TURN)).bind(queue).bind(group).bind(priority);
            let added = query.execute(&mut *tx.connection).await?.rows_affected() > 0;
            transaction.commit().await?;
            return Ok(added);
        }
        Repair::CorrectTally { queue, kind, outcome, .. } => {
            let corrected = correct_tally(tx, queue, kind, *outcome).await?;
            transaction.commit().await?;
            return Ok(corrected);
        }
    };
    sqlx::query(tx.sql(LOCK_OUTCOME)).bind(job.0).execute(&mut *tx.connection).await?;
    let mut query = sqlx::query(tx.sql(sql)).bind(job.0);
    if let Repair::FreeKey { key, .. } = repair {
        query = query.bind(key);
    }
    let repaired = query.execute(&mut *tx.connection).await?.rows_affected() > 0;
    if repaired && matches!(repair, Repair::DropWithoutRequest { .. }) {
        for sql in [
            "delete from longshore.attempts where job = $1",
            "delete from longshore.checkpoints where job = $1",
            "delete from longshore.steps where job = $1",
            "delete from longshore.waits where job = $1",
            "delete from longshore.merged_requests where job = $1",
        ] {
            sqlx::query(tx.sql(sql)).bind(job.0).execute(&mut *tx.connection).await?;
        }
    }
    transaction.commit().await?;
    Ok(repaired)
}

/// A settle changes the rows and the tallies in one transaction, so the difference of one
/// snapshot is right whatever happens meanwhile. The lock keeps two repairs from correcting
/// the same difference twice.
async fn correct_tally(tx: &mut Tx<'_>, queue: &str, kind: &str, outcome: Outcome) -> Sql<bool> {
    const LOCK: &str = "
        select name
          from longshore.upkeep
         where name = 'fold'
           for update";
    const CORRECT: &str = concat!(
        "insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
         select date_trunc('minute', longshore.clock()), 0, found - tallied, outcome, 0, queue, kind
           from",
        miscounted!("where queue = $1 and kind = $2 and outcome = $3::text::longshore.outcome")
    );
    sqlx::query(tx.sql(LOCK)).execute(&mut *tx.connection).await?;
    let corrected = sqlx::query(tx.sql(CORRECT))
        .bind(queue)
        .bind(kind)
        .bind(outcome.as_str())
        .execute(&mut *tx.connection)
        .await?;
    Ok(corrected.rows_affected() > 0)
}
