//! How a lease ends: the decision, the flags it was made from, and its result.

use std::borrow::Cow;
use std::collections::BTreeSet;

use async_trait::async_trait;
use serde_json::value::RawValue;

use super::{Interruptor, Lease};
use crate::error::Result;
use crate::job::{AttemptEnd, Outcome};
use crate::rules::enqueue::{MAX_PAYLOAD, ValidJob, check_json};
use crate::rules::fingerprint::Fingerprint;
use crate::rules::lifecycle::{LeaseFlags, Leave, PendingWait, When};

/// How many attempts without success a job keeps in its history, beside its newest error.
/// Without a limit, a handler that snoozes its job again and again would add rows forever.
pub const MAX_HISTORY: i32 = 100;

/// A decision to end one lease.
#[derive(Clone, Debug)]
pub struct Settlement {
    /// The lease to end.
    pub lease: Lease,
    /// Which side ends it.
    pub by: EndedBy,
    /// The flags that the decision was made from; `None` if it does not depend on
    /// them.
    pub seen: Option<LeaseFlags>,
    /// Whether the job finishes or returns to the queue, with the details to store.
    pub leave: Leave,
    /// Jobs to enqueue in the same transaction.
    pub follow_ups: Vec<ValidJob>,
    /// What the job waits for, if it is suspended.
    pub waits: Vec<PendingWait>,
    /// The group of failures to which the attempt belongs, if it failed.
    pub failure: Option<Fingerprint>,
}

/// The error group of an attempt that ends like this; `None` if it neither failed nor was interrupted. A
/// cancel is neither, even if it has a reason.
pub(crate) fn failure_of(kind: &str, leave: &Leave) -> Option<Fingerprint> {
    let error = match leave {
        Leave::Finish(finish) if finish.outcome == Outcome::FailedPermanent => finish.error.as_deref(),
        Leave::Requeue(requeue)
            if matches!(requeue.history, Some(AttemptEnd::Failed | AttemptEnd::Interrupted)) =>
        {
            requeue.error.as_deref()
        }
        Leave::Finish(_) | Leave::Requeue(_) => None,
    };
    error.map(|error| Fingerprint::of(kind, error))
}

impl Settlement {
    /// Whether it is stored in a transaction of its own, because it changes more than the
    /// job's state.
    pub(crate) fn is_alone(&self) -> bool {
        !self.follow_ups.is_empty() || !self.waits.is_empty()
    }

    /// Whether its parts agree: a success has nothing to record, only a requeue waits, and only an error belongs to a group.
    pub(crate) fn is_sound(&self) -> bool {
        match &self.leave {
            Leave::Finish(finish) => {
                let is_success = finish.outcome == Outcome::Succeeded;
                self.waits.is_empty()
                    && (self.failure.is_none() || finish.error.is_some())
                    && (finish.result.is_none() || is_success)
                    && (!is_success || (finish.error.is_none() && finish.history.is_none()))
            }
            Leave::Requeue(requeue) => self.failure.is_none() || requeue.error.is_some(),
        }
    }

    /// The same, for a job whose event has been emitted.
    pub(crate) fn due_now(mut self) -> Self {
        if let Leave::Requeue(requeue) = &mut self.leave {
            requeue.when = When::NOW;
        }
        self
    }

    /// Whether one of the awaited events has been emitted, so that the job waits no longer.
    pub(crate) fn is_due_now(&self) -> bool {
        matches!(&self.leave, Leave::Requeue(requeue) if requeue.when == When::NOW)
    }

    /// The events that the job waits for, each once, in the order in which they are locked.
    pub(crate) fn awaited_events(&self) -> Vec<String> {
        let events: BTreeSet<&String> = self.waits.iter().flat_map(|wait| &wait.events).collect();
        events.into_iter().cloned().collect()
    }
}

/// The result of a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It is stored, by this call or by an earlier one whose reply was lost.
    Stored,
    /// Nothing changed: the lease is live, but its flags are now these. Decide again.
    Flagged(LeaseFlags),
    /// Nothing changed: another worker owns the job, or the job has finished.
    LeaseLost,
}

/// Storing how attempts end.
#[async_trait]
pub trait Settling {
    /// Ends leases. An item is stored only if its lease is live and the job's flags
    /// are those the item was decided from. Follow-up jobs are stored in the same
    /// transaction or not at all. The call may be repeated when its reply was lost:
    /// an item that was stored before, under the same id, lease number and worker,
    /// returns `Stored` again. The exception is a requeue without a history entry,
    /// which leaves no row to find: its repetition returns `LeaseLost` and changes
    /// nothing.
    ///
    /// A job that is suspended is stored together with its waits. It is due at once if one
    /// of its events has been emitted, even at the same moment.
    ///
    /// An error means that at least one item could not be stored, for example because
    /// the database refused a follow-up job. That item has changed nothing; the
    /// others may be stored. To learn which, settle the items one by one.
    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>>;
}

/// Which side ends a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndedBy {
    /// The worker that holds it.
    Holder,
    /// A sweeper, for this reason.
    Recovery(Interruptor),
}

impl EndedBy {
    /// Whether the holder must be dead for the lease to end.
    pub(crate) fn requires_dead_holder(self) -> bool {
        matches!(self, EndedBy::Recovery(why) if why != Interruptor::HungHandler)
    }
}

/// The maximum length of a stored error, in bytes. Longer ones are cut.
pub(crate) const MAX_ERROR: usize = 64 * 1024;

/// Makes text from a handler storable in both engines: cuts it and removes NUL
/// characters. An error message must never make a settle fail.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    let cut = &text[..text.floor_char_boundary(MAX_ERROR)];
    if cut.contains('\0') { Cow::Owned(cut.replace('\0', "")) } else { Cow::Borrowed(cut) }
}

/// Returns a handler's result, or the reason why it cannot be stored (for example, it
/// is too large). The attempt still counts as a success.
pub(crate) fn storable_result(result: Box<RawValue>) -> Box<RawValue> {
    match check_json("result", result.get(), MAX_PAYLOAD) {
        Ok(()) => result,
        Err(error) => {
            let reason = serde_json::json!({ "not_kept": error.to_string() });
            RawValue::from_string(reason.to_string()).unwrap_or(result)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_text_loses_nul_and_is_cut_at_a_character_boundary() {
        let long = format!("x{}", "é".repeat(40_000));
        assert_eq!(clean(&long).len(), 64 * 1024 - 1);
        assert_eq!(clean("a\0b"), "ab");
    }
}
