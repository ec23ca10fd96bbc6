//! Claim: decides how many jobs to claim and of which kinds, and passes them to the runners. `claim_loop` waits for the next claim.
//! `queues` has the queues, `ahead` the size of the buffer, `next_claim` the time of the next claim, `lost_reply` the claims whose
//! reply was lost.
//!
//! A claim for free slots takes jobs of any kind. If handlers end faster than a claim takes, the
//! worker also claims ahead: it buffers jobs that start as soon as a slot is free. A buffered job
//! is leased, so no other worker can run it. Therefore
//!
//! - only kinds with a short [run time](super::run_times) are claimed ahead, and only as many jobs
//!   as can start within 100 ms;
//! - a job that has not started after 250 ms is released, and other workers are notified;
//! - jobs of a higher priority than the buffered ones are claimed while the buffer is full, and
//!   start first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::ahead::Ahead;
use super::context::{Attempt, StopReason};
use super::lost_reply::LostReply;
use super::next_claim::NextClaim;
use super::queues::QueueSet;
use super::shared::{Phase, Shared};
use crate::store::{ClaimCursor, ClaimRequest, Claimed, Claims, Suspects, Wakeups};

/// The maximum number of jobs in one claim.
const MAX_CLAIM: usize = 1000;
/// While more ended jobs than this wait to be settled, nothing is claimed.
const MAX_UNSETTLED: usize = 4000;
/// A job that has not started after this time is released.
pub(super) const MAX_BUFFER_WAIT: Duration = Duration::from_millis(250);
/// While some kinds are not claimed ahead, how often to claim jobs of any kind for slots that are
/// free soon. A backlog of short jobs would otherwise keep all slots occupied.
const ANY_KIND_INTERVAL: Duration = Duration::from_millis(25);
/// How often to look for jobs of a higher priority than the buffered ones.
const URGENT_INTERVAL: Duration = Duration::from_millis(100);
/// After a wake-up they are claimed sooner, but only after this pause and, up to the interval above,
/// this multiple of the time that such a claim takes, so that a stream of wake-ups costs little.
const MIN_URGENT_PAUSE: Duration = Duration::from_millis(25);
const URGENT_PAUSE_FACTOR: u32 = 100;
/// The pause after a failed claim.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);
/// In a drain, how soon to claim again while the last jobs run.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The result of a claim.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// Jobs may be due, but there is no room for them.
    Full,
    /// More jobs may be due.
    More,
    /// Some jobs, and no more are due.
    Some,
    Nothing,
    Failed,
}

/// What ends the wait for the next claim.
#[derive(Default)]
pub(super) struct Wait {
    /// The end of an attempt.
    pub(super) settled: bool,
    /// The buffer has room again.
    pub(super) demand: bool,
    pub(super) wake_up: bool,
    pub(super) until: Option<Instant>,
}

/// What a claim is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Jobs of any kind.
    AnyKind,
    /// Jobs of short kinds, to buffer.
    Ahead,
    /// Jobs of any kind with at least this priority.
    Urgent(i16),
}

/// How many jobs may be claimed now.
#[derive(Default)]
struct Room {
    any_kind: usize,
    /// Further jobs, of the kinds that are claimed ahead.
    ahead: usize,
}

pub(super) struct Claimer {
    shared: Arc<Shared>,
    queues: QueueSet,
    kinds: Option<Vec<String>>,
    /// For claims of any kind.
    cursor: ClaimCursor,
    /// When the last claim of any kind began.
    any_kind_at: Option<Instant>,
    ahead: Ahead,
    /// When the last claim of urgent jobs began, and how long it took.
    last_urgent: Option<(Instant, Duration)>,
    /// Whether a wake-up has arrived since the last claim that may have found its job.
    woken: bool,
    next: NextClaim,
    lost_reply: LostReply,
    /// In a drain: the database's time of the last claim that found nothing.
    drained_at: Option<DateTime<Utc>>,
}

impl Claimer {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Claimer {
            queues: QueueSet::new(&shared.settings),
            kinds: shared.registry.kinds(),
            cursor: ClaimCursor::default(),
            any_kind_at: None,
            ahead: Ahead::new(),
            last_urgent: None,
            woken: false,
            next: NextClaim::default(),
            lost_reply: LostReply::default(),
            drained_at: None,
            shared,
        }
    }

    /// Claims as many jobs as there is room for.
    pub(super) async fn claim(&mut self, wakeups: &mut Option<Wakeups>) -> Found {
        if !self.lost_reply.release(&self.shared).await {
            return Found::Failed;
        }
        if self.shared.contact.is_past_self_stop(&self.shared.settings) {
            // A job claimed now would be stopped immediately by the self-stop.
            return Found::Failed;
        }
        let found = match self.room() {
            Room { any_kind: 0, ahead: 0 } => self.claim_urgent().await,
            Room { any_kind: 0, ahead } => self.claim_ahead(ahead).await,
            Room { any_kind, ahead } => {
                for queue in wakeups.iter_mut().flat_map(Wakeups::take_arrived) {
                    self.queues.note(queue);
                }
                self.claim_any_kind(any_kind, ahead).await
            }
        };
        found.unwrap_or(Found::Failed)
    }

    /// What to wait for before the next claim; `None` if it is due at once.
    pub(super) fn wait(&mut self, found: Found) -> Option<Wait> {
        let until = |time| Some(Instant::now() + time);
        Some(match found {
            Found::More => return None,
            Found::Failed => Wait { until: until(PAUSE_AFTER_ERROR), ..Wait::default() },
            Found::Full => Wait {
                settled: true,
                demand: true,
                wake_up: self.listens_while_full(),
                until: self.next_check(),
            },
            Found::Some | Found::Nothing if self.shared.phase() == Phase::Draining => {
                Wait { settled: true, until: until(DRAIN_POLL_INTERVAL), ..Wait::default() }
            }
            Found::Some | Found::Nothing => Wait {
                settled: self.next.after_settle,
                wake_up: true,
                until: Some(self.next.at(&self.shared.settings)),
                ..Wait::default()
            },
        })
    }

    /// Handles a wake-up: there is work again.
    pub(super) fn on_wakeup(&mut self, queue: Option<String>) {
        self.queues.note(queue);
        self.next.work_arrived();
        self.ahead.resume();
        self.woken = true;
    }

    pub(super) fn release_overdue_jobs(&self) {
        let overdue = self.shared.buffer.take_overdue(MAX_BUFFER_WAIT);
        if !overdue.is_empty() {
            tracing::info!(jobs = overdue.len(), "released claimed jobs that could not start in time");
        }
        for attempt in overdue {
            self.shared.release(attempt);
        }
    }
}

// ---- claims of each purpose ------------------------------------------------------

impl Claimer {
    /// Claims jobs of any kind, then jobs of short kinds to buffer. Returns `None` if a claim failed.
    async fn claim_any_kind(&mut self, limit: usize, ahead: usize) -> Option<Found> {
        self.any_kind_at = Some(Instant::now());
        let claims = self.claim_for(Purpose::AnyKind, limit).await;
        self.woken = false;
        let claims = claims?;
        self.next.record(&claims);
        let (jobs, more) = (self.accept(claims.jobs), claims.more);
        if ahead > 0 && jobs >= limit {
            return self.claim_ahead(ahead).await;
        }
        Some(match (jobs > 0, more) {
            (_, true) => Found::More,
            (true, false) => Found::Some,
            (false, false) => Found::Nothing,
        })
    }

    /// Claims jobs of short kinds to buffer. Jobs of other kinds may be due, but there is no room
    /// for them.
    async fn claim_ahead(&mut self, limit: usize) -> Option<Found> {
        let claims = self.claim_for(Purpose::Ahead, limit).await?;
        self.accept(claims.jobs);
        if claims.more {
            return Some(Found::More);
        }
        self.ahead.pause();
        self.shared.buffer.set_low_water(0);
        Some(Found::Full)
    }

    /// Claims jobs of a higher priority than the lowest in the buffer, if it is time to look for
    /// them.
    async fn claim_urgent(&mut self) -> Option<Found> {
        let now = Instant::now();
        let Some((lowest, above)) = self.shared.buffer.lowest_priority() else { return Some(Found::Full) };
        if now < self.urgent_at() {
            return Some(Found::Full);
        }
        self.woken = false;
        let limit = (self.shared.settings.concurrency as usize).saturating_sub(above);
        if let Some(min_priority) = lowest.checked_add(1).filter(|_| limit > 0) {
            let claims = self.claim_for(Purpose::Urgent(min_priority), limit).await?;
            self.accept(claims.jobs);
        }
        self.last_urgent = Some((now, now.elapsed()));
        Some(Found::Full)
    }

    /// When to look for jobs of a higher priority than the buffered ones.
    fn urgent_at(&self) -> Instant {
        let now = Instant::now();
        let last_urgent = self.last_urgent.map(|(at, _)| at);
        if self.woken {
            let pause =
                |took: Duration| (took * URGENT_PAUSE_FACTOR).clamp(MIN_URGENT_PAUSE, URGENT_INTERVAL);
            return self.last_urgent.map_or(now, |(at, took)| at + pause(took));
        }
        self.any_kind_at.max(last_urgent).map_or(now, |at| at + URGENT_INTERVAL)
    }

    /// While there is no room: when to release jobs or to look for urgent ones.
    fn next_check(&self) -> Option<Instant> {
        let overdue_at = self.shared.buffer.overdue_at(MAX_BUFFER_WAIT)?;
        Some(overdue_at.min(self.urgent_at()))
    }

    /// Whether a wake-up makes a difference while there is no room: its job may be urgent, or of a
    /// kind that is claimed ahead.
    fn listens_while_full(&self) -> bool {
        !self.woken && (self.ahead.is_paused() || self.shared.buffer.len() > 0)
    }

    /// Claims up to `limit` jobs. Returns `None` if that failed.
    async fn claim_for(&mut self, purpose: Purpose, limit: usize) -> Option<Claims> {
        let shared = self.shared.clone();
        // In a drain, the claim that decides whether it is complete must see every queue.
        let is_draining = shared.phase() == Phase::Draining;
        let max_age = if is_draining { Duration::ZERO } else { shared.settings.poll_interval };
        if let Err(error) = self.queues.refresh(&shared.client, max_age).await {
            tracing::warn!(%error, worker_id = %shared.worker_id(), "could not list the queues; retrying");
            return None;
        }
        if shared.phase() >= Phase::Finishing {
            return Some(Claims::NONE);
        }
        let request = self.request(purpose, limit);
        let urgent = &mut ClaimCursor::default();
        let cursor = match purpose {
            Purpose::AnyKind => &mut self.cursor,
            Purpose::Ahead => &mut self.ahead.cursor,
            // There are few, and each is for another priority, so none resumes.
            Purpose::Urgent(_) => urgent,
        };
        let began = Instant::now();
        match shared.client.claim(&request, cursor).await {
            Ok(claims) => {
                tracing::debug!(jobs = claims.jobs.len(), limit, more = claims.more, "claimed");
                shared.metrics.claimed(claims.jobs.len(), began.elapsed());
                self.ahead.pace.claimed(began.elapsed());
                if !claims.jobs.is_empty() {
                    self.next.work_arrived();
                }
                Some(claims)
            }
            Err(error) => {
                let queues: Vec<&str> = request.queues.iter().map(|queue| queue.name.as_str()).collect();
                tracing::warn!(%error, worker_id = %request.worker, ?queues, "could not claim; retrying");
                self.lost_reply.note();
                None
            }
        }
    }

    fn request(&self, purpose: Purpose, limit: usize) -> ClaimRequest {
        let shared = &self.shared;
        let free_slots = (shared.settings.concurrency as usize).saturating_sub(shared.buffer.busy())
            * shared.registry.jobs_per_slot();
        let free_slots = free_slots.saturating_sub(shared.buffer.len());
        ClaimRequest {
            worker: shared.worker_id(),
            queues: self.queues.for_claim(&shared.held),
            kinds: match purpose {
                Purpose::Ahead => Some(self.ahead.kinds.names.clone()),
                Purpose::AnyKind | Purpose::Urgent(_) => self.kinds.clone(),
            },
            accept_flags: shared.settings.accept_flags.clone(),
            forbid_flags: shared.settings.forbid_flags.clone(),
            limit: limit as u32,
            startable: free_slots.min(limit) as u32,
            suspects: if shared.held.has_suspect() { Suspects::Leave } else { Suspects::One },
            min_priority: if let Purpose::Urgent(priority) = purpose { Some(priority) } else { None },
            woken: self.woken && purpose == Purpose::AnyKind,
        }
    }

    /// Passes claimed jobs to the runners. Returns how many.
    fn accept(&mut self, jobs: Vec<Claimed>) -> usize {
        if jobs.is_empty() {
            return 0;
        }
        let shared = self.shared.clone();
        let received_at = Instant::now();
        let mut attempts = Vec::with_capacity(jobs.len());
        self.ahead.forget_found();
        for job in jobs {
            let kind = self.ahead.count_found(&shared, job.kind());
            attempts.push(Attempt::new(
                job,
                kind,
                received_at,
                shared.client.clone(),
                shared.progress.clone(),
                shared.steps.clone(),
            ));
        }
        shared.held.insert(&attempts);
        let (worker, count) = (shared.worker_id(), attempts.len());
        // The worker was declared dead during the claim, and heartbeats under the new id do
        // not cover these leases.
        let lost = attempts.iter().filter(|attempt| attempt.claimed.lease().worker != worker);
        lost.for_each(|attempt| attempt.control.stop(StopReason::LeaseLost));
        if shared.phase() < Phase::Finishing {
            shared.buffer.push(attempts);
        } else {
            attempts.into_iter().for_each(|attempt| shared.release(attempt));
        }
        count
    }

    /// How many more jobs may be claimed now.
    fn room(&mut self) -> Room {
        let shared = self.shared.clone();
        let buffer = &shared.buffer;
        let concurrency = shared.settings.concurrency as usize;
        let (busy, waiting) = (buffer.busy(), buffer.len());
        let occupancy = shared.slots.occupancy();
        self.ahead.kinds.update(&shared, self.kinds.as_deref(), &occupancy);
        let free_soon = concurrency.saturating_sub(occupancy.long);
        let target = self.ahead.buffer_target(&shared, free_soon);
        buffer.set_low_water(target / 2);
        let unsettled = shared.held.len().saturating_sub(busy + waiting);
        // Refill only when the buffer is half empty, so that claims stay large.
        if unsettled > MAX_UNSETTLED || (waiting > target / 2 && waiting > 0) {
            return Room::default();
        }
        // A slot whose handler takes batches has room for a whole batch.
        let batch = shared.registry.jobs_per_slot();
        let free = concurrency.saturating_sub(busy) * batch;
        let room = (free + target).saturating_sub(waiting).min(MAX_CLAIM);
        if self.ahead.kinds.includes_all || target == 0 {
            return Room { any_kind: room, ahead: 0 };
        }
        let is_due = self.any_kind_at.is_none_or(|at| at.elapsed() >= ANY_KIND_INTERVAL);
        let soon = if is_due { (free_soon * batch).saturating_sub(buffer.waiting_long()) } else { 0 };
        let any_kind = free.saturating_sub(waiting).max(soon).min(room);
        Room { any_kind, ahead: room - any_kind }
    }
}

// ---- the end of a drain ------------------------------------------------------------

impl Claimer {
    /// Resets the cursors, so that the next claim sees every due job: it decides whether the
    /// drain is complete.
    pub(super) fn restart_at_head(&mut self) {
        (self.cursor, self.ahead.cursor) = Default::default();
    }

    /// Whether due jobs wait until a claim may take them, because of a rate. Not if the
    /// database's clock has not moved since the last claim: tests stop it.
    pub(super) async fn has_paused_jobs(&mut self) -> bool {
        let claimed_at = self.next.claimed_at;
        let is_stopped = claimed_at.is_some() && self.drained_at == claimed_at;
        self.drained_at = claimed_at;
        if !self.next.has_time() || is_stopped {
            return false;
        }
        // A rate is remembered for a while after the last job.
        match self.shared.client.overdue().await {
            Ok(overdue) => overdue.iter().any(|(queue, _)| self.queues.contains(queue)),
            Err(error) => {
                tracing::warn!(%error, "could not look for due jobs; retrying");
                true
            }
        }
    }
}
