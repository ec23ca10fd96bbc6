//! Settle: what the holders of leases report, decided by
//! [`lifecycle`] and stored under the fence.

use super::Client;
use crate::enqueue::ValidJob;
use crate::error::Result;
use crate::job::{AttemptEnd, Outcome, WorkerId};
use crate::lifecycle::{self, Ending, Flags, Leave, State};
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
        let mut open: Vec<(usize, Flags)> = (0..reports.len()).map(|i| (i, Flags::default())).collect();
        // Both flags only ever rise, so an item is decided at most three times.
        while !open.is_empty() {
            let batch: Vec<Settlement> = open.iter().map(|(i, flags)| decide(&reports[*i], *flags)).collect();
            let settled = self.store.settle(&batch).await?;
            let mut again = Vec::new();
            for (((i, _), settled), settlement) in open.into_iter().zip(settled).zip(&batch) {
                match settled {
                    Settled::Stored => answers[i] = Kept::from(&settlement.leave),
                    Settled::LeaseLost => {}
                    Settled::Flagged(flags) => again.push((i, flags)),
                }
            }
            open = again;
        }
        for report in reports {
            self.lanes.announce(&report.follow_ups);
        }
        Ok(answers)
    }

    /// Releases, uncharged, the leases of a worker that it does not know it
    /// holds, because the answer to a claim was lost; how many. Not to be called
    /// while a claim of that worker is under way.
    pub async fn give_back_unknown(&self, worker: WorkerId, held: &[Lease]) -> Result<u64> {
        let mut given_back = 0;
        for lease in self.store.leases(worker).await? {
            let Some(State::Running(running)) = self.store.locate(lease.id).await? else { continue };
            if held.contains(&lease) || running.lease_no != lease.lease_no {
                continue;
            }
            let settlement = Settlement {
                lease,
                seen: Some(running.flags),
                leave: lifecycle::settle(&running, Ending::Released),
                follow_ups: Vec::new(),
            };
            given_back += u64::from(self.store.settle(&[settlement]).await? == [Settled::Stored]);
        }
        Ok(given_back)
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
    let running = lifecycle::Running { flags, ..report.claimed.running() };
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
