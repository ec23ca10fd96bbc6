//! Claim: decides when to claim and how many jobs. The worker claims as many due jobs as it
//! has free slots, and more when handlers end faster than a claim takes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::context::{Attempt, StopReason};
use super::shared::{Phase, Shared};
use crate::lifecycle::Ending;
use crate::store::{ClaimCursor, ClaimRequest, Suspects, Wakeups};

/// The maximum number of jobs in one claim.
const MAX_CLAIM: usize = 1000;
/// The maximum number of jobs buffered in this process beyond the free slots.
const MAX_BUFFER: usize = 2000;
/// While more ended jobs than this wait to be settled, nothing is claimed.
const MAX_UNSETTLED: usize = 4000;
/// A buffered job that has not started after this fraction (one quarter) of `stale_after` is
/// released.
const BUFFER_WAIT_DIVISOR: u32 = 4;
/// The pause after a failed claim.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);
/// The server may still commit a claim within this time after the client gave up on it.
const LOST_CLAIM_COMMIT_TIME: Duration = Duration::from_secs(60);
/// In a drain, how soon to claim again while the last jobs run.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Claims until the worker finishes; in a drain, until no job is due.
pub(super) async fn run(shared: Arc<Shared>) {
    if shared.registry.kinds().is_some_and(|kinds| kinds.is_empty()) && shared.phase() == Phase::Working {
        // Without handlers the worker only does upkeep.
        return shared.reached(Phase::Finishing).await;
    }
    // Subscribe before claiming: a job enqueued between the two would otherwise
    // wait a full poll interval.
    let mut wakeups = subscribe(&shared).await;
    let mut claimer = Claimer::new(shared.clone());
    loop {
        if shared.phase() >= Phase::Finishing {
            return;
        }
        if wakeups.is_none() {
            wakeups = subscribe(&shared).await;
        }
        // Checked before the claim: a job settled during the claim may be due again.
        let idle = shared.held.len() == 0;
        if idle && shared.phase() == Phase::Draining {
            claimer.restart_at_head();
        }
        if let Some(wakeups) = &mut wakeups {
            wakeups.discard_arrived();
        }
        // Registered before the claim: jobs settled during the claim may free slots.
        let settled = shared.held.settled.notified();
        tokio::pin!(settled);
        settled.as_mut().enable();
        // Not cancelled by a stop: claimed jobs must be released before the worker
        // signs off.
        match claimer.claim().await {
            Found::Full => {
                tokio::select! {
                    () = shared.buffer.demand.notified() => {}
                    () = &mut settled => {}
                    () = shared.reached(Phase::Finishing) => return,
                    () = tokio::time::sleep(claimer.max_buffer_wait()) => {}
                }
            }
            Found::More => {}
            Found::Nothing if shared.phase() == Phase::Draining && idle => {
                shared.phase.send_if_modified(|phase| {
                    let draining = *phase == Phase::Draining;
                    if draining {
                        *phase = Phase::Finishing;
                    }
                    draining
                });
                return;
            }
            Found::Some | Found::Nothing if shared.phase() == Phase::Draining => {
                tokio::select! {
                    () = &mut settled => {}
                    () = tokio::time::sleep(DRAIN_POLL_INTERVAL) => {}
                    () = shared.reached(Phase::Finishing) => return,
                }
            }
            Found::Some | Found::Nothing => {
                tokio::select! {
                    () = woken(&mut wakeups, &shared.settings.queues) => claimer.on_wakeup(),
                    () = suspects_settled(&shared, claimer.skipped_suspects) => {}
                    () = &mut settled, if claimer.capped => {}
                    () = tokio::time::sleep(claimer.next_poll_delay()) => {}
                    () = shared.reached(Phase::Finishing) => return,
                }
            }
            Found::Failed => {
                if !shared.sleep_unless(Phase::Finishing, PAUSE_AFTER_ERROR).await {
                    return;
                }
            }
        }
        claimer.release_overdue_jobs();
    }
}

async fn subscribe(shared: &Shared) -> Option<Wakeups> {
    match shared.client.subscribe().await {
        Ok(wakeups) => Some(wakeups),
        Err(error) => {
            tracing::warn!(%error, "cannot subscribe to wake-ups; falling back to polling");
            None
        }
    }
}

/// Waits until this worker holds no suspect, if the last claim may have skipped other suspects
/// because it held one; otherwise waits forever.
async fn suspects_settled(shared: &Shared, skipped_suspects: bool) {
    if !skipped_suspects {
        return std::future::pending().await;
    }
    loop {
        let settled = shared.held.settled.notified();
        if !shared.held.has_suspect() {
            return;
        }
        settled.await;
    }
}

/// Waits for a wake-up of one of the worker's queues.
async fn woken(wakeups: &mut Option<Wakeups>, queues: &[String]) {
    let Some(wakeups) = wakeups else { return std::future::pending().await };
    loop {
        match wakeups.next().await {
            Some(queue) if !queues.contains(&queue) => {}
            _ => return,
        }
    }
}

/// The result of a claim.
enum Found {
    /// Nothing was claimed, because there is no room.
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
    cursor: ClaimCursor,
}

struct Claimer {
    shared: Arc<Shared>,
    groups: Vec<Group>,
    kinds: Option<Vec<String>>,
    pace: Pace,
    /// The last poll delay; `None` after work was found.
    last_poll_delay: Option<Duration>,
    /// When to scan the head of the queue again, if the last claim did not.
    head_due: Option<Instant>,
    /// The last claim may have skipped suspects, because this worker holds one.
    skipped_suspects: bool,
    /// The last claim may have skipped jobs of a queue that is at its limit.
    capped: bool,
    /// When to look for leases that this process does not know about, because a claim's reply
    /// was lost.
    lost_claim_check_at: Option<Instant>,
    lost_claim_checks_left: u8,
}

impl Claimer {
    fn new(shared: Arc<Shared>) -> Self {
        let settings = &shared.settings;
        let limit_of = |queue: &String| settings.queue_concurrency.get(queue).map(|limit| *limit as usize);
        let group =
            |queues: Vec<String>, max_running| Group { queues, max_running, cursor: ClaimCursor::default() };
        let unlimited: Vec<String> =
            settings.queues.iter().filter(|queue| limit_of(queue).is_none()).cloned().collect();
        let mut groups = Vec::new();
        if !unlimited.is_empty() {
            groups.push(group(unlimited, None));
        }
        for queue in &settings.queues {
            if let Some(limit) = limit_of(queue) {
                groups.push(group(vec![queue.clone()], Some(limit)));
            }
        }
        let kinds = shared.registry.kinds();
        Claimer {
            shared,
            groups,
            kinds,
            pace: Pace::new(),
            last_poll_delay: None,
            head_due: None,
            skipped_suspects: false,
            capped: false,
            lost_claim_check_at: None,
            lost_claim_checks_left: 0,
        }
    }

    async fn claim(&mut self) -> Found {
        if self.lost_claim_check_at.is_some_and(|at| at <= Instant::now())
            && !self.release_unknown_leases().await
        {
            return Found::Failed;
        }
        let shared = self.shared.clone();
        if shared.contact.is_past_self_stop(&shared.settings) {
            // A job claimed now would be stopped immediately by the self-stop.
            return Found::Failed;
        }
        let mut room = self.room();
        if room == 0 {
            return Found::Full;
        }
        let (mut any, mut more) = (false, false);
        let started = Instant::now();
        (self.skipped_suspects, self.capped, self.head_due) = (false, false, None);
        for group in &mut self.groups {
            if shared.phase() >= Phase::Finishing {
                break;
            }
            let queue_room =
                group.max_running.map(|max| max.saturating_sub(shared.held.count_in_queue(&group.queues[0])));
            let limit = room.min(queue_room.unwrap_or(room));
            if limit == 0 {
                self.capped = true;
                continue;
            }
            let request = ClaimRequest {
                worker: shared.worker_id(),
                queues: group.queues.clone(),
                kinds: self.kinds.clone(),
                accept_flags: shared.settings.accept_flags.clone(),
                forbid_flags: shared.settings.forbid_flags.clone(),
                limit: limit as u32,
                suspects: if shared.held.has_suspect() { Suspects::Leave } else { Suspects::One },
            };
            let began = Instant::now();
            match shared.client.claim(&request, &mut group.cursor).await {
                Ok(claims) => {
                    tracing::debug!(jobs = claims.jobs.len(), more = claims.more, "claimed");
                    shared.metrics.claimed(claims.jobs.len(), began.elapsed());
                    self.pace.claimed(began.elapsed());
                    room -= claims.jobs.len().min(room);
                    any |= !claims.jobs.is_empty();
                    // If the head has not been scanned yet, start the jobs found so far
                    // before scanning it.
                    let head_due = group.cursor.head_due(started, !claims.jobs.is_empty());
                    more |= claims.more && (claims.jobs.len() >= limit || head_due.is_none());
                    self.skipped_suspects |= request.suspects == Suspects::Leave
                        || claims.jobs.iter().any(|job| job.interruptions() > 0);
                    let attempt = |job| Attempt::new(job, shared.client.clone(), shared.progress.clone());
                    let attempts: Vec<Arc<Attempt>> = claims.jobs.into_iter().map(attempt).collect();
                    shared.held.insert(&attempts);
                    if request.worker != shared.worker_id() {
                        // The worker was declared dead during the claim, and heartbeats
                        // under the new id do not cover these leases.
                        attempts.iter().for_each(|attempt| attempt.control.stop(StopReason::LeaseLost));
                    }
                    if shared.phase() >= Phase::Finishing {
                        for attempt in attempts {
                            shared.report(attempt, Ending::Released, None);
                        }
                    } else {
                        shared.buffer.push(attempts);
                    }
                    self.capped |= group.cursor.has_limited_queue() || queue_room.is_some();
                    self.head_due = self.head_due.into_iter().chain(head_due).min();
                }
                Err(error) => {
                    tracing::warn!(
                        %error,
                        worker_id = %request.worker,
                        queues = ?request.queues,
                        "could not claim; retrying"
                    );
                    self.lost_claim_check_at = Some(began);
                    self.lost_claim_checks_left = 2;
                    return Found::Failed;
                }
            }
        }
        if any {
            self.last_poll_delay = None;
        }
        match (any, more) {
            (_, true) => Found::More,
            (true, false) => Found::Some,
            (false, false) => Found::Nothing,
        }
    }

    /// Handles a wake-up: there is work again.
    fn on_wakeup(&mut self) {
        self.last_poll_delay = None;
        self.groups.iter_mut().for_each(|group| group.cursor.note_wake_up());
    }

    /// Resets the cursors, so that the next claim sees every due job: it decides whether the
    /// drain is complete.
    fn restart_at_head(&mut self) {
        self.groups.iter_mut().for_each(|group| group.cursor = ClaimCursor::default());
    }

    /// How many more jobs may be claimed now.
    fn room(&mut self) -> usize {
        let buffer = &self.shared.buffer;
        let (busy, waiting) = (buffer.busy(), buffer.len());
        let target = self.pace.buffer_target(buffer.ended(), &self.shared.settings);
        buffer.set_low_water(target / 2);
        let unsettled = self.shared.held.len().saturating_sub(busy + waiting);
        // A slot whose handler takes batches has room for a whole batch.
        let batch = self.shared.registry.jobs_per_slot();
        let free = (self.shared.settings.concurrency as usize).saturating_sub(busy) * batch;
        let wanted = (free + target).saturating_sub(waiting);
        // Refill only when the buffer is half empty, so that claims stay large.
        if unsettled > MAX_UNSETTLED || (waiting > target / 2 && waiting > 0) {
            return 0;
        }
        wanted.min(MAX_CLAIM)
    }

    /// Releases leases that the database holds for this worker but the worker does not know
    /// about. Returns false if the database cannot be reached.
    async fn release_unknown_leases(&mut self) -> bool {
        let worker_id = self.shared.worker_id();
        let held = self.shared.held.leases(worker_id);
        match self.shared.client.release_unknown(worker_id, &held, Duration::ZERO).await {
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
    fn next_poll_delay(&mut self) -> Duration {
        let settings = &self.shared.settings;
        let next = match self.last_poll_delay {
            None => settings.poll_interval,
            Some(last) => last.saturating_mul(2).min(settings.max_poll_interval),
        };
        // A claim does not scan the head every time. The job behind the last wake-up may
        // be there, so do not let it wait for the next poll.
        if let Some(due) = self.head_due.take().map(|at| at.saturating_duration_since(Instant::now()))
            && due < next
        {
            return due;
        }
        self.last_poll_delay = Some(next);
        next
    }

    /// How long a claimed job may wait for a slot.
    fn max_buffer_wait(&self) -> Duration {
        self.shared.settings.stale_after / BUFFER_WAIT_DIVISOR
    }

    fn release_overdue_jobs(&self) {
        for attempt in self.shared.buffer.take_overdue(self.max_buffer_wait()) {
            self.shared.report(attempt, Ending::Released, None);
        }
    }
}

/// Computes how many jobs to buffer: as many as the handlers will end before the next claim
/// returns.
struct Pace {
    measured_at: Instant,
    ended: u64,
    per_second: f64,
    /// Moving average of how long a claim takes.
    claim_time: Duration,
}

impl Pace {
    const WINDOW: Duration = Duration::from_millis(5);

    fn new() -> Self {
        Pace { measured_at: Instant::now(), ended: 0, per_second: 0.0, claim_time: Duration::from_millis(5) }
    }

    fn claimed(&mut self, took: Duration) {
        self.claim_time = (self.claim_time * 3 + took) / 4;
    }

    fn buffer_target(&mut self, ended: u64, settings: &super::Settings) -> usize {
        let elapsed = self.measured_at.elapsed();
        if elapsed >= Pace::WINDOW {
            let rate = (ended - self.ended) as f64 / elapsed.as_secs_f64();
            self.per_second = (self.per_second + rate) / 2.0;
            (self.measured_at, self.ended) = (Instant::now(), ended);
        }
        let ahead = (self.claim_time * 4).clamp(Duration::from_millis(20), Duration::from_millis(200));
        let ahead = ahead.min(settings.stale_after / 20);
        ((self.per_second * ahead.as_secs_f64()) as usize).min(MAX_BUFFER)
    }
}
