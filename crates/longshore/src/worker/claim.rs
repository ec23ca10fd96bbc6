//! Claim: decides how many jobs to claim, of which kinds, and when to claim again. `claim_loop` waits for that.
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

use super::ahead::{AheadKinds, Pace};
use super::context::{Attempt, StopReason};
use super::metrics::Kind;
use super::run_times::START_WITHIN;
use super::shared::{Phase, Shared};
use crate::store::{ClaimCursor, ClaimRequest, Claims, Suspects, Wakeups};

/// The maximum number of jobs in one claim.
const MAX_CLAIM: usize = 1000;
/// While more ended jobs than this wait to be settled, nothing is claimed.
const MAX_UNSETTLED: usize = 4000;
/// A job that has not started after this time is released.
pub(super) const MAX_BUFFER_WAIT: Duration = Duration::from_millis(250);
/// While some kinds are not claimed ahead, how often to claim jobs of any kind for slots that are
/// free soon. A backlog of short jobs would otherwise keep all slots occupied.
const ANY_KIND_INTERVAL: Duration = Duration::from_millis(25);
/// After a claim ahead that found too few jobs, how long to wait for a wake-up before the next.
const AHEAD_PAUSE: Duration = Duration::from_millis(100);
/// How often to look for jobs of a higher priority than the buffered ones.
const URGENT_INTERVAL: Duration = Duration::from_millis(100);
/// After a wake-up they are claimed sooner, but only after this pause and, up to the interval above,
/// this multiple of the time that such a claim takes, so that a stream of wake-ups costs little.
const MIN_URGENT_PAUSE: Duration = Duration::from_millis(25);
const URGENT_PAUSE_FACTOR: u32 = 100;
/// The server may still commit a claim within this time after the client gave up on it.
const LOST_CLAIM_COMMIT_TIME: Duration = Duration::from_secs(60);
/// A worker of every queue keeps up to this many queues without waiting jobs in its list, because
/// every change of the list makes the claim cursors start over.
const MAX_IDLE_QUEUES: usize = 100;
/// The minimum pause before the next claim if a rate lets a job start.
const MIN_RATE_PAUSE: Duration = Duration::from_millis(1);

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

/// Queues that are claimed from together.
struct Group {
    queues: Vec<String>,
    /// How many of the group's jobs may run here at once, if limited.
    max_running: Option<usize>,
    /// For claims of any kind.
    cursor: ClaimCursor,
    /// For claims ahead, if not every kind is claimed ahead.
    ahead_cursor: ClaimCursor,
    /// For urgent claims. There are few, and each is for another priority, so it never resumes. It
    /// only remembers whether to skip rows that cannot be claimed.
    urgent_cursor: ClaimCursor,
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

impl Purpose {
    const COUNT: usize = 3;

    fn index(self) -> usize {
        match self {
            Purpose::AnyKind => 0,
            Purpose::Ahead => 1,
            Purpose::Urgent(_) => 2,
        }
    }
}

/// How many jobs may be claimed now.
#[derive(Default)]
struct Room {
    any_kind: usize,
    /// Further jobs, of the kinds that are claimed ahead.
    ahead: usize,
}

/// What a claim from all groups found.
#[derive(Default)]
struct Claimed {
    jobs: usize,
    /// Whether more may be due.
    more: bool,
}

pub(super) struct Claimer {
    shared: Arc<Shared>,
    /// In a worker of every queue, the first group has the queues without a limit that are known
    /// so far.
    groups: Vec<Group>,
    /// In a worker of every queue: when the queues with waiting jobs were last listed.
    listed_at: Option<Instant>,
    /// The group that the next claim starts with, by [`Purpose::index`]. With one for all purposes,
    /// claims of two purposes that take turns would each start with the same group every time.
    first_groups: [usize; Purpose::COUNT],
    kinds: Option<Vec<String>>,
    ahead: AheadKinds,
    pace: Pace,
    /// When the last claim of any kind began.
    any_kind_at: Option<Instant>,
    /// The kinds of the jobs that the last successful claim found, with their numbers.
    last_found: Vec<(Arc<Kind>, usize)>,
    /// Until when not to claim ahead, because the last such claim found too few jobs.
    ahead_paused_until: Option<Instant>,
    /// Whether a wake-up has arrived since the last claim that may have found its job.
    woken: bool,
    /// When the last claim of urgent jobs began, and how long it took.
    last_urgent: Option<(Instant, Duration)>,
    /// The last poll delay; `None` after work was found.
    last_poll_delay: Option<Duration>,
    /// When to scan the head of the queue again, if the last claim did not.
    head_due: Option<Instant>,
    /// When to claim again: a rate lets the next job start, or a head scan can find one.
    again_at: Option<Instant>,
    /// In a drain: the database's time of the last claim that found nothing.
    drained_at: Option<DateTime<Utc>>,
    /// The last claim may have skipped suspects, because this worker holds one.
    pub(super) skipped_suspects: bool,
    /// The last claim may have skipped jobs of a queue that is at its limit.
    pub(super) capped: bool,
    /// When to look for leases that this process does not know about, because a claim's reply
    /// was lost.
    lost_claim_check_at: Option<Instant>,
    lost_claim_checks_left: u8,
}

impl Claimer {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let settings = &shared.settings;
        let limit_of = |queue: &String| settings.queue_concurrency.get(queue).map(|limit| *limit as usize);
        let group = |queues: Vec<String>, max_running| Group {
            queues,
            max_running,
            cursor: ClaimCursor::default(),
            ahead_cursor: ClaimCursor::default(),
            urgent_cursor: ClaimCursor::always_head(),
        };
        let mut groups = Vec::new();
        let named: Vec<String> = if settings.claims_from_all() {
            groups.push(group(Vec::new(), None));
            settings.queue_concurrency.keys().cloned().collect()
        } else {
            settings.queues.clone()
        };
        let unlimited: Vec<String> =
            named.iter().filter(|queue| limit_of(queue).is_none()).cloned().collect();
        if !unlimited.is_empty() {
            groups.push(group(unlimited, None));
        }
        for queue in &named {
            if let Some(limit) = limit_of(queue) {
                groups.push(group(vec![queue.clone()], Some(limit)));
            }
        }
        let kinds = shared.registry.kinds();
        Claimer {
            shared,
            groups,
            listed_at: None,
            first_groups: [0; Purpose::COUNT],
            kinds,
            ahead: AheadKinds::default(),
            pace: Pace::new(),
            any_kind_at: None,
            last_found: Vec::new(),
            ahead_paused_until: None,
            woken: false,
            last_urgent: None,
            last_poll_delay: None,
            head_due: None,
            again_at: None,
            drained_at: None,
            skipped_suspects: false,
            capped: false,
            lost_claim_check_at: None,
            lost_claim_checks_left: 0,
        }
    }

    pub(super) async fn claim(&mut self, wakeups: &mut Option<Wakeups>) -> Found {
        if self.lost_claim_check_at.is_some_and(|at| at <= Instant::now())
            && !self.release_unknown_leases().await
        {
            return Found::Failed;
        }
        if self.shared.contact.is_past_self_stop(&self.shared.settings) {
            // A job claimed now would be stopped immediately by the self-stop.
            return Found::Failed;
        }
        let room = self.room();
        let found = match room {
            Room { any_kind: 0, ahead: 0 } => self.claim_urgent().await,
            Room { any_kind: 0, ahead } => self.claim_ahead(ahead).await,
            Room { any_kind, ahead } => {
                for queue in wakeups.iter_mut().flat_map(Wakeups::take_arrived) {
                    self.note_queue(queue);
                }
                self.claim_any_kind(any_kind, ahead).await
            }
        };
        found.unwrap_or(Found::Failed)
    }

    /// Claims jobs of any kind, then jobs of short kinds to buffer.
    async fn claim_any_kind(&mut self, limit: usize, ahead: usize) -> Option<Found> {
        (self.skipped_suspects, self.capped, self.head_due) = (false, false, None);
        self.again_at = None;
        (self.any_kind_at, self.woken) = (Some(Instant::now()), false);
        let claimed = self.claim_from_groups(Purpose::AnyKind, limit).await?;
        if ahead > 0 && claimed.jobs >= limit {
            return self.claim_ahead(ahead).await;
        }
        Some(match (claimed.jobs > 0, claimed.more) {
            (_, true) => Found::More,
            (true, false) => Found::Some,
            (false, false) => Found::Nothing,
        })
    }

    /// Claims jobs of short kinds to buffer. Jobs of other kinds may be due, but there is no room
    /// for them.
    async fn claim_ahead(&mut self, limit: usize) -> Option<Found> {
        let claimed = self.claim_from_groups(Purpose::Ahead, limit).await?;
        if claimed.more {
            return Some(Found::More);
        }
        self.ahead_paused_until = Some(Instant::now() + AHEAD_PAUSE);
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
            self.claim_from_groups(Purpose::Urgent(min_priority), limit).await?;
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

    /// In a drain: whether due jobs wait until a claim may take them, because of a rate. Not if the
    /// database's clock has not moved since the last claim: tests stop it.
    pub(super) async fn has_paused_jobs(&mut self) -> bool {
        let scanned_at = self.groups.iter().filter_map(|group| group.cursor.scanned_at()).max();
        let is_stopped = scanned_at.is_some() && self.drained_at == scanned_at;
        self.drained_at = scanned_at;
        if self.again_at.is_none() || is_stopped {
            return false;
        }
        // A rate is remembered for a while after the last job.
        match self.shared.client.overdue().await {
            Ok(overdue) => {
                overdue.iter().any(|(queue, _)| self.groups.iter().any(|group| group.queues.contains(queue)))
            }
            Err(error) => {
                tracing::warn!(%error, "could not look for due jobs; retrying");
                true
            }
        }
    }

    /// While there is no room: when to release jobs or to look for urgent ones.
    pub(super) fn next_check(&self) -> Option<Instant> {
        let overdue_at = self.shared.buffer.overdue_at(MAX_BUFFER_WAIT)?;
        Some(overdue_at.min(self.urgent_at()))
    }

    /// Whether a wake-up makes a difference while there is no room: its job may be urgent, or of a
    /// kind that is claimed ahead.
    pub(super) fn listens_while_full(&self) -> bool {
        !self.woken && (self.ahead_paused_until.is_some() || self.shared.buffer.len() > 0)
    }

    /// In a worker of every queue, lists the queues with waiting jobs, from time to time: a wake-up
    /// names its queue, but it can be lost. Returns `None` if that failed.
    async fn list_queues(&mut self) -> Option<()> {
        let shared = self.shared.clone();
        let is_recent = self.listed_at.is_some_and(|at| at.elapsed() < shared.settings.poll_interval);
        // In a drain, the claim that decides whether it is complete must see every queue.
        let is_needed = !is_recent || shared.phase() == Phase::Draining;
        if !shared.settings.claims_from_all() || !is_needed {
            return Some(());
        }
        let listed_at = Instant::now();
        match shared.client.waiting_queues().await {
            Ok(waiting) => {
                if self.groups[0].queues.len() > waiting.len() + MAX_IDLE_QUEUES {
                    self.groups[0].queues.clear();
                }
                waiting.into_iter().for_each(|queue| self.add_queue(queue));
                self.listed_at = Some(listed_at);
                Some(())
            }
            Err(error) => {
                tracing::warn!(%error, worker_id = %shared.worker_id(), "could not list the queues; retrying");
                None
            }
        }
    }

    /// Handles the name of a wake-up's queue, which may be new to a worker of every queue.
    fn note_queue(&mut self, queue: Option<String>) {
        if self.shared.settings.claims_from_all() {
            match queue {
                Some(queue) => self.add_queue(queue),
                None => self.listed_at = None,
            }
        }
    }

    /// Adds a queue to those of the first group, unless it has a group of its own.
    fn add_queue(&mut self, queue: String) {
        if self.shared.settings.queue_concurrency.contains_key(&queue) {
            return;
        }
        let known = &mut self.groups[0].queues;
        if let Err(at) = known.binary_search(&queue) {
            known.insert(at, queue);
        }
    }

    /// Claims from the groups in turn. Returns `None` if a claim failed.
    async fn claim_from_groups(&mut self, purpose: Purpose, limit: usize) -> Option<Claimed> {
        self.list_queues().await?;
        let (mut total, mut left) = (Claimed::default(), limit);
        let (first, count) = (self.first_groups[purpose.index()], self.groups.len());
        let mut next_first = (first + 1) % count;
        for nth in (first..count).chain(0..first) {
            if self.shared.phase() >= Phase::Finishing {
                break;
            }
            if left == 0 {
                // This group got nothing, so it comes first in the next claim. A backlog in
                // another queue cannot keep its jobs waiting.
                next_first = nth;
                break;
            }
            let claimed = self.claim_from_group(nth, purpose, left).await?;
            left -= claimed.jobs.min(left);
            total.jobs += claimed.jobs;
            total.more |= claimed.more;
        }
        self.first_groups[purpose.index()] = next_first;
        if total.jobs > 0 {
            self.last_poll_delay = None;
        }
        Some(total)
    }

    async fn claim_from_group(&mut self, nth: usize, purpose: Purpose, limit: usize) -> Option<Claimed> {
        let shared = self.shared.clone();
        let group = &mut self.groups[nth];
        if group.queues.is_empty() {
            return Some(Claimed::default());
        }
        let queue_room =
            group.max_running.map(|max| max.saturating_sub(shared.held.count_in_queue(&group.queues[0])));
        let limit = limit.min(queue_room.unwrap_or(limit));
        if limit == 0 {
            self.capped = true;
            return Some(Claimed::default());
        }
        let free_slots = (shared.settings.concurrency as usize).saturating_sub(shared.buffer.busy())
            * shared.registry.jobs_per_slot();
        let free_slots = free_slots.saturating_sub(shared.buffer.len());
        let request = ClaimRequest {
            worker: shared.worker_id(),
            queues: group.queues.clone(),
            kinds: if purpose == Purpose::Ahead {
                Some(self.ahead.names.clone())
            } else {
                self.kinds.clone()
            },
            accept_flags: shared.settings.accept_flags.clone(),
            forbid_flags: shared.settings.forbid_flags.clone(),
            limit: limit as u32,
            startable: free_slots.min(limit) as u32,
            suspects: if shared.held.has_suspect() { Suspects::Leave } else { Suspects::One },
            min_priority: if let Purpose::Urgent(priority) = purpose { Some(priority) } else { None },
        };
        let cursor = match purpose {
            Purpose::AnyKind => &mut group.cursor,
            Purpose::Ahead => &mut group.ahead_cursor,
            Purpose::Urgent(_) => &mut group.urgent_cursor,
        };
        let began = Instant::now();
        let claims = match shared.client.claim(&request, cursor).await {
            Ok(claims) => claims,
            Err(error) => {
                tracing::warn!(
                    %error,
                    worker_id = %request.worker,
                    queues = ?request.queues,
                    "could not claim; retrying"
                );
                group.urgent_cursor = ClaimCursor::always_head();
                self.lost_claim_check_at = Some(began);
                self.lost_claim_checks_left = 2;
                return None;
            }
        };
        tracing::debug!(jobs = claims.jobs.len(), limit, more = claims.more, "claimed");
        shared.metrics.claimed(claims.jobs.len(), began.elapsed());
        self.pace.claimed(began.elapsed());
        // If the head has not been scanned yet, start the jobs found so far before scanning
        // it.
        let head_due = cursor.head_due(began, !claims.jobs.is_empty());
        let more = claims.more && (claims.jobs.len() >= limit || head_due.is_none());
        self.skipped_suspects |=
            request.suspects == Suspects::Leave || claims.jobs.iter().any(|job| job.interruptions() > 0);
        self.capped |= cursor.has_limited_queue() || queue_room.is_some();
        if purpose == Purpose::AnyKind {
            self.head_due = self.head_due.into_iter().chain(head_due).min();
            let again_at = claims.again_in.map(|again_in| began + again_in);
            self.again_at = self.again_at.into_iter().chain(again_at).min();
        }
        let jobs = claims.jobs.len();
        self.accept(&request, claims);
        Some(Claimed { jobs, more })
    }

    /// Passes claimed jobs to the runners.
    fn accept(&mut self, request: &ClaimRequest, claims: Claims) {
        if claims.jobs.is_empty() {
            return;
        }
        let shared = self.shared.clone();
        let received_at = Instant::now();
        let mut attempts = Vec::with_capacity(claims.jobs.len());
        self.last_found.clear();
        for job in claims.jobs {
            let kind = self.count_found(job.kind());
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
        if request.worker != shared.worker_id() {
            // The worker was declared dead during the claim, and heartbeats under the new id do
            // not cover these leases.
            attempts.iter().for_each(|attempt| attempt.control.stop(StopReason::LeaseLost));
        }
        if shared.phase() < Phase::Finishing {
            return shared.buffer.push(attempts);
        }
        for attempt in attempts {
            shared.release(attempt);
        }
    }

    /// Counts a claimed job of this kind in `last_found`.
    fn count_found(&mut self, kind: &str) -> Arc<Kind> {
        let known = self.last_found.iter_mut().rev().find(|(known, _)| known.name == kind);
        if let Some((known, jobs)) = known {
            *jobs += 1;
            return known.clone();
        }
        let kind = self.shared.metrics.kind(kind);
        self.last_found.push((kind.clone(), 1));
        kind
    }

    /// Handles a wake-up: there is work again.
    pub(super) fn on_wakeup(&mut self, queue: Option<String>) {
        self.note_queue(queue);
        self.last_poll_delay = None;
        self.woken = true;
        self.ahead_paused_until = None;
        for group in &mut self.groups {
            group.cursor.note_wake_up();
            group.ahead_cursor.note_wake_up();
        }
    }

    /// Resets the cursors, so that the next claim sees every due job: it decides whether the
    /// drain is complete.
    pub(super) fn restart_at_head(&mut self) {
        for group in &mut self.groups {
            (group.cursor, group.ahead_cursor) = Default::default();
        }
    }

    /// How many more jobs may be claimed now.
    fn room(&mut self) -> Room {
        let shared = self.shared.clone();
        let buffer = &shared.buffer;
        let concurrency = shared.settings.concurrency as usize;
        let (busy, waiting) = (buffer.busy(), buffer.len());
        let occupancy = shared.slots.occupancy();
        self.ahead.update(&shared, self.kinds.as_deref(), &occupancy);
        let free_soon = concurrency.saturating_sub(occupancy.long);
        let target = self.buffer_target(free_soon);
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
        if self.ahead.includes_all || target == 0 {
            return Room { any_kind: room, ahead: 0 };
        }
        let is_due = self.any_kind_at.is_none_or(|at| at.elapsed() >= ANY_KIND_INTERVAL);
        let soon = if is_due { (free_soon * batch).saturating_sub(buffer.waiting_long()) } else { 0 };
        let any_kind = free.saturating_sub(waiting).max(soon).min(room);
        Room { any_kind, ahead: room - any_kind }
    }

    /// How many jobs to buffer: as many as the handlers will end before the next claim returns,
    /// and no more than can start in time.
    fn buffer_target(&mut self, free_soon: usize) -> usize {
        let target = self.pace.buffer_target(self.shared.buffer.ended(), &self.shared.settings);
        let is_paused = self.ahead_paused_until.is_some_and(|until| Instant::now() < until);
        if !is_paused {
            self.ahead_paused_until = None;
        }
        if is_paused || self.ahead.names.is_empty() {
            return 0;
        }
        target.min(self.startable(free_soon))
    }

    /// How many jobs this many slots can start in time, if the next jobs are like the last ones.
    fn startable(&self, slots: usize) -> usize {
        let (mut time, mut jobs) = (Duration::ZERO, 0);
        for (kind, found) in &self.last_found {
            let known = kind.run_time.of_job().filter(|_| self.ahead.has(kind.index));
            if let Some(run_time) = known {
                time += run_time * *found as u32;
                jobs += found;
            }
        }
        if jobs == 0 {
            return slots;
        }
        let available = START_WITHIN.as_secs_f64() * slots as f64;
        // A division by zero is infinite, and the conversion limits it.
        (available / (time.as_secs_f64() / jobs as f64)) as usize
    }

    /// Releases leases that the database holds for this worker but the worker does not know
    /// about. Returns false if the database cannot be reached.
    async fn release_unknown_leases(&mut self) -> bool {
        let worker_id = self.shared.worker_id();
        let held = self.shared.held.leases(worker_id);
        match self.shared.client.release_unknown(worker_id, &held).await {
            Ok(released) => {
                if released > 0 {
                    tracing::info!(%worker_id, jobs = released, "released jobs whose claim's reply was lost");
                }
                // The server may commit the claim after the client gave up on it, so check
                // a second time later.
                self.lost_claim_checks_left -= 1;
                self.lost_claim_check_at =
                    (self.lost_claim_checks_left > 0).then(|| Instant::now() + LOST_CLAIM_COMMIT_TIME);
                true
            }
            Err(error) => {
                tracing::warn!(%error, %worker_id, "could not check for leases of a lost claim; retrying");
                false
            }
        }
    }

    /// How long to wait before claiming again if no wake-up arrives.
    pub(super) fn next_poll_delay(&mut self) -> Duration {
        let settings = &self.shared.settings;
        let next = match self.last_poll_delay {
            None => settings.poll_interval,
            Some(last) => last.saturating_mul(2).min(settings.max_poll_interval),
        };
        // A job can start or be found sooner.
        let next = match self.again_at {
            Some(at) => next.min(at.saturating_duration_since(Instant::now()).max(MIN_RATE_PAUSE)),
            None => next,
        };
        // A claim does not scan the head every time. The job behind the last wake-up may
        // be there, so do not let it wait for the next poll.
        if let Some(due) = self.head_due.take().map(|at| at.saturating_duration_since(Instant::now()))
            && due < next
        {
            return due;
        }
        if self.again_at.is_none() {
            self.last_poll_delay = Some(next);
        }
        next
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
