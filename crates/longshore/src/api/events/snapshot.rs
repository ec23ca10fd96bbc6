//! Snapshots of the queue, and the differences between two of them. Workers and other
//! servers also change jobs, so changes are found by querying the database. Each
//! snapshot reads a bounded number of jobs.

use std::collections::BTreeMap;

use super::ring::{Event, RemovedJob, WorkerChange, WorkerState};
use crate::client::Client;
use crate::error::Result;
use crate::job::{JobId, Status, WorkerId};
use crate::store::{Glance, QueueRecord};

/// How many of the newest jobs a snapshot covers, and how many of the running ones.
const MAX_JOBS: u32 = 200;

/// The state of the queue at one moment.
#[derive(Default)]
pub(super) struct Snapshot {
    /// The newest jobs, running jobs, and those that ran in the previous snapshot.
    jobs: BTreeMap<JobId, Glance>,
    /// The oldest of the newest jobs; `None` if the snapshot covers all jobs.
    oldest: Option<JobId>,
    newest: Option<JobId>,
    queues: BTreeMap<String, QueueRecord>,
    workers: BTreeMap<WorkerId, WorkerChange>,
}

impl Snapshot {
    /// Takes a snapshot. It includes the jobs that ran in the previous one, so that
    /// their end is noticed.
    pub(super) async fn take(client: &Client, previous: &Snapshot) -> Result<Snapshot> {
        let ran: Vec<JobId> = previous.running().collect();
        let jobs = client.glance(MAX_JOBS, &ran).await?;
        let queues = client.queues().await?;
        let workers = client.workers(None).await?;
        let workers = workers.iter().map(|worker| (worker.id, WorkerChange::from(worker))).collect();
        Ok(Snapshot::of(jobs, queues, workers))
    }

    fn of(
        jobs: Vec<Glance>,
        queues: Vec<QueueRecord>,
        workers: BTreeMap<WorkerId, WorkerChange>,
    ) -> Snapshot {
        let older = jobs.len().checked_sub(MAX_JOBS as usize);
        Snapshot {
            oldest: older.and_then(|older| jobs.get(older)).map(|job| job.id),
            newest: jobs.last().map(|job| job.id),
            jobs: jobs.into_iter().map(|job| (job.id, job)).collect(),
            queues: queues.into_iter().map(|queue| (queue.name.clone(), queue)).collect(),
            workers,
        }
    }

    fn running(&self) -> impl Iterator<Item = JobId> {
        self.jobs.values().filter(|job| job.status == Status::Running).map(|job| job.id)
    }

    /// Whether a job with this id would be among the newest jobs.
    fn covers(&self, id: JobId) -> bool {
        self.oldest.is_none_or(|oldest| id >= oldest)
    }

    /// The changes since an earlier snapshot: jobs in order of creation, then queues,
    /// then workers.
    pub(super) fn changes_since(&self, before: &Snapshot) -> Vec<Event> {
        let jobs = self.jobs.values().filter(|job| self.is_changed(before, job));
        let removed = before.jobs.values().filter(|job| self.has_lost(job));
        let mut changes: Vec<(JobId, Event)> = jobs
            .map(|job| (job.id, Event::Job(job.clone())))
            .chain(removed.map(|job| (job.id, Event::Removed(RemovedJob::from(job)))))
            .collect();
        changes.sort_by_key(|(id, _)| *id);
        let mut events: Vec<Event> = changes.into_iter().map(|(_, event)| event).collect();
        if self.oldest.is_some_and(|oldest| before.newest.is_none_or(|newest| newest < oldest)) {
            events.insert(0, Event::Gap {});
        }
        let queues = self.queues.values().filter(|queue| before.queues.get(&queue.name) != Some(queue));
        events.extend(queues.cloned().map(Event::Queue));
        let emptied = before.queues.values().filter(|queue| !self.queues.contains_key(&queue.name));
        events.extend(emptied.map(|queue| Event::Queue(QueueRecord::empty(&queue.name))));
        let workers = self.workers.values().filter(|worker| before.workers.get(&worker.id) != Some(worker));
        events.extend(workers.cloned().map(Event::Worker));
        let left = before.workers.values().filter(|worker| !self.workers.contains_key(&worker.id));
        events.extend(
            left.map(|worker| Event::Worker(WorkerChange { state: WorkerState::Gone, ..worker.clone() })),
        );
        events
    }

    /// Whether a job is new or changed.
    fn is_changed(&self, before: &Snapshot, job: &Glance) -> bool {
        match before.jobs.get(&job.id) {
            Some(known) => known != job,
            // A job that `before` did not cover is not new. It may be among the newest
            // only because newer ones were removed.
            None => job.status == Status::Running || before.covers(job.id),
        }
    }

    /// Whether a job of an earlier snapshot no longer exists.
    fn has_lost(&self, job: &Glance) -> bool {
        let is_covered = job.status == Status::Running || self.covers(job.id);
        is_covered && !self.jobs.contains_key(&job.id)
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn job(n: u32, status: Status) -> Glance {
        Glance {
            id: JobId(Uuid::from_u128(n.into())),
            kind: "mail".into(),
            queue: "letters".into(),
            status,
            attempts: 0,
            cancel_requested: false,
            created_at: chrono::DateTime::UNIX_EPOCH,
            ended_at: None,
        }
    }

    fn snapshot(jobs: impl IntoIterator<Item = Glance>) -> Snapshot {
        Snapshot::of(jobs.into_iter().collect(), Vec::new(), BTreeMap::new())
    }

    fn changed(now: &Snapshot, before: &Snapshot) -> Vec<(u128, Option<Status>)> {
        let summary = |event| match event {
            Event::Job(job) => (job.id.0.as_u128(), Some(job.status)),
            Event::Removed(job) => (job.id.0.as_u128(), None),
            other => panic!("{other:?}"),
        };
        now.changes_since(before).into_iter().map(summary).collect()
    }

    #[test]
    fn only_new_changed_and_removed_jobs_are_reported() {
        let before = snapshot([job(1, Status::Queued), job(2, Status::Queued), job(3, Status::Running)]);
        let now = snapshot([job(1, Status::Running), job(2, Status::Queued), job(4, Status::Queued)]);
        assert_eq!(changed(&before, &before), []);
        assert_eq!(
            changed(&now, &before),
            [(1, Some(Status::Running)), (3, None), (4, Some(Status::Queued))]
        );
    }

    #[test]
    fn more_new_jobs_than_a_snapshot_covers_leave_a_gap() {
        let newest = |from: u32| snapshot((from..from + MAX_JOBS).map(|n| job(n, Status::Queued)));
        let gaps = |now: &Snapshot, before: &Snapshot| {
            now.changes_since(before).iter().filter(|event| matches!(event, Event::Gap {})).count()
        };
        assert_eq!(gaps(&newest(10 + MAX_JOBS), &newest(10)), 1, "a job may be missing between them");
        assert_eq!(gaps(&newest(9 + MAX_JOBS), &newest(10)), 0, "the snapshots share a job");
        assert_eq!(gaps(&newest(10), &snapshot([])), 1, "there may be more jobs");
        assert_eq!(gaps(&snapshot([job(1, Status::Queued)]), &snapshot([])), 0, "there is only one job");
    }

    #[test]
    fn jobs_that_leave_or_reenter_the_newest_are_not_changes() {
        let newest = |from: u32| (from..from + MAX_JOBS).map(|n| job(n, Status::Queued));
        let (before, now) = (snapshot(newest(10)), snapshot(newest(12)));
        assert_eq!(changed(&now, &before), [(210, Some(Status::Queued)), (211, Some(Status::Queued))]);
        assert_eq!(changed(&before, &now), [(210, None), (211, None)], "10 and 11 only reenter the newest");
        let with_old = snapshot([job(1, Status::Running)].into_iter().chain(newest(10)));
        assert_eq!(changed(&with_old, &before), [(1, Some(Status::Running))]);
        assert_eq!(changed(&before, &with_old), [(1, None)], "it was queried because it ran before");
    }
}
