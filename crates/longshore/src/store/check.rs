//! The result of the consistency check, which problems have one safe repair, and whether
//! commits are durable.

use serde::Serialize;

use crate::job::{JobId, Outcome};

/// The result of [`Store::check`](super::Store::check).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CheckReport {
    /// The number of jobs checked.
    pub jobs: u64,
    /// The problems found, one sentence each, at most a hundred of each type. Empty
    /// if the tables are consistent.
    pub problems: Vec<String>,
}

/// Whether stored jobs survive a crash of the database server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Durability {
    /// Settings of the server with which a crash may lose stored jobs, one sentence each.
    pub risks: Vec<String>,
    /// Settings that are safe only on some file systems, one sentence each.
    pub warnings: Vec<String>,
    /// Whether the database URL accepts the risks: `?durability=relaxed`.
    pub accepted: bool,
}

/// A repair that loses no work and runs no job twice. Problems that could be repaired in
/// more than one way are only reported, by [`Store::check`](super::Store::check).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "repair", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Repair {
    /// The job waits and runs: the waiting row is deleted, and the lease stays. Only if the
    /// lease is not older than the waiting row.
    KeepLease {
        /// The job.
        job: JobId,
    },
    /// The job waits and has finished: the waiting row is deleted, and the outcome stays. Only
    /// if the outcome is not older than the waiting row. An operator can retry the job.
    KeepOutcome {
        /// The job.
        job: JobId,
    },
    /// The row has no request, so that nothing can run or show it: the row is deleted, with
    /// the job's history, checkpoint and merged requests. A running row is deleted only if its
    /// worker is not alive.
    DropWithoutRequest {
        /// The job.
        job: JobId,
        /// The table that holds the row.
        table: StateTable,
    },
    /// The key belongs to a job that is not live or has another key: the key is freed.
    FreeKey {
        /// The unique key.
        key: String,
        /// The job that owned it.
        job: JobId,
    },
    /// Steps or waits are left of a job that is in no table: they are deleted.
    DropJournal {
        /// The job.
        job: JobId,
    },
    /// The event counts as delivered, but jobs still wait for it: it is delivered again.
    Redeliver {
        /// The name of the event.
        event: String,
    },
    /// The group has waiting jobs of this priority but no turn, so nothing would claim them: it gets
    /// a turn.
    AddTurn {
        /// The queue.
        queue: String,
        /// The group.
        group: String,
        /// The priority of the jobs.
        priority: i16,
    },
    /// The tallies do not match the finished jobs: they are corrected.
    CorrectTally {
        /// The queue.
        queue: String,
        /// The kind.
        kind: String,
        /// The outcome.
        outcome: Outcome,
        /// The number of jobs according to the tallies.
        tallied: i64,
        /// The number of jobs in `finished`.
        found: i64,
    },
}

/// The tables that hold a job's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StateTable {
    /// Waiting jobs.
    Ready,
    /// Live leases.
    Running,
    /// Outcomes.
    Finished,
}

impl StateTable {
    /// The name of the table.
    pub fn as_str(self) -> &'static str {
        match self {
            StateTable::Ready => "ready",
            StateTable::Running => "running",
            StateTable::Finished => "finished",
        }
    }
}

impl std::fmt::Display for Repair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Repair::KeepLease { job } => {
                write!(f, "remove job {job} from ready, because it is running")
            }
            Repair::KeepOutcome { job } => {
                write!(f, "remove job {job} from ready, because it has finished")
            }
            Repair::DropWithoutRequest { job, table } => {
                write!(f, "remove job {job} from {}, because it has no row in jobs", table.as_str())
            }
            Repair::FreeKey { key, job } => {
                write!(
                    f,
                    "free the unique key `{key}`, because its owner, job {job}, is not live or has another key"
                )
            }
            Repair::DropJournal { job } => {
                write!(f, "remove the steps and waits of job {job}, because there is no such job")
            }
            Repair::AddTurn { queue, group, priority } => write!(
                f,
                "add a turn for group `{group}` of queue `{queue}`, because its waiting jobs of priority {priority} have none"
            ),
            Repair::Redeliver { event } => {
                write!(f, "deliver event `{event}` again, because jobs still wait for it")
            }
            Repair::CorrectTally { queue, kind, outcome, tallied, found } => write!(
                f,
                "correct the tallies of {} jobs of kind `{kind}` in queue `{queue}` from {tallied} to {found}",
                outcome.as_str()
            ),
        }
    }
}
