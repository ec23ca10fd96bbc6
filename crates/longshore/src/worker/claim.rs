//! Claim: as many due jobs as there are free slots, and a few more when the
//! handlers are so quick that a claim takes longer than they do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::context::{Attempt, StopReason};
use super::shared::{Phase, Shared};
use crate::lifecycle::Ending;
use crate::store::{ClaimCursor, ClaimRequest, Suspects, Wakeups};

/// The most that one claim asks for.
const MAX_CLAIM: usize = 1000;
/// The most that wait in this process beyond the free slots.
const MAX_BUFFER: usize = 2000;
/// When so many have run and wait to be settled, no more are claimed.
const MAX_UNSETTLED: usize = 4000;
/// A buffered job that has not begun after this part of the threshold goes back.
const BUFFERED_AT_MOST: u32 = 4;
/// How long a claim that failed waits before the next.
const AFTER_ERROR: Duration = Duration::from_millis(500);
/// A claim that was given up may still be stored within this time.
const LOST_CLAIM_STORED_WITHIN: Duration = Duration::from_secs(60);

/// In a drain, how soon to look again while the last jobs run.
const DRAIN_LOOKS_EVERY: Duration = Duration::from_millis(50);

/// Claims until the worker finishes; in a drain, until nothing is due.
pub(super) async fn run(shared: Arc<Shared>) {
    if shared.registry.kinds().is_some_and(|kinds| kinds.is_empty()) && shared.phase() == Phase::Working {
        // Without handlers it is here for the upkeep alone.
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
        // Before the claim: what is settled meanwhile may be due again.
        let idle = shared.held.len() == 0;
        if idle && shared.phase() == Phase::Draining {
            claimer.start_at_the_head();
        }
        if let Some(wakeups) = &mut wakeups {
            wakeups.forget_arrived();
        }
        // From before the claim: what is settled meanwhile may make room.
        let settled = shared.held.settled.notified();
        tokio::pin!(settled);
        settled.as_mut().enable();
        // Not dropped when the worker is told to stop: what it has claimed must
        // go back before the worker signs off.
        match claimer.claim().await {
            Found::Full => {
                tokio::select! {
                    () = shared.buffer.demand.notified() => {}
                    () = &mut settled => {}
                    () = shared.reached(Phase::Finishing) => return,
                    () = tokio::time::sleep(claimer.longest_in_the_buffer()) => {}
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
                    () = tokio::time::sleep(DRAIN_LOOKS_EVERY) => {}
                    () = shared.reached(Phase::Finishing) => return,
                }
            }
            Found::Some | Found::Nothing => {
                tokio::select! {
                    () = woken(&mut wakeups, &shared.settings.queues) => claimer.announced(),
                    () = free_of_suspects(&shared, claimer.left_suspects) => {}
                    () = &mut settled, if claimer.capped => {}
                    () = tokio::time::sleep(claimer.rest()) => {}
                    () = shared.reached(Phase::Finishing) => return,
                }
            }
            Found::Failed => {
                if !shared.sleep_unless(Phase::Finishing, AFTER_ERROR).await {
                    return;
                }
            }
        }
        claimer.give_back_what_waits_too_long();
    }
}

async fn subscribe(shared: &Shared) -> Option<Wakeups> {
    match shared.client.subscribe().await {
        Ok(wakeups) => Some(wakeups),
        Err(error) => {
            tracing::warn!(%error, "cannot listen for new work; polling finds it");
            None
        }
    }
}

/// Waits until no suspect runs here, if others may have been left where they are
/// because of one.
async fn free_of_suspects(shared: &Shared, left: bool) {
    if !left {
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

/// Waits until one of our queues has work.
async fn woken(wakeups: &mut Option<Wakeups>, queues: &[String]) {
    let Some(wakeups) = wakeups else { return std::future::pending().await };
    loop {
        match wakeups.next().await {
            Some(queue) if !queues.contains(&queue) => {}
            _ => return,
        }
    }
}

/// What a claim found.
enum Found {
    /// There is no room for more.
    Full,
    /// As much as was asked for, and there may be more.
    More,
    /// Some, but no more are due.
    Some,
    Nothing,
    Failed,
}

/// Queues that are claimed from together.
struct Group {
    queues: Vec<String>,
    /// How many of its jobs may run here at once, where that is limited.
    most: Option<usize>,
    cursor: ClaimCursor,
}

struct Claimer {
    shared: Arc<Shared>,
    groups: Vec<Group>,
    kinds: Option<Vec<String>>,
    pace: Pace,
    /// How long the last rest was; `None` after work.
    rested: Option<Duration>,
    /// When to look at the head of the queue, where the last claim did not.
    head_due: Option<Instant>,
    /// The last claim may have passed over suspects, because one runs here.
    left_suspects: bool,
    /// The last claim may have passed over jobs of a queue of which no more may
    /// run.
    capped: bool,
    /// When to look for leases that this process does not know of: a claim's
    /// answer was lost.
    look_for_lost: Option<Instant>,
    looks_for_lost: u8,
}

impl Claimer {
    fn new(shared: Arc<Shared>) -> Self {
        let settings = &shared.settings;
        let limited = |queue: &String| settings.queue_concurrency.get(queue).map(|most| *most as usize);
        let group = |queues: Vec<String>, most| Group { queues, most, cursor: ClaimCursor::default() };
        let free: Vec<String> =
            settings.queues.iter().filter(|queue| limited(queue).is_none()).cloned().collect();
        let mut groups = Vec::new();
        if !free.is_empty() {
            groups.push(group(free, None));
        }
        for queue in &settings.queues {
            if let Some(most) = limited(queue) {
                groups.push(group(vec![queue.clone()], Some(most)));
            }
        }
        let kinds = shared.registry.kinds();
        Claimer {
            shared,
            groups,
            kinds,
            pace: Pace::new(),
            rested: None,
            head_due: None,
            left_suspects: false,
            capped: false,
            look_for_lost: None,
            looks_for_lost: 0,
        }
    }

    async fn claim(&mut self) -> Found {
        if self.look_for_lost.is_some_and(|at| at <= Instant::now()) && !self.give_back_unknown().await {
            return Found::Failed;
        }
        let shared = self.shared.clone();
        if shared.contact.is_out_of_reach(&shared.settings) {
            // What is claimed now would be stopped at once.
            return Found::Failed;
        }
        let mut room = self.room();
        if room == 0 {
            return Found::Full;
        }
        let (mut any, mut more) = (false, false);
        let looked = Instant::now();
        (self.left_suspects, self.capped, self.head_due) = (false, false, None);
        for group in &mut self.groups {
            if shared.phase() >= Phase::Finishing {
                break;
            }
            let most = group.most.map(|most| most.saturating_sub(shared.held.of_queue(&group.queues[0])));
            let limit = room.min(most.unwrap_or(room));
            if limit == 0 {
                self.capped = true;
                continue;
            }
            let request = ClaimRequest {
                worker: shared.worker(),
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
                    // Whether the head is still to be looked at. What was found
                    // should start before that.
                    let head_due = group.cursor.head_due(looked, !claims.jobs.is_empty());
                    more |= claims.more && (claims.jobs.len() >= limit || head_due.is_none());
                    self.left_suspects |= request.suspects == Suspects::Leave
                        || claims.jobs.iter().any(|job| job.interruptions() > 0);
                    let attempt = |job| Attempt::new(job, shared.client.clone(), shared.progress.clone());
                    let attempts: Vec<Arc<Attempt>> = claims.jobs.into_iter().map(attempt).collect();
                    shared.held.insert(&attempts);
                    if request.worker != shared.worker() {
                        // Declared dead meanwhile: the beat no longer speaks of
                        // these.
                        attempts.iter().for_each(|attempt| attempt.control.stop(StopReason::LeaseLost));
                    }
                    if shared.phase() >= Phase::Finishing {
                        for attempt in attempts {
                            shared.report(attempt, Ending::Released, None);
                        }
                    } else {
                        shared.buffer.push(attempts);
                    }
                    self.capped |= group.cursor.knows_a_limit() || most.is_some();
                    self.head_due = self.head_due.into_iter().chain(head_due).min();
                }
                Err(error) => {
                    tracing::warn!(%error, "could not claim; trying again");
                    self.look_for_lost = Some(began);
                    self.looks_for_lost = 2;
                    return Found::Failed;
                }
            }
        }
        if any {
            self.rested = None;
        }
        match (any, more) {
            (_, true) => Found::More,
            (true, false) => Found::Some,
            (false, false) => Found::Nothing,
        }
    }

    /// There is work again.
    fn announced(&mut self) {
        self.rested = None;
        self.groups.iter_mut().for_each(|group| group.cursor.announce());
    }

    /// Leaves nothing behind the cursors: this claim decides whether any is due.
    fn start_at_the_head(&mut self) {
        self.groups.iter_mut().for_each(|group| group.cursor = ClaimCursor::default());
    }

    /// How many more may be claimed now.
    fn room(&mut self) -> usize {
        let buffer = &self.shared.buffer;
        let (busy, waiting) = (buffer.busy(), buffer.len());
        let target = self.pace.buffer(buffer.ended(), &self.shared.settings);
        buffer.set_low(target / 2);
        let unsettled = self.shared.held.len().saturating_sub(busy + waiting);
        // A slot whose handler takes batches has room for one.
        let batch = self.shared.registry.batch();
        let free = (self.shared.settings.concurrency as usize).saturating_sub(busy) * batch;
        let wanted = (free + target).saturating_sub(waiting);
        // Half of the buffer at a time, so that claims stay large.
        if unsettled > MAX_UNSETTLED || (waiting > target / 2 && waiting > 0) {
            return 0;
        }
        wanted.min(MAX_CLAIM)
    }

    async fn give_back_unknown(&mut self) -> bool {
        let worker = self.shared.worker();
        let held = self.shared.held.leases(worker);
        match self.shared.client.release_unknown(worker, &held, Duration::ZERO).await {
            Ok(given_back) => {
                if given_back > 0 {
                    tracing::info!(
                        jobs = given_back,
                        "gave back jobs whose claim was answered into the void"
                    );
                }
                // The server may have stored the claim after we gave it up.
                self.looks_for_lost -= 1;
                self.look_for_lost =
                    (self.looks_for_lost > 0).then(|| Instant::now() + LOST_CLAIM_STORED_WITHIN);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "cannot reach the database");
                false
            }
        }
    }

    /// How long to wait for work that nobody announces.
    fn rest(&mut self) -> Duration {
        let settings = &self.shared.settings;
        let next = match self.rested {
            None => settings.poll_interval,
            Some(last) => last.saturating_mul(2).min(settings.max_poll_interval),
        };
        // A claim keeps from looking at the head too often. What woke us may
        // lie there, so it must not wait for the next poll.
        if let Some(due) = self.head_due.take().map(|at| at.saturating_duration_since(Instant::now()))
            && due < next
        {
            return due;
        }
        self.rested = Some(next);
        next
    }

    /// How long a claimed job may wait for a slot.
    fn longest_in_the_buffer(&self) -> Duration {
        self.shared.settings.stale_after / BUFFERED_AT_MOST
    }

    fn give_back_what_waits_too_long(&self) {
        for attempt in self.shared.buffer.take_older(self.longest_in_the_buffer()) {
            self.shared.report(attempt, Ending::Released, None);
        }
    }
}

/// How many jobs to keep at hand: what the handlers will have done by the time
/// the next claim is back.
struct Pace {
    looked: Instant,
    ended: u64,
    per_second: f64,
    claim: Duration,
}

impl Pace {
    const WINDOW: Duration = Duration::from_millis(5);

    fn new() -> Self {
        Pace { looked: Instant::now(), ended: 0, per_second: 0.0, claim: Duration::from_millis(5) }
    }

    fn claimed(&mut self, took: Duration) {
        self.claim = (self.claim * 3 + took) / 4;
    }

    fn buffer(&mut self, ended: u64, settings: &super::Settings) -> usize {
        let passed = self.looked.elapsed();
        if passed >= Pace::WINDOW {
            let rate = (ended - self.ended) as f64 / passed.as_secs_f64();
            self.per_second = (self.per_second + rate) / 2.0;
            (self.looked, self.ended) = (Instant::now(), ended);
        }
        let ahead = (self.claim * 4).clamp(Duration::from_millis(20), Duration::from_millis(200));
        let ahead = ahead.min(settings.stale_after / 20);
        ((self.per_second * ahead.as_secs_f64()) as usize).min(MAX_BUFFER)
    }
}
