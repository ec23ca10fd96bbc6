//! Settle: what the holders of leases report, decided by
//! [`lifecycle`] and stored under the fence.

use super::Client;
use crate::enqueue::ValidJob;
use crate::error::Result;
use crate::job::{AttemptEnd, Outcome};
use crate::lifecycle::{self, Ending, Flags, Leave, Running, When};
use crate::store::{Claimed, Fenced, Lease, Settled, Settlement, keepable};

/// How an attempt ended, in its holder's words.
#[derive(Debug)]
pub struct Report<'a> {
    /// The attempt.
    pub claimed: &'a Claimed,
    /// How it ended.
    pub ending: Ending,
    /// Jobs that exist only if this report is stored.
    pub follow_ups: Vec<ValidJob>,
}

impl Client {
    /// Ends attempts, in one batch, each answered by itself. What becomes of a
    /// job that was cancelled meanwhile is decided from the flag that the
    /// database holds when the end is stored.
    pub async fn settle(&self, reports: Vec<Report<'_>>) -> Result<Vec<Fenced>> {
        let fenced = |kept| if kept == Kept::LeaseLost { Fenced::LeaseLost } else { Fenced::Held };
        Ok(self.settle_as(&reports).await?.into_iter().map(fenced).collect())
    }

    /// As [`settle`](Self::settle), and says what became of each job.
    pub(crate) async fn settle_as(&self, reports: &[Report<'_>]) -> Result<Vec<Kept>> {
        let mut answers = vec![Kept::LeaseLost; reports.len()];
        let mut due: Vec<(&str, When)> = Vec::new();
        let mut open: Vec<(usize, Flags)> = (0..reports.len()).map(|i| (i, Flags::default())).collect();
        // Both flags only ever rise, so an item is decided at most three times.
        while !open.is_empty() {
            let batch: Vec<Settlement> = open.iter().map(|(i, flags)| decide(&reports[*i], *flags)).collect();
            let settled = self.store.settle(&batch).await?;
            let mut again = Vec::new();
            for (((i, _), settled), settlement) in open.into_iter().zip(settled).zip(&batch) {
                match settled {
                    Settled::Stored => {
                        answers[i] = Kept::from(&settlement.leave);
                        let requeued_for = settlement.leave.requeued_for();
                        due.extend(requeued_for.map(|when| (reports[i].claimed.queue(), when)));
                    }
                    Settled::LeaseLost => {}
                    Settled::Flagged(flags) => again.push((i, flags)),
                }
            }
            open = again;
        }
        for report in reports {
            self.notifier.notify_enqueued(&report.follow_ups);
        }
        self.notifier.notify(due);
        Ok(answers)
    }

    /// As [`settle`](Self::settle), for holders that keep nothing but their leases:
    /// workers in other processes, whose words arrive over a wire. Each report is
    /// the lease, how the attempt ended, and jobs that exist only if this is
    /// stored. One that was stored before, and whose answer was lost, is `Held`
    /// again.
    ///
    /// ```
    /// # use longshore::store::{ClaimCursor, ClaimRequest, Fenced, NewWorker};
    /// # use longshore::{Client, Ending, NewJob};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// # let worker = NewWorker::new("far away");
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
        let leases: Vec<Lease> = reports.iter().map(|(lease, ..)| *lease).collect();
        let claims = self.store.claims(&leases).await?;
        let mut answers = vec![Fenced::LeaseLost; reports.len()];
        let (mut live, mut ended) = (Vec::new(), Vec::new());
        for (i, ((lease, ending, follow_ups), claimed)) in reports.into_iter().zip(&claims).enumerate() {
            match claimed {
                Some(claimed) => live.push((i, Report { claimed, ending, follow_ups })),
                None => ended.push((i, lease, ending)),
            }
        }
        let (of, live): (Vec<usize>, Vec<Report<'_>>) = live.into_iter().unzip();
        let kept = self.settle_as(&live).await?;
        for ((i, report), kept) in of.into_iter().zip(live).zip(kept) {
            match kept {
                // It may be that the same report, sent twice, came in twice at once.
                Kept::LeaseLost => ended.push((i, report.claimed.lease(), report.ending)),
                _ => answers[i] = Fenced::Held,
            }
        }
        // A lease that has ended stays so: this can only find its traces.
        let traces = ended.into_iter().flat_map(|(i, lease, ending)| {
            may_have_been(lease, ending).map(move |settlement| (i, settlement))
        });
        let (of, traces): (Vec<usize>, Vec<Settlement>) = traces.unzip();
        if !traces.is_empty() {
            for (i, settled) in of.into_iter().zip(self.store.settle(&traces).await?) {
                if settled == Settled::Stored {
                    answers[i] = Fenced::Held;
                }
            }
        }
        Ok(answers)
    }
}

/// What became of a job whose attempt was settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    Finished(Outcome),
    Requeued(AttemptEnd),
    LeaseLost,
}

impl From<&Leave> for Kept {
    fn from(leave: &Leave) -> Self {
        match leave {
            Leave::Finish(finish) => Kept::Finished(finish.outcome),
            Leave::Requeue(requeue) => Kept::Requeued(requeue.history),
        }
    }
}

fn decide(report: &Report<'_>, flags: Flags) -> Settlement {
    let seen = match report.ending {
        Ending::Succeeded { .. } => None,
        _ => Some(flags),
    };
    let running = Running { flags, ..report.claimed.running() };
    let ending = match report.ending.clone() {
        Ending::Succeeded { result } => Ending::Succeeded { result: result.map(keepable) },
        ending => ending,
    };
    Settlement {
        lease: report.claimed.lease(),
        seen,
        leave: lifecycle::settle(&running, ending),
        follow_ups: report.follow_ups.clone(),
    }
}

/// What this report has come to, if it was stored before. Where the job stood then
/// is not known any more; but only in these three places do the rules leave traces
/// that differ: a job that had nothing against it, one that had lost its unique
/// key, and one at its last interruption.
fn may_have_been(lease: Lease, ending: Ending) -> impl Iterator<Item = Settlement> {
    let plain = Running {
        lease_no: lease.lease_no,
        worker: lease.worker,
        attempt: 1,
        max_attempts: u16::MAX,
        interruptions: 0,
        started: true,
        flags: Flags::default(),
    };
    let mut stood = vec![plain.clone()];
    match &ending {
        Ending::Snoozed { .. } | Ending::Released => {
            let flags = Flags { superseded: true, ..Flags::default() };
            stood.push(Running { flags, ..plain });
        }
        Ending::Interrupted(how) => {
            let interruptions = how.max_interruptions.saturating_sub(1);
            stood.push(Running { interruptions, ..plain });
        }
        Ending::Succeeded { .. } | Ending::Failed { .. } | Ending::Cancelled { .. } => {}
    }
    let settlement = move |running: Running| Settlement {
        lease,
        seen: Some(running.flags),
        leave: lifecycle::settle(&running, ending.clone()),
        // Stored with the end, or not at all.
        follow_ups: Vec::new(),
    };
    stood.into_iter().map(settlement)
}
