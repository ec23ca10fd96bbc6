//! The events and a ring buffer of the newest ones. Events are numbered. A listener
//! that knows the last number it received can continue from there, as long as the
//! ring still holds the events after it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use uuid::Uuid;

use crate::job::{JobId, WorkerId};
use crate::store::{Glance, QueueRecord, WorkerRecord};

/// A change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(super) enum Event {
    /// A new or changed job.
    Job(Glance),
    /// A job that was deleted or whose retention ended.
    Removed(RemovedJob),
    /// A changed queue.
    Queue(QueueRecord),
    /// A new, changed or removed worker.
    Worker(WorkerChange),
    /// More jobs were created than one snapshot covers.
    Gap {},
}

/// A job that no longer exists.
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

/// The current state of a worker.
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
    /// Its last heartbeat is older than its threshold.
    Stale,
    Dead,
    /// It signed off, or its row was removed.
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
    /// The event name in the stream.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Event::Job(_) => "job",
            Event::Removed(_) => "job_removed",
            Event::Queue(_) => "queue",
            Event::Worker(_) => "worker",
            Event::Gap {} => "gap",
        }
    }

    /// Whether a token that covers only these queues may see the event. Such tokens
    /// never see workers.
    pub(super) fn is_visible_to(&self, queues: &[String]) -> bool {
        match self {
            Event::Job(job) => queues.contains(&job.queue),
            Event::Removed(job) => queues.contains(&job.queue),
            Event::Queue(queue) => queues.contains(&queue.name),
            Event::Worker(_) => false,
            Event::Gap {} => true,
        }
    }
}

/// A listener's position in one ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    /// The id of the ring.
    ring: u64,
    /// The number of the last event received; 0 is before the first.
    number: u64,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{}", self.ring, self.number)
    }
}

impl Position {
    /// Parses what [`Display`](fmt::Display) wrote.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (ring, number) = text.split_once('-')?;
        Some(Position { ring: u64::from_str_radix(ring, 16).ok()?, number: number.parse().ok()? })
    }
}

/// The newest events, up to a capacity.
pub(super) struct Ring {
    id: u64,
    events: VecDeque<Arc<Event>>,
    /// The number of the newest event.
    newest: u64,
    capacity: usize,
}

impl Ring {
    pub(super) fn new(capacity: usize) -> Self {
        // The low half of a UUID is random.
        Ring { id: Uuid::now_v7().as_u64_pair().1, events: VecDeque::new(), newest: 0, capacity }
    }

    pub(super) fn push(&mut self, event: Event) {
        if self.events.len() == self.capacity {
            self.events.pop_front();
        }
        self.events.push_back(Arc::new(event));
        self.newest += 1;
    }

    /// The position after the newest event.
    pub(super) fn end(&self) -> Position {
        Position { ring: self.id, number: self.newest }
    }

    /// The events after a position, each with its own position. `None` if the ring no
    /// longer holds all of them, or if the position is not in this ring.
    pub(super) fn after(&self, position: Position) -> Option<Vec<(Position, Arc<Event>)>> {
        let first = self.newest - self.events.len() as u64;
        if position.ring != self.id || !(first..=self.newest).contains(&position.number) {
            return None;
        }
        let received = (position.number - first) as usize;
        let numbered = (position.number + 1..).zip(self.events.iter().skip(received));
        Some(numbered.map(|(number, event)| (Position { ring: self.id, number }, event.clone())).collect())
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
            created_at: chrono::DateTime::UNIX_EPOCH,
            ended_at: None,
        })
    }

    #[test]
    fn late_listener_gets_the_remaining_events_or_learns_that_some_are_gone() {
        let mut ring = Ring::new(3);
        let start = ring.end();
        assert_eq!(ring.after(start), Some(Vec::new()));
        (1..=3).for_each(|n| ring.push(event(n)));
        let all = ring.after(start).unwrap();
        assert_eq!(all.iter().map(|(_, event)| (**event).clone()).collect::<Vec<_>>(), [1, 2, 3].map(event));
        assert_eq!(ring.after(all[1].0).unwrap(), all[2..]);
        assert_eq!(ring.after(ring.end()), Some(Vec::new()));
        ring.push(event(4));
        assert_eq!(ring.after(start), None, "the first event is gone");
        assert_eq!(ring.after(all[0].0).unwrap().len(), 3);
    }

    #[test]
    fn positions_of_other_rings_and_future_positions_are_unknown() {
        let (mut ring, other) = (Ring::new(3), Ring::new(3));
        assert_eq!(ring.after(other.end()), None);
        ring.push(event(1));
        let end = ring.end();
        assert_eq!(Position::parse(&end.to_string()), Some(end));
        assert_eq!(ring.after(Position { number: 2, ..end }), None);
        for invalid in ["", "-", "1", "x-1", "1-x", "1--1"] {
            assert_eq!(Position::parse(invalid), None, "{invalid:?}");
        }
    }
}
