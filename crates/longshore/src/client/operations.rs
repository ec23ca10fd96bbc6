//! Operations: starts, stops and executes changes of any number of jobs. Also changes several jobs at once,
//! for bulk requests.
//!
//! An operation visits its jobs from the newest to the oldest, so it does not come back to a job that it has
//! retried and that failed again. It passes by jobs that another transaction has locked, and stores their
//! ids. At its end it visits these jobs again, in rounds, and counts each one when it is no longer locked.
//!
//! Any process may execute an operation. The process stores the cursor after every step. If it dies, another
//! process continues at the cursor and visits the jobs of the last step twice. That does no harm: jobs that
//! were created since the operation was started are left alone, and jobs that have ended since are not
//! retried.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::Client;
use super::operate::Command;
use crate::error::{Error, Result};
use crate::job::{JobId, JobRecord, OperationId, Status};
use crate::rules::lifecycle::When;
use crate::store::{
    Action, Executor, Glance, JobFilter, KeyWait, NewOperation, OperationFilter, OperationRecord,
    OperationState, OperationStep, Selection, TakenOperation,
};

/// The maximum number of jobs per step.
const STEP: u32 = 200;
/// After this many steps, another operation that waits comes first.
const STEPS_PER_TURN: u32 = 5;
/// For how long a process takes an operation. Each step takes it for longer.
const TAKE_FOR: Duration = Duration::from_secs(30);
/// A step begins no further changes after this time, so that it ends long before another process may take
/// the operation.
const MAX_STEP_TIME: Duration = Duration::from_secs(10);
/// The pause after a temporary error, and between two rounds through the jobs that the operation has passed
/// by. Other operations continue meanwhile.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(5);
/// How many jobs are changed at the same time. On Postgres, more would only wait for connections. On SQLite,
/// these share a commit.
const CONCURRENT_CHANGES: usize = 32;
/// The maximum number of operations per page, and per step of removal.
const MAX_PAGE: u32 = 200;
const PAUSES: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_millis(100);

impl Client {
    /// Starts an operation: a change of any number of jobs that runs in the background. Workers and servers
    /// execute it. [`operation`](Client::operation) returns its progress.
    ///
    /// ```
    /// # use longshore::{Action, Client, JobFilter, NewOperation, OperationState, Status};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// let dead_letters = JobFilter { statuses: vec![Status::FailedPermanent], ..JobFilter::default() };
    /// let operation = client.start_operation(NewOperation::matching(Action::Retry, dead_letters)).await?;
    /// assert_eq!(operation.state, OperationState::Running);
    /// client.stop_operation(operation.id).await?;
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn start_operation(&self, operation: NewOperation) -> Result<OperationRecord> {
        let mut operation = operation.validate()?;
        if let Selection::Filter(filter) = &operation.selection {
            operation.expected = self.count_matching(filter).await;
        }
        self.store.put_operation(&operation).await?;
        self.operation(operation.id).await
    }

    /// The number of jobs that match, if the counts by status, queue and kind contain it.
    async fn count_matching(&self, filter: &JobFilter) -> Option<u64> {
        if !filter.is_countable() {
            return None;
        }
        let counts = self.store.counts().await.ok()?;
        let matching = counts.into_iter().filter(|count| {
            (filter.statuses.is_empty() || filter.statuses.contains(&count.status))
                && filter.queue.as_ref().is_none_or(|queue| *queue == count.queue)
                && filter.kind.as_ref().is_none_or(|kind| *kind == count.kind)
        });
        matching.map(|count| (!count.estimated).then_some(count.jobs)).sum()
    }

    /// Returns an operation with its progress.
    pub async fn operation(&self, id: OperationId) -> Result<OperationRecord> {
        self.store.operation(id).await?.ok_or_else(|| not_found(id))
    }

    /// Lists operations, newest first, up to 200.
    pub async fn operations(&self, filter: &OperationFilter) -> Result<Vec<OperationRecord>> {
        let limit = filter.limit.clamp(1, MAX_PAGE);
        self.store.operations(&OperationFilter { limit, ..filter.clone() }).await
    }

    /// Stops an operation after its current step. What it has changed stays changed. Returns a conflict error
    /// if it has ended.
    pub async fn stop_operation(&self, id: OperationId) -> Result<OperationRecord> {
        match self.store.stop_operation(id).await?.ok_or_else(|| not_found(id))? {
            OperationState::Running | OperationState::Stopped => self.operation(id).await,
            OperationState::Done => {
                Err(Error::conflict(format!("operation {id} is done; there is nothing to stop")))
            }
            OperationState::Failed => Err(Error::conflict(format!(
                "operation {id} has failed; there is nothing to stop; resume it if it should continue"
            ))),
        }
    }

    /// Lets an operation continue that was stopped or has failed. No job is visited again. Returns a conflict
    /// error if it is done.
    pub async fn resume_operation(&self, id: OperationId) -> Result<OperationRecord> {
        match self.store.resume_operation(id).await?.ok_or_else(|| not_found(id))? {
            OperationState::Done => {
                Err(Error::conflict(format!("operation {id} is done; start a new one to change more jobs")))
            }
            _ => self.operation(id).await,
        }
    }
}

fn not_found(id: OperationId) -> Error {
    Error::not_found(format!(
        "operation {id} does not exist, or is no longer kept; operations are removed after 7 days"
    ))
}

// ---- executing -------------------------------------------------------------

#[doc(hidden)]
impl Client {
    /// Executes operations in turns, until other processes have taken all that are left. `pause` waits between two
    /// steps. If it returns `false`, the execution ends early, and another process continues.
    pub async fn run_operations<Pause, Waiting>(&self, mut pause: Pause) -> Result<()>
    where
        Pause: FnMut(Duration) -> Waiting + Send,
        Waiting: Future<Output = bool> + Send,
    {
        let executor = Uuid::now_v7();
        while let Some(operation) = self.store.take_operation(executor, TAKE_FOR).await? {
            let mut execution = Execution::new(self, operation, executor);
            for steps in 1.. {
                let began = Instant::now();
                match execution.step().await? {
                    Next::Continue if !pause(pause_after(began.elapsed())).await => {
                        return execution.release().await;
                    }
                    // A large operation must not keep a small one waiting until it ends.
                    Next::Continue if steps == STEPS_PER_TURN => {
                        execution.release().await?;
                        break;
                    }
                    Next::Continue => {}
                    Next::Leave => break,
                }
            }
        }
        Ok(())
    }

    /// Removes operations that ended long ago. Returns how many.
    pub async fn remove_old_operations(&self) -> Result<u64> {
        let mut removed = 0;
        loop {
            let step = self.store.remove_operations(MAX_PAGE).await?;
            removed += step;
            if step < MAX_PAGE.into() {
                return Ok(removed);
            }
        }
    }
}

/// How long to pause after a step that took this long: enough to let others use the database, without
/// slowing the operation down much.
fn pause_after(took: Duration) -> Duration {
    (took / 4).clamp(*PAUSES.start(), *PAUSES.end())
}

/// An operation that this process has taken.
struct Execution<'c> {
    client: &'c Client,
    operation: TakenOperation,
    executor: Executor,
    cursor: Option<JobId>,
    /// Whether it has visited all of its jobs.
    has_visited_all: bool,
    /// The last job that was visited in the current round through the jobs that it passed by.
    locked_cursor: Option<JobId>,
}

/// What follows a step.
enum Next {
    /// The operation is not finished.
    Continue,
    /// The operation has ended or was stopped, another process has it, or it is tried again later.
    Leave,
}

/// The jobs that a step visits.
struct Visit {
    jobs: Vec<Target>,
    /// Where the next step starts; `None` if this is the last one.
    next: Option<JobId>,
}

impl<'c> Execution<'c> {
    fn new(client: &'c Client, operation: TakenOperation, executor: Executor) -> Self {
        let (cursor, locked_cursor) = (operation.record.cursor, operation.locked_cursor);
        Execution {
            client,
            operation,
            executor,
            cursor,
            has_visited_all: locked_cursor.is_some(),
            locked_cursor,
        }
    }

    /// Visits the next jobs and stores what was done.
    async fn step(&mut self) -> Result<Next> {
        if self.has_visited_all {
            return self.visit_locked().await;
        }
        let visit = match self.find_jobs().await {
            Ok(visit) => visit,
            Err(error) => return self.fail(OperationStep::default(), None, error).await,
        };
        let changes = self.change(&visit.jobs).await;
        let mut step = changes.step();
        step.cursor = changes.last;
        if let Some((job, error)) = changes.failed {
            return self.fail(step, Some(job), error).await;
        }
        let is_complete = changes.last == visit.jobs.last().map(|job| job.id);
        if is_complete {
            step.cursor = visit.next.or(step.cursor);
        }
        self.has_visited_all = is_complete && visit.next.is_none();
        match self.save_and_go_on(&step).await? {
            // The end of the operation is not a step of its own.
            Next::Continue if self.has_visited_all => self.visit_locked().await,
            next => Ok(next),
        }
    }

    /// Visits again the next jobs that it has passed by.
    async fn visit_locked(&mut self) -> Result<Next> {
        let (jobs, is_last) = match self.find_locked().await {
            Ok(found) => found,
            Err(error) => return self.fail(OperationStep::default(), None, error).await,
        };
        let changes = self.change(&jobs).await;
        let mut step = changes.step();
        let locked = std::mem::take(&mut step.locked);
        let visited =
            jobs.iter().map(|job| job.id).take_while(|job| changes.last.is_some_and(|last| *job >= last));
        step.unlocked = visited.filter(|job| !locked.contains(job)).collect();
        self.locked_cursor = changes.last.or(self.locked_cursor);
        if let Some((job, error)) = changes.failed {
            if !is_temporary(&error) {
                step.unlocked.push(job);
                self.locked_cursor = Some(job);
            }
            return self.fail(step, Some(job), error).await;
        }
        let is_complete = changes.last == jobs.last().map(|job| job.id);
        if !(is_last && is_complete) {
            return self.save_and_go_on(&step).await;
        }
        self.locked_cursor = None;
        let state = self.save(&step).await?;
        match self.client.store.locked_jobs(self.operation.record.id, None, 1).await?.first() {
            _ if state != Some(OperationState::Running) => {}
            None => self.end(None).await?,
            Some(job) => {
                let error =
                    format!("job {job}: another client's open transaction has locked it; trying again");
                let take_for = TRY_AGAIN_AFTER;
                self.save(&OperationStep { error: Some(error), take_for, ..OperationStep::default() })
                    .await?;
            }
        }
        Ok(Next::Leave)
    }

    /// The next jobs that it has passed by, and whether they are the last ones.
    async fn find_locked(&self) -> Result<(Vec<Target>, bool)> {
        let id = self.operation.record.id;
        let found = self.client.store.locked_jobs(id, self.locked_cursor, STEP).await?;
        Ok((self.find_again(&found).await?, found.len() < STEP as usize))
    }

    async fn save_and_go_on(&mut self, step: &OperationStep) -> Result<Next> {
        let is_running = self.save(step).await? == Some(OperationState::Running);
        Ok(if is_running { Next::Continue } else { Next::Leave })
    }

    async fn change(&self, jobs: &[Target]) -> Changes {
        self.client.change_jobs(self.operation.record.action, jobs, KeyWait::Skip).await
    }

    /// The next jobs.
    async fn find_jobs(&self) -> Result<Visit> {
        let TakenOperation { record, ids, .. } = &self.operation;
        match (ids, &record.filter) {
            (Some(ids), _) => self.find_listed(ids).await,
            (None, Some(filter)) => self.find_matching(&JobFilter::from_stored(filter)?).await,
            (None, None) => Err(Error::internal(format!("operation {} selects no jobs", record.id))),
        }
    }

    /// The next jobs of a list of ids, which is sorted. Ids without a job count too.
    async fn find_listed(&self, ids: &[JobId]) -> Result<Visit> {
        let visited = ids.partition_point(|id| self.cursor.is_some_and(|cursor| *id >= cursor));
        let part = &ids[visited..ids.len().min(visited + STEP as usize)];
        let next = part.last().copied().filter(|_| visited + part.len() < ids.len());
        Ok(Visit { jobs: self.named(part).await?, next })
    }

    /// These jobs of a list of ids.
    async fn named(&self, part: &[JobId]) -> Result<Vec<Target>> {
        let found = self.client.store.glance(0, part).await?;
        let found: HashMap<JobId, Glance> = found.into_iter().map(|job| (job.id, job)).collect();
        let queues = self.operation.record.queues.as_ref();
        let jobs = part.iter().map(|id| match found.get(id) {
            Some(job)
                if queues.is_none_or(|queues| queues.contains(&job.queue))
                    && self.existed(job.created_at)
                    && self.may_change(job.ended_at) =>
            {
                Target::named(*id, &job.queue)
            }
            _ => Target::skipped(*id),
        });
        Ok(jobs.collect())
    }

    /// The next jobs that match a filter and existed when the operation was started.
    async fn find_matching(&self, filter: &JobFilter) -> Result<Visit> {
        let page = self.client.store.list(&filter.page(self.cursor, STEP)).await?;
        let jobs = page.jobs.iter().filter(|job| self.existed(job.created_at));
        let jobs = jobs.map(|job| self.matching(filter, job)).collect();
        Ok(Visit { jobs, next: page.next })
    }

    /// A job that matches a filter.
    fn matching(&self, filter: &JobFilter, job: &JobRecord) -> Target {
        match self.may_change(job.finished_at) {
            true => Target::listed(job, &also_in(self.operation.record.action, &filter.statuses)),
            false => Target::skipped(job.id),
        }
    }

    /// Jobs that were found before. Those that do not match the filter any more are skipped.
    async fn find_again(&self, ids: &[JobId]) -> Result<Vec<Target>> {
        let Some(filter) = &self.operation.record.filter else { return self.named(ids).await };
        let filter = JobFilter::from_stored(filter)?;
        let list = filter.page(None, 1);
        let mut jobs = Vec::with_capacity(ids.len());
        for id in ids {
            let found = self.client.store.get(*id).await?.filter(|job| list.selects(job));
            jobs.push(found.map_or(Target::skipped(*id), |job| self.matching(&filter, &job)));
        }
        Ok(jobs)
    }

    /// Whether a job existed when the operation was started.
    fn existed(&self, created_at: DateTime<Utc>) -> bool {
        created_at <= self.operation.record.created_at
    }

    /// Whether the operation may change a job that ended then. A job that has ended since the operation was
    /// started may be one that an earlier visit has retried, so it is not retried again.
    fn may_change(&self, ended_at: Option<DateTime<Utc>>) -> bool {
        let TakenOperation { record, .. } = &self.operation;
        record.action != Action::Retry || ended_at.is_none_or(|at| at <= record.created_at)
    }

    /// Stores a step that could not be completed. A temporary error is tried again later. Another error ends
    /// the operation behind the job, so that it can be resumed with the next one.
    async fn fail(&mut self, mut step: OperationStep, job: Option<JobId>, error: Error) -> Result<Next> {
        if let Some(job) = job.filter(|_| !is_temporary(&error)) {
            step.cursor = Some(job).filter(|_| !self.has_visited_all);
            step.examined += 1;
            step.skipped += 1;
        }
        let at = job.map_or_else(String::new, |job| format!("job {job}: "));
        let operation_id = self.operation.record.id;
        if is_temporary(&error) {
            tracing::warn!(%operation_id, %error, "an operation could not continue; trying again");
            let reason =
                if error.is_locked() { error.to_string() } else { "the database was not available".into() };
            step.error = Some(format!("{at}{reason}; trying again"));
            step.take_for = TRY_AGAIN_AFTER;
            self.save(&step).await?;
            return Ok(Next::Leave);
        }
        tracing::error!(%operation_id, %error, "an operation failed");
        step.take_for = TAKE_FOR;
        let reason = match error.is_invalid() {
            true => error.to_string(),
            false => format!(
                "{at}an internal error; the log of the process that executed the operation has the reason; resume \
                 the operation to continue"
            ),
        };
        if self.save(&step).await? == Some(OperationState::Running) {
            self.end(Some(&reason)).await?;
        }
        Ok(Next::Leave)
    }

    /// Lets this or another process continue at once, after the operations that have waited longer.
    async fn release(mut self) -> Result<()> {
        self.save(&OperationStep::default()).await.map(drop)
    }

    /// Adds the numbers of a step to those of the operation, and stores them.
    async fn save(&mut self, step: &OperationStep) -> Result<Option<OperationState>> {
        let record = &mut self.operation.record;
        record.examined += step.examined;
        record.changed += step.changed;
        record.skipped += step.skipped;
        let totals = OperationStep {
            examined: record.examined,
            changed: record.changed,
            skipped: record.skipped,
            locked_cursor: self.locked_cursor,
            ..step.clone()
        };
        let operation_id = record.id;
        let state = self.client.store.save_operation_step(operation_id, self.executor, &totals).await?;
        if state.is_none() {
            tracing::warn!(%operation_id, "another process has taken the operation; leaving it to that one");
        }
        self.cursor = step.cursor.or(self.cursor);
        Ok(state)
    }

    async fn end(&self, error: Option<&str>) -> Result<()> {
        self.client.store.end_operation(self.operation.record.id, self.executor, error).await.map(drop)
    }
}

/// Whether the same change may succeed later.
fn is_temporary(error: &Error) -> bool {
    error.is_unavailable() || error.is_read_only()
}

// ---- changing several jobs -------------------------------------------------

/// A job to change.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    id: JobId,
    /// Its queue; `None` if it is only counted as skipped.
    queue: Option<String>,
    /// What was known about it when it was listed.
    seen: Option<Seen>,
}

/// What was known about a job when it was listed.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// Its lease number. A job with another one has run since then.
    pub(super) lease_no: i32,
    /// The statuses in which it is changed although it has run since then.
    pub(super) also_in: Arc<[Status]>,
}

impl Seen {
    /// Whether a job that now has this lease number and status may be changed.
    pub(super) fn allows(&self, lease_no: i32, status: Status) -> bool {
        self.lease_no == lease_no || self.also_in.contains(&status)
    }
}

/// The statuses in which a job that has run since it was listed is changed. A cancel or a delete applies as long as
/// the job matches the filter: a worker may have claimed it in the meantime. A retry does not: the job may be one
/// that this operation has retried already.
pub(crate) fn also_in(action: Action, statuses: &[Status]) -> Arc<[Status]> {
    match action {
        Action::Retry => [].into(),
        Action::Cancel | Action::Delete if statuses.is_empty() => Status::ALL.into(),
        Action::Cancel | Action::Delete => statuses.into(),
    }
}

impl Target {
    /// A job that was named by its id.
    fn named(id: JobId, queue: &str) -> Self {
        Target { id, queue: Some(queue.to_owned()), seen: None }
    }

    /// A job that was listed because it matched a filter.
    pub(crate) fn listed(job: &JobRecord, also_in: &Arc<[Status]>) -> Self {
        let seen = Seen { lease_no: job.lease_no, also_in: also_in.clone() };
        Target { id: job.id, queue: Some(job.queue.clone()), seen: Some(seen) }
    }

    fn skipped(id: JobId) -> Self {
        Target { id, queue: None, seen: None }
    }
}

/// The result of changing several jobs in their order.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// How many were changed.
    pub(crate) changed: u64,
    /// How many could not be changed, because of their state or because they no longer exist.
    pub(crate) skipped: u64,
    /// Those that another transaction has locked.
    pub(crate) locked: Vec<JobId>,
    /// The last one that counts or is locked; `None` if there is none. Those after it were not visited, or have to be
    /// visited again.
    pub(crate) last: Option<JobId>,
    /// The job after that, if it caused an error.
    pub(crate) failed: Option<(JobId, Error)>,
}

impl Client {
    /// Changes jobs, several at a time, and notifies workers. Stops after an error, and after some seconds.
    /// `wait` is how long each change waits for a lock of another transaction. If that is too short, the job
    /// counts as an error or, with [`KeyWait::Skip`], as locked.
    pub(crate) async fn change_jobs(&self, action: Action, jobs: &[Target], wait: KeyWait) -> Changes {
        let began = Instant::now();
        let mut results: Vec<Visited> = jobs.iter().map(|_| Visited::No).collect();
        let (mut next, mut must_stop) = (0, false);
        let mut running = JoinSet::new();
        loop {
            while !must_stop && next < jobs.len() && running.len() < CONCURRENT_CHANGES {
                let (client, nth, id, seen) = (self.clone(), next, jobs[next].id, jobs[next].seen.clone());
                next += 1;
                if jobs[nth].queue.is_none() {
                    results[nth] = Visited::Skipped;
                    continue;
                }
                results[nth] = Visited::Failed(Error::internal("the change of the job ended early"));
                running.spawn(async move {
                    (nth, client.command_on(id, seen.as_ref(), &action.command(), wait).await)
                });
            }
            let Some(ended) = running.join_next().await else { break };
            if let Ok((nth, result)) = ended {
                results[nth] = Visited::of(result.map(drop), wait);
                must_stop |= matches!(results[nth], Visited::Failed(_)) || began.elapsed() > MAX_STEP_TIME;
            }
        }
        if action == Action::Retry {
            let changed = jobs.iter().zip(&results).filter(|(_, result)| matches!(result, Visited::Changed));
            let queues = changed.filter_map(|(job, _)| job.queue.as_deref());
            self.notifier.notify(queues.map(|queue| (queue, When::NOW)));
        }
        Changes::of(jobs, results)
    }
}

/// What became of a job that was to be changed.
enum Visited {
    No,
    Changed,
    /// Its state does not allow the change, or it no longer exists.
    Skipped,
    /// Another transaction has locked it.
    Locked,
    /// An error that is about more than the job's state.
    Failed(Error),
}

impl Visited {
    fn of(result: Result<()>, wait: KeyWait) -> Self {
        match result {
            Ok(()) => Visited::Changed,
            Err(error) if error.is_conflict() || error.is_not_found() => Visited::Skipped,
            Err(error) if error.is_locked() && wait == KeyWait::Skip => Visited::Locked,
            Err(error) => Visited::Failed(error),
        }
    }
}

impl Changes {
    /// Counts the results up to the first error or the first job that was not visited.
    fn of(jobs: &[Target], results: Vec<Visited>) -> Self {
        let mut changes = Changes::default();
        for (job, result) in jobs.iter().zip(results) {
            match result {
                Visited::Changed => changes.changed += 1,
                Visited::Skipped => changes.skipped += 1,
                Visited::No => break,
                Visited::Locked => changes.locked.push(job.id),
                Visited::Failed(error) => {
                    changes.failed = Some((job.id, error));
                    break;
                }
            }
            changes.last = Some(job.id);
        }
        changes
    }

    /// What they add to the numbers of an operation.
    fn step(&self) -> OperationStep {
        OperationStep {
            examined: self.changed + self.skipped,
            changed: self.changed,
            skipped: self.skipped,
            locked: self.locked.clone(),
            take_for: TAKE_FOR,
            ..OperationStep::default()
        }
    }
}

impl Action {
    fn command(self) -> Command {
        match self {
            Action::Cancel => Command::Cancel,
            Action::Retry => Command::Retry,
            Action::Delete => Command::Delete,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_has_run_since_it_was_listed_is_changed_only_if_it_still_matches() {
        let may = |action, statuses: &[Status], status| {
            let seen = Seen { lease_no: 3, also_in: also_in(action, statuses) };
            assert!(seen.allows(3, status), "it has not run");
            seen.allows(4, status)
        };
        for action in [Action::Cancel, Action::Delete] {
            assert!(may(action, &[], Status::Running));
            assert!(may(action, &[Status::Queued, Status::Running], Status::Running));
            assert!(!may(action, &[Status::Queued], Status::Running));
        }
        for status in Status::ALL {
            assert!(!may(Action::Retry, &[], status), "it may have been retried already");
        }
    }

    #[test]
    fn only_jobs_before_the_first_error_count() {
        let jobs: Vec<Target> =
            [9, 8, 7, 6].map(|n| Target::named(JobId(Uuid::from_u128(n)), "mail")).to_vec();
        let of = |results| {
            let Changes { changed, skipped, last, failed, .. } = Changes::of(&jobs, results);
            (changed, skipped, last.map(|id| id.0.as_u128()), failed.map(|(id, _)| id.0.as_u128()))
        };
        use Visited::*;
        let error = || Failed(Error::unavailable("the database is restarting"));
        assert_eq!(of(vec![Changed, Skipped, Changed, Changed]), (3, 1, Some(6), None));
        assert_eq!(of(vec![Changed, Skipped, error(), Changed]), (1, 1, Some(8), Some(7)));
        assert_eq!(of(vec![Changed, No, No, No]), (1, 0, Some(9), None));
        assert_eq!(of(vec![error(), No, No, No]), (0, 0, None, Some(9)));
        assert_eq!(of(vec![Changed, Locked, Changed, Locked]), (2, 0, Some(6), None));
        assert_eq!(of(vec![Locked, Locked, error(), Changed]), (0, 0, Some(8), Some(7)));
    }
}
