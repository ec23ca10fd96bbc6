//! Settle: the holders of leases report how attempts ended, [`lifecycle`] decides what
//! becomes of the jobs, and the store applies it under the fence.

use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;

use super::Client;
use crate::client::job_log;
use crate::error::Result;
use crate::job::{AttemptEnd, Outcome};
use crate::rules::enqueue::ValidJob;
use crate::rules::lifecycle::{self, Ending, LeaseFlags, Leave, Running, When};
use crate::store::{Claimed, EndedBy, Fenced, Lease, Settled, Settlement, failure_of, storable_result};

/// How an attempt ended, as its holder reports it.
#[derive(Debug)]
pub struct Report<'a> {
    /// The attempt.
    pub claimed: &'a Claimed,
    /// How it ended.
    pub ending: Ending,
    /// Jobs that exist only if this report is stored.
    pub follow_ups: Vec<ValidJob>,
    /// Whether the attempt journaled a step, so that attempts and interruptions count from it.
    pub has_progressed: bool,
}

/// What the client needs of a report, so that a worker's own reports need no conversion.
pub(crate) trait Reported: Sync {
    fn claimed(&self) -> &Claimed;
    fn ending(&self) -> &Ending;
    fn follow_ups(&self) -> &[ValidJob];
    fn has_progressed(&self) -> bool;
}

impl Reported for Report<'_> {
    fn claimed(&self) -> &Claimed {
        self.claimed
    }

    fn ending(&self) -> &Ending {
        &self.ending
    }

    fn follow_ups(&self) -> &[ValidJob] {
        &self.follow_ups
    }

    fn has_progressed(&self) -> bool {
        self.has_progressed
    }
}

/// How an attempt ended, as reported by a holder that keeps only its leases.
#[derive(Clone, Debug)]
pub(crate) struct LeaseReport {
    pub(crate) lease: Lease,
    /// The attempt; `None` if the lease is not live.
    pub(crate) claimed: Option<Arc<Claimed>>,
    pub(crate) ending: Ending,
    /// Jobs that exist only if this report is stored.
    pub(crate) follow_ups: Vec<ValidJob>,
}

#[doc(hidden)]
impl Client {
    /// Ends attempts in one batch, with one result each. If a job was cancelled in the
    /// meantime, the flag in the database decides.
    pub async fn settle(&self, reports: Vec<Report<'_>>) -> Result<Vec<Fenced>> {
        let fenced = |kept| if kept == Kept::LeaseLost { Fenced::LeaseLost } else { Fenced::Held };
        Ok(self.settle_reports(&reports).await?.into_iter().map(fenced).collect())
    }

    /// As [`settle`](Self::settle), but returns what became of each job.
    pub(crate) async fn settle_reports(&self, reports: &[impl Reported]) -> Result<Vec<Kept>> {
        let mut results = vec![Kept::LeaseLost; reports.len()];
        let mut due: Vec<(&str, When)> = Vec::new();
        let mut has_member_ended = false;
        let mut failed: Vec<(&str, &str)> = Vec::new();
        let mut open: Vec<(usize, LeaseFlags)> =
            (0..reports.len()).map(|i| (i, LeaseFlags::default())).collect();
        // Each flag is only ever set, never cleared, so an item is decided at most three
        // times.
        while !open.is_empty() {
            let batch: Vec<Settlement> = open.iter().map(|(i, flags)| decide(&reports[*i], *flags)).collect();
            let settled = self.store.settle(&batch).await?;
            debug_assert_eq!(settled.len(), batch.len(), "one result per item");
            let mut again = Vec::new();
            for (((i, seen), settled), settlement) in open.into_iter().zip(settled).zip(&batch) {
                let claimed = reports[i].claimed();
                match settled {
                    Settled::Stored => {
                        results[i] = Kept::from(settlement);
                        if settlement.failure.is_some() {
                            failed.push((claimed.queue(), claimed.kind()));
                        }
                        has_member_ended |=
                            claimed.flow().is_some() && matches!(settlement.leave, Leave::Finish(_));
                        due.extend(due_again(settlement).map(|when| (claimed.queue(), when)));
                        if claimed.gated {
                            // Another job of its group may start.
                            due.push((claimed.queue(), When::NOW));
                        }
                    }
                    Settled::LeaseLost => due.extend(released_before(&reports[i])),
                    Settled::Flagged(flags) => {
                        debug_assert!(flags.include(seen), "flags are never cleared");
                        again.push((i, flags));
                    }
                }
            }
            open = again;
        }
        for report in reports {
            self.notifier.notify_enqueued(report.follow_ups());
        }
        self.notifier.notify(due);
        self.measure_failures(failed);
        if has_member_ended {
            self.advance_soon();
        }
        Ok(results)
    }

    /// As [`settle`](Self::settle), for holders that keep only their leases, such as
    /// workers that call the API. A report is the lease, how the attempt ended, and jobs
    /// that exist only if the report is stored. A repeated report, whose first reply was
    /// lost, returns `Held` again.
    ///
    /// ```
    /// # use longshore::store::{ClaimCursor, ClaimRequest, Fenced, NewWorker};
    /// # use longshore::{Client, Ending, NewJob};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// # let worker = NewWorker::new("remote");
    /// # client.register(&worker).await?;
    /// client.enqueue(NewJob::new("greet", "Ada")).await?;
    /// let request = ClaimRequest::new(worker.id, 1);
    /// let claims = client.claim(&request, &mut ClaimCursor::default()).await?;
    /// let lease = claims.jobs[0].lease();
    /// for _ in 0..2 {
    ///     let done = (lease, Ending::Succeeded { result: None }, Vec::new());
    ///     assert_eq!(client.settle_leases(vec![done]).await?, [Fenced::Held]);
    /// }
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn settle_leases(&self, reports: Vec<(Lease, Ending, Vec<ValidJob>)>) -> Result<Vec<Fenced>> {
        self.settle_leases_with(reports, |_, _| {}).await
    }

    /// As [`settle_leases`](Self::settle_leases). Calls `stored` for each report that this call
    /// stored, with what became of the job; a repeated report is not stored again.
    pub(crate) async fn settle_leases_with(
        &self,
        reports: Vec<(Lease, Ending, Vec<ValidJob>)>,
        stored: impl FnMut(&Claimed, Kept),
    ) -> Result<Vec<Fenced>> {
        let leases: Vec<Lease> = reports.iter().map(|(lease, ..)| *lease).collect();
        let claims = self.store.claims(&leases).await?;
        let report = |((lease, ending, follow_ups), claimed): (_, Option<Claimed>)| LeaseReport {
            lease,
            claimed: claimed.map(Arc::new),
            ending,
            follow_ups,
        };
        self.settle_claimed(reports.into_iter().zip(claims).map(report).collect(), stored).await
    }

    /// As [`settle_leases_with`](Self::settle_leases_with), for callers that have the claims.
    pub(crate) async fn settle_claimed(
        &self,
        reports: Vec<LeaseReport>,
        mut stored: impl FnMut(&Claimed, Kept),
    ) -> Result<Vec<Fenced>> {
        let mut results = vec![Fenced::LeaseLost; reports.len()];
        let (mut live, mut ended) = (Vec::new(), Vec::new());
        let claims: Vec<Option<Arc<Claimed>>> = reports.iter().map(|report| report.claimed.clone()).collect();
        for (i, (LeaseReport { lease, ending, follow_ups, .. }, claimed)) in
            reports.into_iter().zip(&claims).enumerate()
        {
            match claimed {
                Some(claimed) => {
                    live.push((i, Report { claimed, ending, follow_ups, has_progressed: false }))
                }
                None => ended.push((i, lease, ending)),
            }
        }
        let (of, live): (Vec<usize>, Vec<Report<'_>>) = live.into_iter().unzip();
        let kept = self.settle_reports(&live).await?;
        for ((i, report), kept) in of.into_iter().zip(live).zip(kept) {
            match kept {
                // The same report may have been sent twice and arrived at the same time.
                Kept::LeaseLost => ended.push((i, report.claimed.lease(), report.ending)),
                _ => {
                    results[i] = Fenced::Held;
                    let claimed = report.claimed;
                    // What never started has no end to report.
                    if matches!(report.ending, Ending::NotStarted { .. }) {
                        continue;
                    }
                    let trace_id = claimed.trace().and_then(job_log::trace_id);
                    self.job_log.settled(claimed, &report.ending, kept, Some(held_for(claimed)), trace_id);
                    stored(claimed, kept);
                }
            }
        }
        // The lease has ended, so this stores nothing; it only finds out whether this
        // report ended it.
        let candidates = ended.into_iter().flat_map(|(i, lease, ending)| {
            possible_settlements(lease, ending).map(move |settlement| (i, settlement))
        });
        let (of, candidates): (Vec<usize>, Vec<Settlement>) = candidates.unzip();
        if !candidates.is_empty() {
            for (i, settled) in of.into_iter().zip(self.store.settle(&candidates).await?) {
                if settled == Settled::Stored {
                    results[i] = Fenced::Held;
                }
            }
        }
        Ok(results)
    }
}

/// How long the lease was held, by this host's clock. For a worker that calls the API, this is
/// the run time as far as the server knows it.
pub(crate) fn held_for(claimed: &Claimed) -> Duration {
    (Utc::now() - claimed.claimed_at()).to_std().unwrap_or_default()
}

/// What became of a job after its attempt was settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    Finished(Outcome),
    Requeued {
        /// The history entry of the attempt; `None` if its handler never started.
        history: Option<AttemptEnd>,
        /// When the job is due again.
        when: When,
    },
    /// The job waits in a durable step.
    Suspended,
    LeaseLost,
}

impl From<&Settlement> for Kept {
    fn from(settlement: &Settlement) -> Self {
        match &settlement.leave {
            Leave::Finish(finish) => Kept::Finished(finish.outcome),
            Leave::Requeue(_) if !settlement.waits.is_empty() => Kept::Suspended,
            Leave::Requeue(requeue) => Kept::Requeued { history: requeue.history, when: requeue.when },
        }
    }
}

/// When the job is due again, if it returns to the queue. If it waits for an event, it may be due
/// now: the event may have been emitted meanwhile.
fn due_again(settlement: &Settlement) -> Option<When> {
    let waits_for_events = settlement.waits.iter().any(|wait| !wait.events.is_empty());
    if waits_for_events { Some(When::NOW) } else { settlement.leave.requeued_for() }
}

/// A release of a job that never started leaves no row that a repeated release could find, so the
/// repetition returns `LeaseLost`. The first try may have released the job without a wake-up,
/// because its reply was lost.
fn released_before<R: Reported>(report: &R) -> Option<(&str, When)> {
    matches!(report.ending(), Ending::NotStarted { .. }).then(|| (report.claimed().queue(), When::NOW))
}

/// The state of the job as its holder knows it.
fn running(report: &impl Reported) -> Running {
    let running = report.claimed().running();
    if report.has_progressed() { Running { attempt: 1, interruptions: 0, ..running } } else { running }
}

fn decide(report: &impl Reported, flags: LeaseFlags) -> Settlement {
    let seen = match report.ending() {
        Ending::Succeeded { .. } => None,
        _ => Some(flags),
    };
    let ending = match report.ending().clone() {
        Ending::Succeeded { result } => Ending::Succeeded { result: result.map(storable_result) },
        ending => ending,
    };
    let leave = lifecycle::settle(&Running { flags, ..running(report) }, ending);
    // A job that was cancelled meanwhile waits for nothing.
    let waits = match (report.ending(), &leave) {
        (Ending::Suspended { waits }, Leave::Requeue(_)) => waits.clone(),
        _ => Vec::new(),
    };
    let failure = failure_of(report.claimed().kind(), &leave);
    let follow_ups = report.follow_ups().to_vec();
    Settlement {
        lease: report.claimed().lease(),
        by: EndedBy::Holder,
        seen,
        leave,
        follow_ups,
        waits,
        failure,
    }
}

/// The settlements that this report can have become if it was stored before. The job's
/// state at that time is unknown, but only three states lead to different stored rows: a
/// plain running job, one that had lost its unique key, and one at its last interruption.
fn possible_settlements(lease: Lease, ending: Ending) -> impl Iterator<Item = Settlement> {
    let plain = Running {
        lease_no: lease.lease_no,
        worker: lease.worker,
        attempt: 1,
        max_attempts: u16::MAX,
        interruptions: 0,
        started: true,
        flags: LeaseFlags::default(),
    };
    let mut states = vec![plain.clone()];
    match &ending {
        Ending::Snoozed { .. } | Ending::Released | Ending::NotStarted { .. } | Ending::Suspended { .. } => {
            let flags = LeaseFlags { superseded: true, ..LeaseFlags::default() };
            states.push(Running { flags, ..plain });
        }
        Ending::Interrupted(how) => {
            let interruptions = how.max_interruptions.saturating_sub(1);
            states.push(Running { interruptions, ..plain });
        }
        Ending::Succeeded { .. } | Ending::Failed { .. } | Ending::Cancelled { .. } => {}
    }
    let settlement = move |running: Running| Settlement {
        lease,
        by: EndedBy::Holder,
        seen: Some(running.flags),
        leave: lifecycle::settle(&running, ending.clone()),
        // They were stored together with the end.
        follow_ups: Vec::new(),
        waits: Vec::new(),
        failure: None,
    };
    states.into_iter().map(settlement)
}
