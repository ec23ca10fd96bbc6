//! Operators' commands on jobs and queues.
//!
//! A job may change while a command runs. So a command reads the job's state, lets
//! [`lifecycle`] decide, and stores the decision only if the state is still the same;
//! otherwise it starts over.

use serde::Serialize;

use super::Client;
use super::operations::Seen;
use crate::error::{Error, Result};
use crate::job::JobId;
use crate::rules::enqueue::{Edit, ValidEdit, check_name, check_queue};
use crate::rules::lifecycle::{self, Cancel, Retry, State, When};
use crate::rules::turns::Rate;
use crate::store::{
    DeadFilter, FoundGroup, GroupChange, GroupRecord, KeyWait, Operated, Operation, PlaceInLine, QueueChange,
};

/// How often a command starts over before it gives up.
const MAX_ROUNDS: usize = 5;

/// The result of a cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// The job was waiting and is cancelled.
    Now,
    /// The job is running; a stop is requested.
    Pending,
}

/// The result of one step of a redrive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Redriven {
    /// Number of jobs that wait again.
    pub redriven: u64,
    /// Number of jobs that were skipped.
    pub skipped: u64,
    /// Where the next step starts; `None` at the end.
    pub next: Option<JobId>,
}

impl Client {
    // ---- jobs ------------------------------------------------------------

    /// Cancels a waiting job at once, or requests that a running job stop and notifies its
    /// worker. Returns a conflict error if the job has ended, whose
    /// [status](Error::status) says how, and a not-found error if it does not exist.
    pub async fn cancel(&self, id: JobId) -> Result<Cancelled> {
        match self.command(id, &Command::Cancel).await? {
            Operation::RequestCancel => Ok(Cancelled::Pending),
            _ => Ok(Cancelled::Now),
        }
    }

    /// Runs a finished job again with a fresh attempt budget, or makes a waiting job due
    /// now. Returns a conflict error if the job is running.
    pub async fn retry(&self, id: JobId) -> Result<()> {
        self.command(id, &Command::Retry).await?;
        self.notify_queues_of(&[id]).await;
        Ok(())
    }

    /// As [`retry`](Client::retry), with changes: no attempt starts between the retry and the changes.
    ///
    /// ```
    /// # use longshore::{Client, Edit, NewJob};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// let job = client.enqueue(NewJob::new("greet", "Ada")).await?;
    /// client.cancel(job.id).await?;
    /// client.retry_with(job.id, Edit::default().payload(r#""Grace""#)).await?;
    /// assert_eq!(client.get(job.id).await?.payload.get(), r#""Grace""#);
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn retry_with(&self, id: JobId, edit: Edit) -> Result<()> {
        let edit = self.checked(id, edit).await?;
        self.command(id, &Command::RetryWith(edit)).await?;
        self.notify_queues_of(&[id]).await;
        Ok(())
    }

    /// Changes a waiting job. A concurrent claim gets either the old or the new version,
    /// never a mixture.
    pub async fn edit(&self, id: JobId, edit: Edit) -> Result<()> {
        let edit = self.checked(id, edit).await?;
        // A higher priority or an earlier time may let the job start now.
        self.command(id, &Command::Edit(edit)).await?;
        self.notify_queues_of(&[id]).await;
        Ok(())
    }

    /// Checks an edit, and its payload against the schema of the job's kind.
    async fn checked(&self, id: JobId, edit: Edit) -> Result<ValidEdit> {
        let edit = edit.validate()?;
        if let Some(payload) = &edit.payload {
            for job in self.store.glance(0, &[id]).await? {
                self.check_job(&job.kind, Some(&job.queue), payload).await?;
            }
        }
        Ok(edit)
    }

    /// Deletes a finished job and its history.
    pub async fn delete(&self, id: JobId) -> Result<()> {
        self.command(id, &Command::Delete).await.map(|_| ())
    }

    /// Runs a dead letter again with a fresh attempt budget.
    pub async fn redrive(&self, id: JobId) -> Result<()> {
        self.command(id, &Command::Redrive).await?;
        self.notify_queues_of(&[id]).await;
        Ok(())
    }

    /// Redrives up to `filter.limit` dead letters, oldest first. Returns how many. Skips
    /// jobs whose unique key now belongs to another job, and jobs that another operator
    /// redrives at the same time.
    pub async fn redrive_all(&self, filter: &DeadFilter) -> Result<u64> {
        const STEP: u32 = 500;
        let (mut redriven, mut left) = (0, filter.limit);
        let mut page = filter.clone();
        while left > 0 {
            page.limit = left.min(STEP);
            left -= page.limit;
            let step = self.redrive_some(&page).await?;
            redriven += step.redriven;
            if step.next.is_none() {
                break;
            }
            page.after = step.next;
        }
        Ok(redriven)
    }

    /// As [`redrive_all`](Client::redrive_all), but one step at a time, for callers that
    /// show progress.
    ///
    /// ```
    /// # use longshore::{Client, store::DeadFilter};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// let mut filter = DeadFilter { limit: 100, ..DeadFilter::default() };
    /// loop {
    ///     let step = client.redrive_some(&filter).await?;
    ///     println!("{} wait again", step.redriven);
    ///     let Some(next) = step.next else { break };
    ///     filter.after = Some(next);
    /// }
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn redrive_some(&self, filter: &DeadFilter) -> Result<Redriven> {
        let ids = self.store.dead_letters(filter).await?;
        let (mut step, mut redriven, mut failed) = (Redriven::default(), Vec::new(), None);
        for id in &ids {
            match self.command(*id, &Command::Redrive).await {
                Ok(_) => redriven.push(*id),
                Err(error) if error.is_conflict() || error.is_not_found() => step.skipped += 1,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        self.notify_queues_of(&redriven).await;
        if let Some(error) = failed {
            return Err(error);
        }
        step.redriven = redriven.len() as u64;
        step.next = ids.last().copied().filter(|_| ids.len() as u64 >= u64::from(filter.limit));
        Ok(step)
    }

    /// Carries out a command on a job that may change at any time.
    pub(super) async fn command(&self, id: JobId, command: &Command) -> Result<Operation> {
        self.command_on(id, None, command, KeyWait::Long).await
    }

    /// As [`command`](Self::command), but refuses a job that has run since it was seen and no longer matches.
    pub(super) async fn command_on(
        &self,
        id: JobId,
        seen: Option<&Seen>,
        command: &Command,
        wait: KeyWait,
    ) -> Result<Operation> {
        for _ in 0..MAX_ROUNDS {
            let Some(state) = self.store.locate(id).await? else {
                return Err(Error::not_found(format!("job {id} does not exist, or is no longer kept")));
            };
            if seen.is_some_and(|seen| !seen.allows(state.lease_no(), state.status())) {
                let message = format!("job {id} has run since it was listed; list it again");
                return Err(Error::conflict(message).with_status(state.status()));
            }
            let operation = command.decide(&state).map_err(|refusal| refusal.into_error(id, &state))?;
            match self.store.operate(id, &state, &operation, wait).await? {
                Operated::Done => {
                    if let (State::Running(running), Operation::RequestCancel) = (&state, &operation) {
                        self.notifier.notify_cancel(running.worker);
                    }
                    if matches!(
                        operation,
                        Operation::Cancel { .. }
                            | Operation::Rewrite(_)
                            | Operation::Reopen
                            | Operation::ReopenWith(_)
                    ) {
                        // The job may be a member of a flow, which others skipped while this locked the job.
                        self.advance_soon();
                    }
                    return Ok(operation);
                }
                Operated::Moved => {}
                Operated::KeyTaken(holder) => {
                    return Err(Error::conflict(format!(
                        "job {id}: its unique key belongs to job {holder}; cancel that job, or wait for it to end"
                    ))
                    .with_status(state.status())
                    .because_of(holder));
                }
            }
        }
        Err(Error::unavailable(format!("job {id} kept changing its state; try again")))
    }

    /// Notifies workers of jobs that an operation may have made due.
    async fn notify_queues_of(&self, ids: &[JobId]) {
        if ids.is_empty() {
            return;
        }
        match self.store.glance(0, ids).await {
            Ok(jobs) => self.notifier.notify(jobs.iter().map(|job| (job.queue.as_str(), When::NOW))),
            Err(error) => tracing::debug!(%error, "could not notify workers; polling finds the jobs"),
        }
    }

    // ---- queues ----------------------------------------------------------

    /// Pauses a queue: workers claim none of its jobs. Running jobs continue.
    pub async fn pause(&self, queue: &str) -> Result<()> {
        self.set_queue(queue, QueueChange { paused: Some(true), ..QueueChange::default() }).await
    }

    /// Resumes a paused queue.
    pub async fn resume(&self, queue: &str) -> Result<()> {
        self.set_queue(queue, QueueChange { paused: Some(false), ..QueueChange::default() }).await?;
        self.notifier.notify([(queue, When::NOW)]);
        Ok(())
    }

    /// Limits how many jobs of a queue run at once, in all processes together. 1 makes the
    /// queue serial; `None` removes the limit.
    pub async fn limit(&self, queue: &str, limit: Option<u32>) -> Result<()> {
        if limit.is_some_and(|limit| i32::try_from(limit).is_err()) {
            return Err(Error::invalid(
                "limit",
                format!(
                    "queue `{queue}`: limit must be at most {}; remove the limit to let any number run",
                    i32::MAX
                ),
            ));
        }
        if limit == Some(0) {
            return Err(Error::invalid(
                "limit",
                format!("queue `{queue}`: limit must be at least 1; pause the queue to stop it"),
            ));
        }
        self.set_queue(queue, QueueChange { limit: Some(limit), ..QueueChange::default() }).await?;
        // A raised limit lets waiting jobs start.
        self.notifier.notify([(queue, When::NOW)]);
        Ok(())
    }

    /// Limits how often jobs of a queue start, in all processes together; `None` removes the rate.
    pub async fn rate(&self, queue: &str, rate: Option<Rate>) -> Result<()> {
        let rate = rate.map(|rate| rate.check("rate")).transpose()?;
        self.set_queue(queue, QueueChange { rate: Some(rate), ..QueueChange::default() }).await?;
        self.notifier.notify([(queue, When::NOW)]);
        Ok(())
    }

    async fn set_queue(&self, queue: &str, change: QueueChange) -> Result<()> {
        check_queue("queue", queue)?;
        self.store.set_queue(queue, &change).await
    }

    // ---- groups ----------------------------------------------------------

    /// Sets the limit and the rate of each group of a queue that has none of its own; `None` leaves
    /// the groups unlimited.
    ///
    /// ```
    /// # use longshore::{Client, Rate};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// // No customer runs more than 5 jobs at once or starts more than 100 per second.
    /// client.group_defaults("mail", Some(5), Some(Rate::per_second(100).burst(10))).await?;
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn group_defaults(&self, queue: &str, limit: Option<u32>, rate: Option<Rate>) -> Result<()> {
        self.change_group_defaults(queue, Some(limit), Some(rate)).await
    }

    /// The same; an outer `None` keeps what is set.
    pub(crate) async fn change_group_defaults(
        &self,
        queue: &str,
        limit: Option<Option<u32>>,
        rate: Option<Option<Rate>>,
    ) -> Result<()> {
        let change = QueueChange {
            group_limit: limit.map(check_group_limit).transpose()?,
            group_rate: rate.map(|rate| rate.map(|rate| rate.check("rate")).transpose()).transpose()?,
            ..QueueChange::default()
        };
        self.set_queue(queue, change).await?;
        self.notifier.notify([(queue, When::NOW)]);
        Ok(())
    }

    /// Changes the settings of a group: pauses or resumes it, or sets its limit and rate.
    /// They take effect while workers run.
    pub async fn set_group(&self, queue: &str, group: &str, change: GroupChange) -> Result<()> {
        check_queue("queue", queue)?;
        check_name("group", group)?;
        let limit = change.limit.map(check_group_limit).transpose()?;
        let rate = change.rate.map(|rate| rate.map(|rate| rate.check("rate")).transpose()).transpose()?;
        self.store.set_group(queue, group, &GroupChange { limit, rate, ..change }).await?;
        self.notifier.notify([(queue, When::NOW)]);
        Ok(())
    }

    /// Lists up to `limit` groups of a queue that have settings, waiting jobs or running jobs, ordered
    /// by name, after the name `after` (empty: from the first).
    pub async fn groups(&self, queue: &str, after: &str, limit: u32) -> Result<Vec<GroupRecord>> {
        check_queue("queue", queue)?;
        self.store.groups(queue, after, limit.min(MAX_GROUP_PAGE)).await
    }

    /// Returns a group; `None` if it has neither settings nor live jobs.
    pub async fn group(&self, queue: &str, group: &str) -> Result<Option<GroupRecord>> {
        check_queue("queue", queue)?;
        check_name("group", group)?;
        self.store.group(queue, group).await
    }

    /// Finds up to `limit` groups whose names contain the text, in these queues (`None`: in all), first
    /// the one with exactly this name, then shorter names. The case of ASCII letters does not matter. If
    /// very many groups have waiting jobs, only the first 2,000 of them are searched, and the one with
    /// exactly this name.
    pub async fn find_groups(
        &self,
        text: &str,
        queues: Option<&[String]>,
        limit: u32,
    ) -> Result<Vec<FoundGroup>> {
        self.store.find_groups(text, queues, limit.min(MAX_GROUP_PAGE)).await
    }

    /// Returns the place of a group among those whose turn it is at this priority; `None` if it is
    /// not its turn.
    pub async fn place_in_line(
        &self,
        queue: &str,
        group: &str,
        priority: i16,
    ) -> Result<Option<PlaceInLine>> {
        self.store.place_in_line(queue, group, priority).await
    }
}

/// The maximum number of groups per page.
const MAX_GROUP_PAGE: u32 = 1000;

fn check_group_limit(limit: Option<u32>) -> Result<Option<u32>> {
    match limit {
        Some(limit) if limit == 0 || i32::try_from(limit).is_err() => Err(Error::invalid(
            "limit",
            format!("limit: {limit} is out of range; use 1 to {}, or pause the group to stop it", i32::MAX),
        )),
        limit => Ok(limit),
    }
}

/// An operator's command.
pub(super) enum Command {
    Cancel,
    Retry,
    RetryWith(ValidEdit),
    Redrive,
    Edit(ValidEdit),
    Delete,
}

impl Command {
    fn decide(&self, state: &State) -> Result<Operation, lifecycle::Refusal> {
        Ok(match self {
            Command::Cancel => match lifecycle::cancel(state)? {
                Cancel::Finish(finish) => Operation::Cancel { attempts: finish.attempts },
                Cancel::Request => Operation::RequestCancel,
            },
            Command::Retry => match lifecycle::retry(state)? {
                Retry::Reopen => Operation::Reopen,
                Retry::RunNow => Operation::RunNow,
            },
            Command::RetryWith(edit) => match lifecycle::retry(state)? {
                Retry::Reopen => Operation::ReopenWith(edit.clone()),
                Retry::RunNow => {
                    Operation::Rewrite(ValidEdit { when: edit.when.or(Some(When::NOW)), ..edit.clone() })
                }
            },
            Command::Redrive => lifecycle::redrive(state).map(|()| Operation::Reopen)?,
            Command::Edit(edit) => lifecycle::edit(state).map(|()| Operation::Rewrite(edit.clone()))?,
            Command::Delete => lifecycle::delete(state).map(|()| Operation::Remove)?,
        })
    }
}
