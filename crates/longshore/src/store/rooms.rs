//! Room: how many more jobs a claim may start in each queue, by the queue's limit and rate and by the caller's cap.
//! Pure, without SQL: the engines read limits and rates, and store what this module computes. The room of groups is in
//! `rules/turns.rs`.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};

use super::ClaimRequest;
use crate::rules::turns::Rate;

/// The room of the queues that have a cap, a limit or a rate.
#[derive(Debug)]
pub(crate) struct Rooms {
    queues: BTreeMap<String, Room>,
    /// How many jobs can start at once; a rate admits no more.
    startable: usize,
}

#[derive(Debug, Default)]
struct Room {
    /// How many jobs the cap and the limit allowed when the claim began.
    free: Option<usize>,
    pace: Option<Pace>,
    /// Whether this claim knows the limit and the rate, and no other claim starts jobs of the queue meanwhile.
    is_locked: bool,
    /// How many jobs this claim has started.
    started: usize,
}

/// The rate of a queue and its state when the claim began.
#[derive(Debug)]
struct Pace {
    rate: Rate,
    paced_until: Option<DateTime<Utc>>,
    now: DateTime<Utc>,
}

impl Rooms {
    /// With the caps of the request. The limits and rates of the queues are added later.
    pub(crate) fn new(request: &ClaimRequest) -> Self {
        let mut rooms = Rooms { queues: BTreeMap::new(), startable: request.startable as usize };
        for queue in &request.queues {
            if let Some(cap) = queue.cap {
                rooms.room(&queue.name).allow(cap as usize);
            }
        }
        rooms
    }

    fn room(&mut self, queue: &str) -> &mut Room {
        self.queues.entry(queue.to_owned()).or_default()
    }

    /// Adds the limit of a queue of which this many jobs run.
    pub(crate) fn limit(&mut self, queue: &str, limit: usize, running: usize) {
        let room = self.room(queue);
        room.is_locked = true;
        room.allow(limit.saturating_sub(running));
    }

    /// Adds the rate of a queue, and until when its jobs are paced.
    pub(crate) fn pace(
        &mut self,
        queue: &str,
        rate: Rate,
        paced_until: Option<DateTime<Utc>>,
        now: DateTime<Utc>,
    ) {
        let room = self.room(queue);
        room.is_locked = true;
        room.pace = Some(Pace { rate, paced_until, now });
    }

    /// How many jobs of the queue may start; `None` if nothing limits them.
    pub(crate) fn of(&self, queue: &str) -> Option<usize> {
        let room = self.queues.get(queue)?;
        let by_rate = room.pace.as_ref().map(|pace| {
            pace.rate.room(pace.paced_until, pace.now).saturating_sub(room.started).min(self.startable)
        });
        room.left().into_iter().chain(by_rate).min()
    }

    /// Whether the limit and the rate of the queue are known and locked.
    pub(crate) fn is_locked(&self, queue: &str) -> bool {
        self.queues.get(queue).is_some_and(|room| room.is_locked)
    }

    /// The queues whose limit and rate are known and locked.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite has one writer"))]
    pub(crate) fn locked(&self) -> Vec<&str> {
        self.queues.iter().filter(|(_, room)| room.is_locked).map(|(name, _)| name.as_str()).collect()
    }

    /// Whether the queue has no room until one of its jobs ends.
    pub(crate) fn is_full(&self, queue: &str) -> bool {
        self.queues.get(queue).and_then(Room::left) == Some(0)
    }

    /// How many jobs with a rate may start.
    pub(crate) fn startable(&self) -> usize {
        self.startable
    }

    /// Counts a job that the claim starts.
    pub(crate) fn start(&mut self, queue: &str) {
        self.startable = self.startable.saturating_sub(1);
        if let Some(room) = self.queues.get_mut(queue) {
            room.started += 1;
        }
    }

    /// Takes back a start: the job could not be leased.
    #[cfg_attr(not(feature = "sqlite"), expect(dead_code, reason = "Postgres counts leased jobs"))]
    pub(crate) fn take_back(&mut self, queue: &str) {
        self.startable += 1;
        if let Some(room) = self.queues.get_mut(queue) {
            room.started = room.started.saturating_sub(1);
        }
    }

    /// The rates whose state the claim has changed: until when the jobs of each queue are paced.
    pub(crate) fn paced(&self) -> Vec<(&str, DateTime<Utc>)> {
        let started = self.queues.iter().filter(|(_, room)| room.started > 0);
        started.filter_map(|(name, room)| Some((name.as_str(), room.paced_until()?))).collect()
    }

    /// When a rate lets the next job start.
    pub(crate) fn next_start(&self) -> Option<DateTime<Utc>> {
        let next = self.queues.values().filter_map(|room| {
            let pace = room.pace.as_ref()?;
            let next = pace.rate.next_start(room.paced_until(), pace.now);
            (next > pace.now).then_some(next)
        });
        next.min()
    }
}

impl Room {
    fn allow(&mut self, jobs: usize) {
        self.free = Some(self.free.map_or(jobs, |free| free.min(jobs)));
    }

    /// How many jobs the cap and the limit still allow.
    fn left(&self) -> Option<usize> {
        self.free.map(|free| free.saturating_sub(self.started))
    }

    fn paced_until(&self) -> Option<DateTime<Utc>> {
        self.pace.as_ref().map(|pace| pace.rate.paced_until(pace.paced_until, pace.now, self.started))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::WorkerId;
    use crate::store::ClaimQueue;

    fn rooms() -> Rooms {
        let queues = vec![ClaimQueue { name: "mail".into(), cap: Some(3) }, "free".into()];
        Rooms::new(&ClaimRequest { queues, startable: 2, ..ClaimRequest::new(WorkerId::new(), 9) })
    }

    #[test]
    fn the_room_of_a_queue_is_the_smallest_of_cap_limit_and_rate() {
        let mut rooms = rooms();
        assert_eq!((rooms.of("free"), rooms.of("mail")), (None, Some(3)));
        rooms.limit("mail", 7, 3);
        assert_eq!(rooms.of("mail"), Some(3), "the cap is smaller");
        rooms.limit("mail", 5, 4);
        assert_eq!(rooms.of("mail"), Some(1));
        rooms.limit("other", 5, 9);
        assert_eq!(rooms.of("other"), Some(0));
        rooms.pace("free", Rate::per_second(10).burst(4), None, DateTime::UNIX_EPOCH);
        assert_eq!(rooms.of("free"), Some(2), "no more can start");
    }

    #[test]
    fn what_a_claim_starts_uses_room() {
        let mut rooms = rooms();
        rooms.pace("free", Rate::per_second(10).burst(4), None, DateTime::UNIX_EPOCH);
        rooms.start("mail");
        assert_eq!((rooms.of("mail"), rooms.of("free")), (Some(2), Some(1)));
        rooms.start("free");
        assert_eq!(rooms.of("free"), Some(0));
        assert!(!rooms.is_full("free"), "the end of a job changes nothing");
        rooms.start("mail");
        rooms.start("mail");
        assert!(rooms.is_full("mail"));
        assert_eq!(rooms.paced().len(), 1);
    }
}
