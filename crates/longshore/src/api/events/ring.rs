//! The newest events, and no more than so many of them. An event has a number;
//! whoever knows the last number it saw can go on from there, as long as the
//! ring still holds what came after it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use uuid::Uuid;

use crate::job::{JobId, WorkerId};
use crate::store::{Glance, QueueRecord, WorkerRecord};

/// What has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(super) enum Event {
    /// A job as it is now.
    Job(Glance),
    /// A job that was deleted, or is past its time.
    Removed(RemovedJob),
    /// A queue as it is now.
    Queue(QueueRecord),
    Worker(WorkerChange),
    /// More jobs were made than one look sees.
    Gap {},
}

/// A job that is no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct RemovedJob {
    pub(super) id: JobId,
    kind: String,
    queue: String,
}

impl From<&Glance> for RemovedJob {
    fn from(job: &Glance) -> Self {
        RemovedJob { id: job.id, kind: job.kind.clone(), queue: job.queue.clone() }
    }
}

/// A worker as it is now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct WorkerChange {
    pub(super) id: WorkerId,
    pub(super) name: String,
    pub(super) queues: Vec<String>,
    pub(super) state: WorkerState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum WorkerState {
    Alive,
    /// Silent for longer than its threshold.
    Stale,
    Dead,
    /// It signed off, or was forgotten.
    Gone,
}

impl From<&WorkerRecord> for WorkerChange {
    fn from(worker: &WorkerRecord) -> Self {
        let state = match (worker.dead_at, worker.stale) {
            (Some(_), _) => WorkerState::Dead,
            (None, true) => WorkerState::Stale,
            (None, false) => WorkerState::Alive,
        };
        WorkerChange { id: worker.id, name: worker.name.clone(), queues: worker.queues.clone(), state }
    }
}

impl Event {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Event::Job(_) => "job",
            Event::Removed(_) => "job_removed",
            Event::Queue(_) => "queue",
            Event::Worker(_) => "worker",
            Event::Gap {} => "gap",
        }
    }

    /// Whether it concerns these queues and no others. Who works is told to those
    /// who may see every queue.
    pub(super) fn is_of(&self, queues: &[String]) -> bool {
        match self {
            Event::Job(job) => queues.contains(&job.queue),
            Event::Removed(job) => queues.contains(&job.queue),
            Event::Queue(queue) => queues.contains(&queue.name),
            Event::Worker(_) => false,
            Event::Gap {} => true,
        }
    }
}

/// Where somebody is in the events of one ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    /// Which ring.
    of: u64,
    /// The number of the last event that was seen; 0 is before the first.
    number: u64,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{}", self.of, self.number)
    }
}

impl Position {
    /// As [`Display`](fmt::Display) wrote it.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (of, number) = text.split_once('-')?;
        Some(Position { of: u64::from_str_radix(of, 16).ok()?, number: number.parse().ok()? })
    }
}

pub(super) struct Ring {
    id: u64,
    events: VecDeque<Arc<Event>>,
    /// The number of the newest event.
    newest: u64,
    most: usize,
}

impl Ring {
    pub(super) fn new(most: usize) -> Self {
        // The low half of a UUID is random.
        Ring { id: Uuid::now_v7().as_u64_pair().1, events: VecDeque::new(), newest: 0, most }
    }

    pub(super) fn push(&mut self, event: Event) {
        if self.events.len() == self.most {
            self.events.pop_front();
        }
        self.events.push_back(Arc::new(event));
        self.newest += 1;
    }

    /// Where who has seen everything is.
    pub(super) fn end(&self) -> Position {
        Position { of: self.id, number: self.newest }
    }

    /// What came after, each with its place; `None` where some of it is no longer
    /// here, or never was.
    pub(super) fn after(&self, place: Position) -> Option<Vec<(Position, Arc<Event>)>> {
        let first = self.newest - self.events.len() as u64;
        if place.of != self.id || !(first..=self.newest).contains(&place.number) {
            return None;
        }
        let missed = (place.number - first) as usize;
        let numbered = (place.number + 1..).zip(self.events.iter().skip(missed));
        Some(numbered.map(|(number, event)| (Position { of: self.id, number }, event.clone())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Status;

    fn event(attempts: u16) -> Event {
        Event::Job(Glance {
            id: JobId(Uuid::nil()),
            kind: "mail".into(),
            queue: "letters".into(),
            status: Status::Queued,
            attempts,
            cancel_requested: false,
        })
    }

    #[test]
    fn who_fell_behind_gets_what_is_left_or_is_told_that_some_is_gone() {
        let mut ring = Ring::new(3);
        let start = ring.end();
        assert_eq!(ring.after(start), Some(Vec::new()));
        (1..=3).for_each(|n| ring.push(event(n)));
        let all = ring.after(start).unwrap();
        assert_eq!(all.iter().map(|(_, event)| (**event).clone()).collect::<Vec<_>>(), [1, 2, 3].map(event));
        assert_eq!(ring.after(all[1].0).unwrap(), all[2..]);
        assert_eq!(ring.after(ring.end()), Some(Vec::new()));
        ring.push(event(4));
        assert_eq!(ring.after(start), None, "the first is gone");
        assert_eq!(ring.after(all[0].0).unwrap().len(), 3);
    }

    #[test]
    fn places_of_other_rings_and_of_the_future_are_nowhere() {
        let (mut ring, other) = (Ring::new(3), Ring::new(3));
        assert_eq!(ring.after(other.end()), None);
        ring.push(event(1));
        let end = ring.end();
        assert_eq!(Position::parse(&end.to_string()), Some(end));
        assert_eq!(ring.after(Position { number: 2, ..end }), None);
        for nonsense in ["", "-", "1", "x-1", "1-x", "1--1"] {
            assert_eq!(Position::parse(nonsense), None, "{nonsense:?}");
        }
    }
}
