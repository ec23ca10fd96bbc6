//! The consistency check: every job is in exactly one table, keys belong to live
//! jobs, steps and waits belong to jobs, and the tallies match the rows; `check_flows.rs` has the part about
//! flows. Also the safe repairs, and the check whether commits are durable.

use rusqlite::params;

use super::check_flows::flow_problems;
use super::events::oldest_kept;
use super::retain::delete_rows;
use super::settle::tally;
use super::tx::{Columns, Sql, Tx};
use crate::enqueue::Options;
use crate::job::Outcome;
use crate::store::{CheckReport, Durability, Repair, StateTable};

/// The maximum number of problems listed of each type.
const MAX_PROBLEMS: u32 = 100;

/// The groups and priorities with waiting jobs but no turn in time (as `w`). A group that may not
/// start a job is looked at again after ten seconds or, because of its rate, later.
macro_rules! without_turn {
    () => {
        "
          from (select queue, grp, priority, min(run_at) as run_at
                  from ready
                 where grp is not null
                 group by queue, grp, priority) as w
         where not exists (
               select 1
                 from turns t
                where t.queue = w.queue
                  and t.grp = w.grp
                  and t.priority = w.priority
                  and (t.at <= max(w.run_at, ?2) + 10000000 or t.tat is not null))"
    };
}

/// A unique key whose job is not live or has another key.
macro_rules! key_without_owner {
    () => {
        "not exists (
               select 1
                 from jobs j
                where j.id = keys.job
                  and j.unique_key = keys.key
                  and (exists (select 1 from ready w where w.id = j.id)
                       or exists (select 1 from running r where r.id = j.id and not r.superseded)))"
    };
}

/// A step or a wait, `o`, of a job that is in no table. A job that has lost only its request is
/// another problem.
macro_rules! journal_without_job {
    () => {
        "not exists (select 1 from jobs j where j.id = o.job)
           and not exists (select 1 from ready w where w.id = o.job)
           and not exists (select 1 from running r where r.id = o.job)
           and not exists (select 1 from finished f where f.id = o.job)"
    };
}

/// A wait, `s`, for an event, `e`, that counts as delivered. The job waits on. An event that is
/// older than `?2` counts as absent.
macro_rules! missed_delivery {
    () => {
        "s.event = e.name
            and not s.woken
            and not e.fresh
            and e.emitted_at >= ?2
            and exists (select 1 from ready w where w.id = s.job and w.lease_no = s.lease_no)"
    };
}

/// What the tallies count, and what there is, where the two differ.
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
            or w.grp is not j.grp
            or w.keyed <> (j.unique_key is not null)
         limit ?1";
    const WITHOUT_TURN: &str = concat!("select w.grp, w.queue, w.priority", without_turn!(), " limit ?1");
    const ABOVE_LIMIT: &str = "
        select grp,
               queue,
               count(*),
               max(gate)
          from running
         where grp is not null
         group by queue, grp
        having count(*) > max(gate)
           and count(*) = count(gate)   -- none was claimed without a limit
         limit ?1";
    const KEYS_WITHOUT_OWNER: &str = concat!(
        "select key,
                job
           from keys
          where ",
        key_without_owner!(),
        "
          limit ?1"
    );
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
    const JOURNALS_WITHOUT_JOB: &str = concat!(
        "select o.job
           from (select job from steps
                 union
                 select job from waits) o
          where ",
        journal_without_job!(),
        "
          limit ?1"
    );
    const SUSPENDED_AND_RUNNING: &str = "
        select s.job,
               s.event,
               s.lease_no
          from waits s
          join running r on r.id = s.job
         where not s.woken
           and s.lease_no >= r.lease_no
         limit ?1";
    const MISSED_DELIVERIES: &str = concat!(
        "select s.job,
                e.name
           from events e, waits s
          where ",
        missed_delivery!(),
        "
          limit ?1"
    );
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
            "waiting job {} differs from its row in jobs in queue, kind, priority, max_attempts, group or unique key",
            row.job(0)?
        ))
    })?);
    problems.extend(tx.rows(WITHOUT_TURN, params![MAX_PROBLEMS, tx.now()?], |row| {
        Ok(format!(
            "group `{}` of queue `{}` has waiting jobs of priority {}, but no turn in time",
            row.get::<_, String>(0)?,
            row.get::<_, String>(1)?,
            row.get::<_, i16>(2)?
        ))
    })?);
    problems.extend(tx.rows(ABOVE_LIMIT, [MAX_PROBLEMS], |row| {
        Ok(format!(
            "group `{}` of queue `{}` runs {} jobs, but its limit was never above {}",
            row.get::<_, String>(0)?,
            row.get::<_, String>(1)?,
            row.get::<_, u32>(2)?,
            row.get::<_, u32>(3)?
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
    problems.extend(tx.rows(JOURNALS_WITHOUT_JOB, [MAX_PROBLEMS], |row| {
        Ok(format!("steps or waits of job {} are left, but there is no such job", row.job(0)?))
    })?);
    problems.extend(tx.rows(SUSPENDED_AND_RUNNING, [MAX_PROBLEMS], |row| {
        Ok(format!(
            "job {} waits for event `{}` since lease {}, but that lease is running",
            row.job(0)?,
            row.get::<_, String>(1)?,
            row.get::<_, i32>(2)?
        ))
    })?);
    problems.extend(tx.rows(MISSED_DELIVERIES, params![MAX_PROBLEMS, oldest_kept(tx)?], |row| {
        Ok(format!(
            "job {} waits for event `{}`, which counts as delivered",
            row.job(0)?,
            row.get::<_, String>(1)?
        ))
    })?);
    problems.extend(flow_problems(tx)?);
    problems.extend(unreadable_options(tx)?);
    Ok(CheckReport { jobs: jobs.unsigned_abs(), problems })
}

/// The engine itself sets `synchronous = full` on every connection, so nothing can be
/// relaxed.
pub(super) fn durability(_: &Tx<'_>) -> Sql<Durability> {
    Ok(Durability::default())
}

/// Jobs whose options the library cannot read. They run without them.
fn unreadable_options(tx: &Tx<'_>) -> Sql<Vec<String>> {
    const OPTIONS: &str = "
        select id,
               options
          from jobs
         where options is not null
         order by id";
    let mut problems = Vec::new();
    let mut statement = tx.prepare(OPTIONS)?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        if problems.len() == MAX_PROBLEMS as usize {
            break;
        }
        let options = row.get_ref(1)?.as_str().unwrap_or("?");
        if let Err(error) = Options::from_stored(Some(options)) {
            let id = row.job(0)?;
            problems
                .push(format!("job {id} has options that cannot be read, and runs without them: {error}"));
        }
    }
    Ok(problems)
}

/// The maximum number of repairs listed of each type.
const MAX_REPAIRS: u32 = 1000;

/// A waiting job that is also in `$table`, with the same lease or a newer one, and not in
/// `$other`.
macro_rules! waits_beside {
    ($table:literal, $other:literal) => {
        concat!(
            "exists (select 1 from ",
            $table,
            " s where s.id = ready.id and s.lease_no >= ready.lease_no)
           and not exists (select 1 from ",
            $other,
            " o where o.id = ready.id)
           and exists (select 1 from jobs j where j.id = ready.id)"
        )
    };
}

/// A row whose job has no request. The lease of a living worker is left to that worker.
macro_rules! without_request {
    ("running") => {
        "id not in (select id from jobs)
           and worker not in (select id from workers where dead_at is null)"
    };
    ($table:literal) => {
        "id not in (select id from jobs)"
    };
}

pub(super) fn repairs(tx: &Tx<'_>) -> Sql<Vec<Repair>> {
    const KEEP_LEASE: &str =
        concat!("select id from ready where ", waits_beside!("running", "finished"), " limit ?1");
    const KEEP_OUTCOME: &str =
        concat!("select id from ready where ", waits_beside!("finished", "running"), " limit ?1");
    const WITHOUT_REQUEST: [(StateTable, &str); 3] = [
        (StateTable::Ready, concat!("select id from ready where ", without_request!("ready"), " limit ?1")),
        (
            StateTable::Running,
            concat!("select id from running where ", without_request!("running"), " limit ?1"),
        ),
        (
            StateTable::Finished,
            concat!("select id from finished where ", without_request!("finished"), " limit ?1"),
        ),
    ];
    const FREE_KEY: &str = concat!("select key, job from keys where ", key_without_owner!(), " limit ?1");
    const WITHOUT_JOB: &str = concat!(
        "select o.job from (select job from steps union select job from waits) o where ",
        journal_without_job!(),
        " limit ?1"
    );
    const MISSED: &str =
        concat!("select distinct e.name from events e, waits s where ", missed_delivery!(), " limit ?1");
    const NO_TURN: &str = concat!("select w.queue, w.grp, w.priority", without_turn!(), " limit ?1");
    let jobs = |sql: &str| tx.rows(sql, [MAX_REPAIRS], |row| row.job(0));
    let mut repairs = Vec::new();
    repairs.extend(jobs(KEEP_LEASE)?.into_iter().map(|job| Repair::KeepLease { job }));
    repairs.extend(jobs(KEEP_OUTCOME)?.into_iter().map(|job| Repair::KeepOutcome { job }));
    for (table, sql) in WITHOUT_REQUEST {
        repairs.extend(jobs(sql)?.into_iter().map(|job| Repair::DropWithoutRequest { job, table }));
    }
    repairs.extend(
        tx.rows(FREE_KEY, [MAX_REPAIRS], |row| Ok(Repair::FreeKey { key: row.get(0)?, job: row.job(1)? }))?,
    );
    repairs.extend(jobs(WITHOUT_JOB)?.into_iter().map(|job| Repair::DropJournal { job }));
    repairs.extend(tx.rows(MISSED, params![MAX_REPAIRS, oldest_kept(tx)?], |row| {
        Ok(Repair::Redeliver { event: row.get(0)? })
    })?);
    repairs.extend(tx.rows(NO_TURN, params![MAX_REPAIRS, tx.now()?], |row| {
        Ok(Repair::AddTurn { queue: row.get(0)?, group: row.get(1)?, priority: row.get(2)? })
    })?);
    repairs.extend(miscounted(tx)?);
    Ok(repairs)
}

fn miscounted(tx: &Tx<'_>) -> Sql<Vec<Repair>> {
    tx.rows(MISCOUNTED, [MAX_REPAIRS], |row| {
        Ok(Repair::CorrectTally {
            queue: row.get(0)?,
            kind: row.get(1)?,
            outcome: row.outcome(2)?,
            tallied: row.get(3)?,
            found: row.get(4)?,
        })
    })
}

/// Each repair tests its reason again: other writes may have happened since it was listed.
pub(super) fn repair(tx: &Tx<'_>, repair: &Repair) -> Sql<bool> {
    const DROP_WAITING_OF_RUNNING: &str =
        concat!("delete from ready where id = ?1 and ", waits_beside!("running", "finished"));
    const DROP_WAITING_OF_FINISHED: &str =
        concat!("delete from ready where id = ?1 and ", waits_beside!("finished", "running"));
    const DROP_READY: &str = concat!("delete from ready where id = ?1 and ", without_request!("ready"));
    const DROP_RUNNING: &str = concat!("delete from running where id = ?1 and ", without_request!("running"));
    const DROP_FINISHED: &str =
        concat!("delete from finished where id = ?1 and ", without_request!("finished"));
    const DROP_KEY: &str = concat!("delete from keys where job = ?1 and key = ?2 and ", key_without_owner!());
    const DROP_STEPS: &str = concat!("delete from steps as o where o.job = ?1 and ", journal_without_job!());
    const DROP_WAITS: &str = concat!("delete from waits as o where o.job = ?1 and ", journal_without_job!());
    const REDELIVER: &str = concat!(
        "update events as e set fresh = true where e.name = ?1 and exists (select 1 from waits s where ",
        missed_delivery!(),
        ")"
    );
    const ADD_TURN: &str = concat!(
        "insert into turns (at, queue, grp, priority) select ?2, w.queue, w.grp, w.priority",
        without_turn!(),
        " and w.queue = ?1 and w.grp = ?3 and w.priority = ?4"
    );
    let (sql, job) = match repair {
        Repair::KeepLease { job } => (DROP_WAITING_OF_RUNNING, job),
        Repair::KeepOutcome { job } => (DROP_WAITING_OF_FINISHED, job),
        Repair::DropWithoutRequest { job, table: StateTable::Ready } => (DROP_READY, job),
        Repair::DropWithoutRequest { job, table: StateTable::Running } => (DROP_RUNNING, job),
        Repair::DropWithoutRequest { job, table: StateTable::Finished } => (DROP_FINISHED, job),
        Repair::FreeKey { key, job } => {
            return Ok(tx.execute(DROP_KEY, params![job.0.as_bytes(), key])? > 0);
        }
        Repair::DropJournal { job } => {
            let id = job.0.as_bytes();
            return Ok(tx.execute(DROP_STEPS, [id])? + tx.execute(DROP_WAITS, [id])? > 0);
        }
        Repair::Redeliver { event } => {
            return Ok(tx.execute(REDELIVER, params![event, oldest_kept(tx)?])? > 0);
        }
        Repair::AddTurn { queue, group, priority } => {
            return Ok(tx.execute(ADD_TURN, params![queue, tx.now()?, group, priority])? > 0);
        }
        Repair::CorrectTally { queue, kind, outcome, .. } => {
            return correct_tally(tx, queue, kind, *outcome);
        }
    };
    let repaired = tx.execute(sql, [job.0.as_bytes()])? > 0;
    if repaired && matches!(repair, Repair::DropWithoutRequest { .. }) {
        delete_rows(tx, *job)?;
    }
    Ok(repaired)
}

fn correct_tally(tx: &Tx<'_>, queue: &str, kind: &str, outcome: Outcome) -> Sql<bool> {
    for wrong in miscounted(tx)? {
        let Repair::CorrectTally { queue: q, kind: k, outcome: o, tallied, found } = wrong else { continue };
        if (q.as_str(), k.as_str(), o) == (queue, kind, outcome) {
            tally(tx, queue, kind, outcome, 0, 0, found - tallied)?;
            return Ok(true);
        }
    }
    Ok(false)
}
