//! Operators' commands on single jobs, and their results. Each is stored only if the job is still in the state that the
//! decision was made from.

use async_trait::async_trait;
use uuid::Uuid;

use super::KeyWait;
use super::db::{Engine, How, Row, Rows, Sql, Statement, args, column};
use crate::error::{Error, Result};
use crate::job::{JobId, Outcome};
use crate::rules::enqueue::ValidEdit;
use crate::rules::fingerprint::Fingerprint;
use crate::rules::lifecycle::{Finished, LeaseFlags, Running, State, Waiting};

/// An operator's command, as [`lifecycle`](crate::rules::lifecycle) decided it.
#[derive(Clone, Debug)]
pub enum Operation {
    /// A waiting job becomes `cancelled`.
    Cancel {
        /// The number of attempts charged so far.
        attempts: u16,
    },
    /// The cancellation of a running job is requested.
    RequestCancel,
    /// A finished job returns to the queue with a fresh attempt budget.
    Reopen,
    /// As `Reopen`, and its request is edited in the same transaction.
    ReopenWith(ValidEdit),
    /// A waiting job becomes due now.
    RunNow,
    /// A waiting job's request is edited.
    Rewrite(ValidEdit),
    /// A finished job is removed.
    Remove,
}

/// The result of an operator's command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operated {
    /// It is done.
    Done,
    /// Nothing changed: the job's state has changed since it was read. Read it again.
    Moved,
    /// Nothing changed: the job's unique key belongs to this other live job.
    KeyTaken(JobId),
}

/// The error of a job whose request exists, but that is in none of the tables `ready`, `running` and
/// `finished`, for example because rows were deleted by hand. It is not "not found": it still has its
/// keys, and an operator can let it wait again.
pub(crate) fn in_no_table(id: JobId) -> Error {
    Error::internal(format!(
        "job {id} is in none of the tables ready, running and finished; `longshore check` prints the remedy"
    ))
}

/// Which dead letters to list.
#[derive(Clone, Debug, Default)]
pub struct DeadFilter {
    /// Jobs of this kind.
    pub kind: Option<String>,
    /// Jobs of this queue.
    pub queue: Option<String>,
    /// Jobs whose failure belongs to this group.
    pub failure: Option<Fingerprint>,
    /// Jobs with ids after this one.
    pub after: Option<JobId>,
    /// The maximum number of ids.
    pub limit: u32,
}

/// Operators' commands on single jobs.
#[async_trait]
pub trait Operate {
    /// Returns a job's state, read from one snapshot; `None` if the job does not
    /// exist.
    async fn locate(&self, id: JobId) -> Result<Option<State>>;

    /// Carries out an operator's command if the job is still in the state `from`.
    /// Otherwise changes nothing and returns [`Operated::Moved`]. `wait` is how long to wait for a job, or a key that
    /// it needs, that another client's open transaction holds.
    async fn operate(&self, id: JobId, from: &State, to: &Operation, wait: KeyWait) -> Result<Operated>;

    /// Lists the ids of dead letters, oldest first.
    async fn dead_letters(&self, filter: &DeadFilter) -> Result<Vec<JobId>>;
}

#[async_trait]
impl<E: Engine> Operate for E {
    async fn locate(&self, id: JobId) -> Result<Option<State>> {
        self.call(How::READ, id, |rows, id| Box::pin(locate(rows, *id))).await
    }

    async fn operate(&self, id: JobId, from: &State, to: &Operation, wait: KeyWait) -> Result<Operated> {
        let how = How::SLOW.together().waiting_for_clients(wait);
        self.call(how, (id, from.clone(), to.clone()), |rows, (id, from, to)| {
            Box::pin(operate(rows, *id, from, to))
        })
        .await
    }

    async fn dead_letters(&self, filter: &DeadFilter) -> Result<Vec<JobId>> {
        self.call(How::SLOW_READ, filter.clone(), |rows, filter| Box::pin(dead_letters(rows, filter))).await
    }
}

/// One statement, and so one snapshot: the job is in exactly one of the tables.
static LOCATE: Statement = Statement::new(
    "
    select w.lease_no as waiting_lease_no, r.lease_no as running_lease_no, f.lease_no as finished_lease_no,
           coalesce(w.attempt, r.attempt) as attempt,
           coalesce(w.max_attempts, r.max_attempts) as max_attempts,
           coalesce(w.interruptions, r.interruptions) as interruptions,
           r.worker, r.started_at is not null as started, r.cancel_requested, r.superseded,
           f.outcome::text as outcome, coalesce(w.held, false) as held,
           exists (select 1 from longshore.flows o where o.id = j.flow and o.ended_at is null) as needed
      from longshore.jobs j
      left join longshore.ready w on w.id = j.id
      left join longshore.running r on r.id = j.id
      left join longshore.finished f on f.id = j.id
     where j.id = $1",
);

async fn locate(rows: &mut dyn Rows, id: JobId) -> Sql<Option<State>> {
    match rows.row(&LOCATE, args![id]).await? {
        Some(row) => state(row, id).map(Some),
        None => Ok(None),
    }
}

fn state(mut row: Row, id: JobId) -> Sql<State> {
    if let Some(lease_no) = row.take("waiting_lease_no")? {
        return Ok(State::Waiting(Waiting {
            lease_no,
            attempts: row.take("attempt")?,
            max_attempts: row.take("max_attempts")?,
            interruptions: row.take("interruptions")?,
            is_held: row.take("held")?,
        }));
    }
    if let Some(lease_no) = row.take("running_lease_no")? {
        return Ok(State::Running(Running {
            lease_no,
            worker: row.take("worker")?,
            attempt: row.take("attempt")?,
            max_attempts: row.take("max_attempts")?,
            interruptions: row.take("interruptions")?,
            started: row.take("started")?,
            flags: LeaseFlags {
                cancel_requested: row.take("cancel_requested")?,
                superseded: row.take("superseded")?,
            },
        }));
    }
    if let Some(lease_no) = row.take("finished_lease_no")? {
        let outcome = row.parse("outcome", Outcome::from_stored)?;
        return Ok(State::Finished(Finished { lease_no, outcome, is_needed: row.take("needed")? }));
    }
    Err(in_no_table(id).into())
}

async fn operate(rows: &mut dyn Rows, id: JobId, from: &State, to: &Operation) -> Sql<Operated> {
    let is_done = match (from, to) {
        (State::Waiting(seen), Operation::Cancel { attempts }) => {
            rows.cancel_waiting(id, seen, *attempts).await?
        }
        (State::Waiting(seen), Operation::RunNow) => rows.run_now(id, seen).await?,
        (State::Waiting(seen), Operation::Rewrite(edit)) => rows.rewrite(id, seen, edit).await?,
        (State::Running(seen), Operation::RequestCancel) => {
            rows.execute(&REQUEST_CANCEL, args![id, seen.lease_no]).await? > 0
        }
        (State::Finished(seen), Operation::Reopen) => return reopen(rows, id, seen).await,
        (State::Finished(seen), Operation::ReopenWith(edit)) => {
            return reopen_with(rows, id, seen, edit).await;
        }
        (State::Finished(seen), Operation::Remove) => rows.remove_finished(id, seen).await?,
        (from, to) => {
            let message = format!("the operation {to:?} does not apply to a job in state {from:?}");
            return Err(Error::internal(message).into());
        }
    };
    Ok(if is_done { Operated::Done } else { Operated::Moved })
}

static REQUEST_CANCEL: Statement = Statement::new(
    "
    update longshore.running
       set cancel_requested = true
     where id = $1
       and lease_no = $2",
);

/// Locks the finished row first; it is deleted once the key is taken. So two retries of
/// one job cannot both succeed.
static LOCK_FINISHED: Statement = Statement::new(
    "
    select j.unique_key
      from longshore.finished f
      join longshore.jobs j on j.id = f.id
     where f.id = $1
       and f.lease_no = $2
       and f.outcome = $3::text::longshore.outcome
       for update of f",
);

static TAKE_KEY: Statement = Statement::new(
    "
    insert into longshore.keys (key, job)
    values ($1, $2)
        on conflict (key) do nothing",
);

static KEY_HOLDER: Statement = Statement::new(
    "
    select job
      from longshore.keys
     where key = $1",
);

/// Returns the job to `ready` with a fresh budget, unless another live job owns its key.
async fn reopen(rows: &mut dyn Rows, id: JobId, seen: &Finished) -> Sql<Operated> {
    let locked = rows.row(&LOCK_FINISHED, args![id, seen.lease_no, seen.outcome.as_str()]).await?;
    let Some(mut locked) = locked else { return Ok(Operated::Moved) };
    if let Some(key) = locked.take::<Option<String>>("unique_key")?
        && rows.execute(&TAKE_KEY, args![&key, id]).await? == 0
    {
        // The holder may have finished in between; then the caller reads the state
        // again.
        return Ok(match rows.row(&KEY_HOLDER, args![&key]).await? {
            Some(mut holder) => Operated::KeyTaken(holder.take("job")?),
            None => Operated::Moved,
        });
    }
    let is_reopened = rows.reopen_finished(id, seen).await?;
    Ok(if is_reopened { Operated::Done } else { Operated::Moved })
}

/// Reopens a job and edits it. Nobody can claim it in between: both are in one transaction.
async fn reopen_with(rows: &mut dyn Rows, id: JobId, seen: &Finished, edit: &ValidEdit) -> Sql<Operated> {
    match (reopen(rows, id, seen).await?, locate(rows, id).await?) {
        (Operated::Done, Some(State::Waiting(reopened))) => {
            let is_edited = rows.rewrite(id, &reopened, edit).await?;
            Ok(if is_edited { Operated::Done } else { Operated::Moved })
        }
        (Operated::Done, _) => Ok(Operated::Moved),
        (refused, _) => Ok(refused),
    }
}

static DEAD_LETTERS: Statement = Statement::new(
    "
    select f.id
      from longshore.finished f
      join longshore.jobs j on j.id = f.id
     where f.outcome = 'failed_permanent'
       and f.outcome <> 'succeeded'   -- required to use the partial index
       and f.id > $1
       and ($2::text is null or j.kind = $2)
       and ($3::text is null or j.queue = $3)
     order by f.id
     limit $4",
);

/// Only dead letters have an error group.
static DEAD_LETTERS_OF_GROUP: Statement = Statement::new(
    "
    select f.id
      from longshore.finished f
      join longshore.jobs j on j.id = f.id
     where f.error_group = $5
       and f.error_group is not null   -- required to use the partial index
       and f.id > $1
       and ($2::text is null or j.kind = $2)
       and ($3::text is null or j.queue = $3)
     order by f.id
     limit $4",
);

async fn dead_letters(rows: &mut dyn Rows, filter: &DeadFilter) -> Sql<Vec<JobId>> {
    let DeadFilter { kind, queue, failure, after, limit } = filter;
    let after = after.unwrap_or(JobId(Uuid::nil()));
    let found = match failure {
        None => rows.rows(&DEAD_LETTERS, args![after, kind, queue, *limit]).await?,
        Some(group) => rows.rows(&DEAD_LETTERS_OF_GROUP, args![after, kind, queue, *limit, group.0]).await?,
    };
    column(found, "id")
}
