//! What operators want of jobs and queues.
//!
//! A moving job is chased: an operation looks where the job stands, asks
//! [`lifecycle`] what follows, and stores that only if the
//! job still stands there; otherwise it looks again.

use serde::Serialize;

use super::Client;
use crate::enqueue::{Edit, ValidEdit, check_name};
use crate::error::{Error, Result};
use crate::job::JobId;
use crate::lifecycle::{self, Event, State, Transition, When};
use crate::store::{DeadFilter, Operated, Operation, QueueChange, Retained, Retention};

/// How often a moving job is looked for again before giving up.
const ROUNDS: usize = 5;

/// What a cancel did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// The job waited and is cancelled.
    Now,
    /// The job runs; its handler has been told.
    Pending,
}

/// What a step of a redrive did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Redriven {
    /// How many wait again.
    pub redriven: u64,
    /// How many were passed over.
    pub skipped: u64,
    /// Where the next step begins; `None` at the end.
    pub next: Option<JobId>,
}

impl Client {
    // ---- jobs ------------------------------------------------------------

    /// Cancels a waiting job at once and tells a running one to stop. A job
    /// that has ended is a conflict, an unknown one is not found.
    pub async fn cancel(&self, id: JobId) -> Result<Cancelled> {
        match self.chase(id, &Command::Cancel).await? {
            Operation::RequestCancel => Ok(Cancelled::Pending),
            _ => Ok(Cancelled::Now),
        }
    }

    /// Lets a finished job run again with a fresh budget, and a waiting one
    /// run now. A running job is a conflict.
    pub async fn retry(&self, id: JobId) -> Result<()> {
        self.chase(id, &Command::Retry).await?;
        self.notify_queues_of(&[id]).await;
        Ok(())
    }

    /// Changes a waiting job: a claim gets the old job whole or the new one.
    pub async fn edit(&self, id: JobId, edit: Edit) -> Result<()> {
        let edit = edit.validate()?;
        if let Some(payload) = &edit.payload {
            for job in self.store.glance(0, &[id]).await? {
                self.check_job(&job.kind, payload).await?;
            }
        }
        // A higher priority or an earlier time may let the job start now.
        self.chase(id, &Command::Edit(edit)).await?;
        self.notify_queues_of(&[id]).await;
        Ok(())
    }

    /// Removes a finished job and its history.
    pub async fn delete(&self, id: JobId) -> Result<()> {
        self.chase(id, &Command::Delete).await.map(|_| ())
    }

    /// Lets a dead letter run again with a fresh budget.
    pub async fn redrive(&self, id: JobId) -> Result<()> {
        self.chase(id, &Command::Redrive).await?;
        self.notify_queues_of(&[id]).await;
        Ok(())
    }

    /// Redrives up to `filter.limit` dead letters, oldest first; how many. Ones
    /// whose unique key meanwhile belongs to another job, or that somebody else
    /// redrives, are passed over.
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

    /// As [`redrive_all`](Client::redrive_all), in one step that says where the
    /// next begins: for who wants to tell how far it is.
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
            match self.chase(*id, &Command::Redrive).await {
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

    async fn chase(&self, id: JobId, command: &Command) -> Result<Operation> {
        for _ in 0..ROUNDS {
            let Some(state) = self.store.locate(id).await? else {
                return Err(Error::not_found(format!("job {id} does not exist, or is no longer kept")));
            };
            let operation = command.follow(&state).map_err(|refusal| refusal.into_error(id))?;
            match self.store.operate(id, &state, &operation).await? {
                Operated::Done => return Ok(operation),
                Operated::Moved => {}
                Operated::KeyTaken(holder) => {
                    return Err(Error::conflict(format!(
                        "job {id}: its unique key belongs to live job {holder}; cancel that, or wait for it to end"
                    )));
                }
            }
        }
        Err(Error::unavailable(format!("job {id} kept moving; try again")))
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

    /// Stops claims from a queue; running jobs go on.
    pub async fn pause(&self, queue: &str) -> Result<()> {
        self.set_queue(queue, QueueChange { paused: Some(true), ..QueueChange::default() }).await
    }

    /// Lets claims from a queue go on.
    pub async fn resume(&self, queue: &str) -> Result<()> {
        self.set_queue(queue, QueueChange { paused: Some(false), ..QueueChange::default() }).await?;
        self.notifier.notify([(queue, When::NOW)]);
        Ok(())
    }

    /// Lets at most `limit` jobs of a queue run at once, in all processes
    /// together; 1 makes it serial, `None` lifts the limit.
    pub async fn limit(&self, queue: &str, limit: Option<u32>) -> Result<()> {
        if limit.is_some_and(|limit| i32::try_from(limit).is_err()) {
            return Err(Error::invalid(
                "limit",
                format!("queue `{queue}`: limit must be at most {}; lift it to let any number run", i32::MAX),
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

    async fn set_queue(&self, queue: &str, change: QueueChange) -> Result<()> {
        check_name("queue", queue)?;
        self.store.set_queue(queue, &change).await
    }
}

/// What upkeep runs in bounded steps.
#[doc(hidden)]
impl Client {
    /// Removes finished jobs whose retention time has passed; examines up to `step`
    /// rows.
    pub async fn retain(&self, policy: &Retention, step: u32) -> Result<Retained> {
        self.store.retain(policy, step).await
    }

    /// Adds up old tallies, up to `step` rows, so that counting stays fast.
    pub async fn fold_tallies(&self, step: u32) -> Result<u64> {
        self.store.fold_tallies(step).await
    }
}

/// What an operator wants of a job.
enum Command {
    Cancel,
    Retry,
    Redrive,
    Edit(ValidEdit),
    Delete,
}

impl Command {
    fn event(&self) -> Event {
        match self {
            Command::Cancel => Event::Cancel,
            Command::Retry => Event::Retry,
            Command::Redrive => Event::Redrive,
            Command::Edit(_) => Event::Edit,
            Command::Delete => Event::Delete,
        }
    }

    fn follow(&self, state: &State) -> Result<Operation, lifecycle::Refusal> {
        Ok(match (lifecycle::next(state, self.event())?, self) {
            (Transition::Finish(finish), _) => Operation::Cancel { attempts: finish.attempts },
            (Transition::RequestCancel, _) => Operation::RequestCancel,
            (Transition::Reopen, _) => Operation::Reopen,
            (Transition::RunNow, _) => Operation::RunNow,
            (Transition::Rewrite, Command::Edit(edit)) => Operation::Rewrite(edit.clone()),
            (Transition::Remove, _) => Operation::Remove,
            (Transition::Rewrite | Transition::Lease { .. } | Transition::Requeue(_), _) => {
                unreachable!("no operator's command leads there")
            }
        })
    }
}
