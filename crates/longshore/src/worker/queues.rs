//! The queues that a worker claims from: those that it was given, or in a worker of every queue, those that it knows. It knows a
//! queue from a wake-up, which names it but can be lost, and from a list of the queues with waiting jobs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::settings::Settings;
use super::shared::HeldLeases;
use crate::client::Client;
use crate::error::Result;
use crate::store::ClaimQueue;

/// A worker of every queue keeps up to this many queues without waiting jobs in its list, because
/// every change of the list makes the claim cursors start over.
const MAX_IDLE_QUEUES: usize = 100;

pub(super) struct QueueSet {
    names: Vec<String>,
    /// How many jobs of a queue may run here at once, if limited.
    caps: BTreeMap<String, u32>,
    known: Known,
}

/// Whether the worker knows all its queues.
enum Known {
    All,
    /// A worker of every queue does not. When it last listed those with waiting jobs.
    Listed(Option<Instant>),
}

impl QueueSet {
    pub(super) fn new(settings: &Settings) -> Self {
        let caps = settings.queue_concurrency.clone();
        if settings.claims_from_all() {
            let names = caps.keys().cloned().collect();
            return QueueSet { names, caps, known: Known::Listed(None) };
        }
        QueueSet { names: settings.queues.clone(), caps, known: Known::All }
    }

    /// The queues for a claim, each with the number of jobs that it may still start here.
    pub(super) fn for_claim(&self, held: &HeldLeases) -> Vec<ClaimQueue> {
        let free = |name: &String| {
            let cap = *self.caps.get(name)?;
            Some(cap.saturating_sub(u32::try_from(held.count_in_queue(name)).unwrap_or(u32::MAX)))
        };
        self.names.iter().map(|name| ClaimQueue { name: name.clone(), cap: free(name) }).collect()
    }

    pub(super) fn contains(&self, queue: &str) -> bool {
        self.names.iter().any(|name| name == queue)
    }

    /// Handles the name of a wake-up's queue, which may be new; `None` if it can be any queue.
    pub(super) fn note(&mut self, queue: Option<String>) {
        if let Known::Listed(listed_at) = &mut self.known {
            match queue {
                Some(queue) => self.add(queue),
                None => *listed_at = None,
            }
        }
    }

    fn add(&mut self, queue: String) {
        if let Err(at) = self.names.binary_search(&queue) {
            self.names.insert(at, queue);
        }
    }

    /// In a worker of every queue, lists the queues with waiting jobs, unless the last list is younger than `max_age`.
    pub(super) async fn refresh(&mut self, client: &Client, max_age: Duration) -> Result<()> {
        let Known::Listed(listed_at) = self.known else { return Ok(()) };
        let is_recent = listed_at.is_some_and(|at| at.elapsed() < max_age);
        if is_recent {
            return Ok(());
        }
        let listed_at = Instant::now();
        let waiting = client.waiting_queues().await?;
        if self.names.len() > waiting.len() + self.caps.len() + MAX_IDLE_QUEUES {
            self.names = self.caps.keys().cloned().collect();
        }
        waiting.into_iter().for_each(|queue| self.add(queue));
        self.known = Known::Listed(Some(listed_at));
        Ok(())
    }
}
