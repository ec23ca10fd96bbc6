//! Finds out what has changed, by looking again. Workers and other servers change
//! jobs as well, so there is nobody to ask but the database; it is asked for a
//! bounded number of jobs, whatever happens meanwhile.

use std::collections::BTreeMap;

use super::ring::{Event, RemovedJob, WorkerChange, WorkerState};
use crate::client::Client;
use crate::error::Result;
use crate::job::{JobId, Status, WorkerId};
use crate::store::{Glance, QueueRecord};

/// How many of the newest jobs are looked at, and of the running ones.
const MAX_JOBS: u32 = 200;

/// What one look saw.
#[derive(Default)]
pub(super) struct Snapshot {
    /// The newest jobs, running ones, and those that ran the last time.
    jobs: BTreeMap<JobId, Glance>,
    /// The oldest of the newest jobs, if there are older ones.
    oldest: Option<JobId>,
    newest: Option<JobId>,
    queues: BTreeMap<String, QueueRecord>,
    workers: BTreeMap<WorkerId, WorkerChange>,
}

impl Snapshot {
    pub(super) async fn take(client: &Client, before: &Snapshot) -> Result<Snapshot> {
        let ran: Vec<JobId> = before.running().collect();
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

    /// Whether a job of this id, if there is one, was seen for being new.
    fn reaches(&self, id: JobId) -> bool {
        self.oldest.is_none_or(|oldest| id >= oldest)
    }

    /// What has changed since `before`: jobs in the order in which they were made,
    /// then queues, then workers.
    pub(super) fn changes_since(&self, before: &Snapshot) -> Vec<Event> {
        let jobs = self.jobs.values().filter(|job| self.is_news(before, job));
        let removed = before.jobs.values().filter(|job| self.lacks(job));
        let mut news: Vec<(JobId, Event)> = jobs
            .map(|job| (job.id, Event::Job(job.clone())))
            .chain(removed.map(|job| (job.id, Event::Removed(RemovedJob::from(job)))))
            .collect();
        news.sort_by_key(|(id, _)| *id);
        let mut events: Vec<Event> = news.into_iter().map(|(_, event)| event).collect();
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

    fn is_news(&self, before: &Snapshot, job: &Glance) -> bool {
        match before.jobs.get(&job.id) {
            Some(known) => known != job,
            // It may be among the newest only because newer ones were removed.
            None => job.status == Status::Running || before.reaches(job.id),
        }
    }

    /// Whether a job that was there is no more.
    fn lacks(&self, job: &Glance) -> bool {
        let asked_for = job.status == Status::Running || self.reaches(job.id);
        asked_for && !self.jobs.contains_key(&job.id)
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
        }
    }

    fn seen(jobs: impl IntoIterator<Item = Glance>) -> Snapshot {
        Snapshot::of(jobs.into_iter().collect(), Vec::new(), BTreeMap::new())
    }

    fn told(now: &Snapshot, before: &Snapshot) -> Vec<(u128, Option<Status>)> {
        let tell = |event| match event {
            Event::Job(job) => (job.id.0.as_u128(), Some(job.status)),
            Event::Removed(job) => (job.id.0.as_u128(), None),
            other => panic!("{other:?}"),
        };
        now.changes_since(before).into_iter().map(tell).collect()
    }

    #[test]
    fn new_changed_and_removed_jobs_are_told_and_others_are_not() {
        let before = seen([job(1, Status::Queued), job(2, Status::Queued), job(3, Status::Running)]);
        let now = seen([job(1, Status::Running), job(2, Status::Queued), job(4, Status::Queued)]);
        assert_eq!(told(&before, &before), []);
        assert_eq!(told(&now, &before), [(1, Some(Status::Running)), (3, None), (4, Some(Status::Queued))]);
    }

    #[test]
    fn more_new_jobs_than_are_seen_leave_a_gap() {
        let newest = |from: u32| seen((from..from + MAX_JOBS).map(|n| job(n, Status::Queued)));
        let gaps = |now: &Snapshot, before: &Snapshot| {
            now.changes_since(before).iter().filter(|event| matches!(event, Event::Gap {})).count()
        };
        assert_eq!(gaps(&newest(10 + MAX_JOBS), &newest(10)), 1, "one may be missing between");
        assert_eq!(gaps(&newest(9 + MAX_JOBS), &newest(10)), 0, "they meet");
        assert_eq!(gaps(&newest(10), &seen([])), 1, "there may have been more");
        assert_eq!(gaps(&seen([job(1, Status::Queued)]), &seen([])), 0, "it is the only one");
    }

    #[test]
    fn jobs_that_slide_out_of_sight_or_back_into_it_are_no_news() {
        let newest = |from: u32| (from..from + MAX_JOBS).map(|n| job(n, Status::Queued));
        let (before, now) = (seen(newest(10)), seen(newest(12)));
        assert_eq!(told(&now, &before), [(210, Some(Status::Queued)), (211, Some(Status::Queued))]);
        assert_eq!(told(&before, &now), [(210, None), (211, None)], "10 and 11 are only seen again");
        let with_old = seen([job(1, Status::Running)].into_iter().chain(newest(10)));
        assert_eq!(told(&with_old, &before), [(1, Some(Status::Running))]);
        assert_eq!(told(&before, &with_old), [(1, None)], "it was asked for");
    }
}
