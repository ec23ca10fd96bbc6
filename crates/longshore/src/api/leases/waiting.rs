//! What a lease call does until it returns: it claims jobs, waits for work, for cancels and for lost
//! leases, and keeps its worker alive.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::sessions::{ClaimState, ClaimingCall, Session};
use super::*;
use crate::store::{CancelNotices, ClaimRequest, Claimed, LiveLease, Suspects, Wakeups};

/// How soon a waiting call polls for work without a wake-up. The interval doubles up to the
/// second value, as in a Rust worker.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// How long a call waits at least, although another call that waits has arrived.
const MIN_WAIT: Duration = Duration::from_secs(1);
/// The maximum number of bytes of the jobs in one response; at least one job is returned.
pub(super) const MAX_JOB_BYTES: usize = 16 * 1024 * 1024;

/// What a heartbeat says about the leases of a worker.
pub(super) struct Pulse {
    /// Leases that the worker lists and does not hold.
    pub(super) lost: Vec<Lease>,
    /// Leases whose jobs are to be cancelled.
    pub(super) cancel: Vec<Lease>,
    /// Whether the worker may get a suspect, which is a job that was interrupted before:
    /// not while it already holds one, leased from any server.
    suspects: Suspects,
}

impl Pulse {
    pub(super) fn of(live: &[LiveLease], held: &[Lease]) -> Self {
        let is_live: HashSet<Lease> = live.iter().map(|live| live.lease).collect();
        let has_suspect = live.iter().any(|live| live.is_suspect);
        Pulse {
            lost: held.iter().filter(|lease| !is_live.contains(lease)).copied().collect(),
            cancel: live.iter().filter(|live| live.cancel_requested).map(|live| live.lease).collect(),
            suspects: if has_suspect { Suspects::Leave } else { Suspects::One },
        }
    }

    /// The leases that need the worker's attention.
    pub(super) fn news(&self) -> impl Iterator<Item = &Lease> {
        self.lost.iter().chain(&self.cancel)
    }
}

/// Records a call of the worker as its heartbeat. Refuses a dead worker. Returns its live leases.
pub(super) async fn beat(server: &Server, session: &Session, worker: WorkerId) -> ApiResult<Vec<LiveLease>> {
    let live = server.client.beat_and_list(worker).await?.ok_or_else(|| dead_worker(server, worker))?;
    session.keep_live(&live);
    Ok(live)
}

/// Leases that are not yet in a response. If the caller disconnects first, this is
/// dropped and releases them.
pub(super) struct Undelivered {
    client: Client,
    jobs: Vec<Claimed>,
}

impl Undelivered {
    pub(super) fn none(client: &Client) -> Self {
        Undelivered { client: client.clone(), jobs: Vec::new() }
    }

    pub(super) fn jobs(&self) -> &[Claimed] {
        &self.jobs
    }

    /// Releases all jobs but the first ones.
    pub(super) fn release_after(&mut self, count: usize) {
        let rest = self.jobs.split_off(count.min(self.jobs.len()));
        drop(Undelivered { client: self.client.clone(), jobs: rest });
    }

    /// The jobs, for the response. They are no longer released on drop.
    pub(super) fn into_delivered(mut self) -> Vec<Claimed> {
        std::mem::take(&mut self.jobs)
    }
}

impl Drop for Undelivered {
    fn drop(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        let leases: Vec<Lease> = self.jobs.iter().map(Claimed::lease).collect();
        let client = self.client.clone();
        tokio::spawn(async move {
            if let Err(error) = client.release(&leases).await {
                tracing::warn!(
                    %error,
                    jobs = leases.len(),
                    "could not release the jobs of a disconnected caller; recovery will"
                );
            }
        });
    }
}

/// A call that has sent its first heartbeat.
pub(super) struct OpenCall<'a> {
    pub(super) server: &'a Server,
    pub(super) session: &'a Session,
    pub(super) worker: WorkerId,
    /// The leases that the worker lists.
    pub(super) held: &'a [Lease],
    /// What the last heartbeat said.
    pub(super) pulse: Pulse,
    /// `None` if the call does not wait.
    pub(super) cancels: Option<CancelNotices>,
    /// Until when the call waits.
    pub(super) until: tokio::time::Instant,
    /// How often a waiting call sends a heartbeat: on its first call, a worker has no id yet, so it cannot renew.
    pub(super) beat_every: Duration,
}

impl OpenCall<'_> {
    /// Claims jobs until there are some, a job of this worker is cancelled or lost, the time is up, the worker
    /// makes another call that claims or signs off, or the server stops.
    pub(super) async fn claim(
        &mut self,
        state: &mut ClaimState,
        mut call: ClaimingCall,
        limit: u32,
    ) -> ApiResult<Undelivered> {
        call.leave_queue();
        let client = &self.server.client;
        let mut last_beat = Instant::now();
        let minimum = tokio::time::Instant::now() + MIN_WAIT;
        // Subscribe before the first claim: a job enqueued between the two would otherwise
        // wait a full poll interval.
        let mut wakeups = match self.cancels {
            Some(_) => Some(client.subscribe().await?),
            None => None,
        };
        let (mut poll_interval, mut is_woken) = (POLL_INTERVAL, false);
        loop {
            let started = Instant::now();
            let (mut found, mut again_in) =
                self.claim_now(state, limit, std::mem::take(&mut is_woken)).await?;
            // Released jobs may be behind the cursor, and the next call may not come soon.
            if found.jobs.is_empty() && wakeups.is_none() && state.cursor.look_if_cheap(started) {
                (found, again_in) = self.claim_now(state, limit, false).await?;
            }
            if !found.jobs.is_empty() || self.has_unreported() || call.is_superseded(minimum) {
                return Ok(found);
            }
            let next_poll = poll_interval.min(self.beat_every);
            let next_claim = again_in.map_or(next_poll, |again_in| again_in.min(next_poll));
            let next_claim = (tokio::time::Instant::now() + next_claim).min(self.until);
            poll_interval = (poll_interval * 2).min(MAX_POLL_INTERVAL);
            loop {
                tokio::select! {
                    queue = woken(&mut wakeups) => {
                        if queue.is_none_or(|queue| state.filter.0.contains(&queue)) {
                            (poll_interval, is_woken) = (POLL_INTERVAL, true);
                            break;
                        }
                    }
                    () = notified(&mut self.cancels, self.worker) => {
                        self.read_cancels().await?;
                        if self.has_unreported() {
                            return Ok(found);
                        }
                    }
                    () = call.superseded(minimum) => return Ok(found),
                    () = tokio::time::sleep_until(next_claim) => break,
                    () = self.session.ended() => return Ok(found),
                    () = self.server.stopping() => return Ok(found),
                }
            }
            if tokio::time::Instant::now() >= self.until {
                return Ok(found);
            }
            if last_beat.elapsed() >= self.beat_every || self.pulse.suspects == Suspects::Leave {
                self.beat_again().await?;
                last_beat = Instant::now();
            }
        }
    }

    /// Waits until a job of this worker is cancelled or lost, the time is up, the worker signs off, or the server stops.
    pub(super) async fn watch(&mut self) -> ApiResult<()> {
        let mut next_beat = tokio::time::Instant::now() + self.beat_every;
        while !self.has_unreported() && tokio::time::Instant::now() < self.until {
            tokio::select! {
                () = notified(&mut self.cancels, self.worker) => self.read_cancels().await?,
                () = tokio::time::sleep_until(next_beat.min(self.until)) => {
                    if tokio::time::Instant::now() >= next_beat {
                        self.beat_again().await?;
                        next_beat = tokio::time::Instant::now() + self.beat_every;
                    }
                }
                () = self.session.ended() => break,
                () = self.server.stopping() => break,
            }
        }
        Ok(())
    }

    fn has_unreported(&self) -> bool {
        self.session.has_unreported(self.pulse.news())
    }

    async fn read_cancels(&mut self) -> ApiResult<()> {
        self.pulse.cancel = self.server.client.cancels(self.worker).await?;
        Ok(())
    }

    async fn beat_again(&mut self) -> ApiResult<()> {
        let live = beat(self.server, self.session, self.worker).await?;
        self.pulse = Pulse::of(&live, self.held);
        Ok(())
    }

    /// Claims in batches, until there are enough jobs or enough bytes for one response. Also returns when to claim again.
    async fn claim_now(
        &self,
        state: &mut ClaimState,
        limit: u32,
        mut woken: bool,
    ) -> ApiResult<(Undelivered, Option<Duration>)> {
        let client = &self.server.client;
        let mut found = Undelivered::none(client);
        let (mut wanted, mut bytes) = (limit, 0);
        let mut suspects = self.pulse.suspects;
        loop {
            let (queues, kinds) = state.filter.clone();
            let size = state.batch.of(wanted);
            let queues = queues.into_iter().map(Into::into).collect();
            let woken = std::mem::take(&mut woken);
            let request =
                ClaimRequest { queues, kinds, suspects, woken, ..ClaimRequest::new(self.worker, size) };
            let claims = client.claim(&request, &mut state.cursor).await?;
            let claimed = claims.jobs;
            let count = claimed.len() as u32;
            bytes += claimed.iter().map(job_bytes).sum::<usize>();
            let suspect = claimed.iter().find(|job| job.interruptions() > 0).map(Claimed::lease);
            found.jobs.extend(claimed);
            // Mark a suspect as started now: its handler starts when the response arrives, and
            // no call reports that.
            if let Some(suspect) = suspect {
                let _ = client.mark_started(&suspect).await?;
                suspects = Suspects::Leave;
            }
            wanted = wanted.saturating_sub(count);
            let is_full = count == size;
            if is_full && bytes <= MAX_JOB_BYTES {
                state.batch.grow();
            }
            if wanted == 0 || !is_full || bytes >= MAX_JOB_BYTES {
                return Ok((found, claims.again_in));
            }
        }
    }
}

/// About how many bytes of a response a claimed job takes, without what earlier attempts saved.
pub(super) fn job_bytes(job: &Claimed) -> usize {
    let texts = |texts: &[String]| texts.iter().map(String::len).sum::<usize>();
    let metadata = job.options.metadata.as_ref().map_or(0, |metadata| metadata.get().len());
    let context = job.options.context.as_ref().map_or(0, String::len);
    job.payload.len() + metadata + context + texts(&job.options.tags) + texts(&job.flags)
}

/// Waits for a wake-up, as [`Wakeups::next`] does; forever without a subscription.
async fn woken(wakeups: &mut Option<Wakeups>) -> Option<String> {
    match wakeups {
        Some(wakeups) => wakeups.next().await,
        None => std::future::pending().await,
    }
}

/// Waits for the notification of a cancel; forever without a subscription.
async fn notified(notices: &mut Option<CancelNotices>, of: WorkerId) {
    match notices {
        Some(notices) => notices.next(|worker| worker == of).await,
        None => std::future::pending().await,
    }
}
