//! How a lease ends: the decision, what it was made from, and what became of it.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::{Interruptor, Lease};
use crate::enqueue::{MAX_PAYLOAD, ValidJob, check_json};
use crate::lifecycle::{Flags, Leave};

/// The end of one lease, and what it was decided from.
#[derive(Clone, Debug)]
pub struct Settlement {
    /// Whose end it is.
    pub lease: Lease,
    /// The flags it was decided from; `None` if they make no difference.
    pub seen: Option<Flags>,
    /// What becomes of the job.
    pub leave: Leave,
    /// Jobs that exist only if this is stored.
    pub follow_ups: Vec<ValidJob>,
}

/// What became of a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It is in the database, now or since an earlier try.
    Stored,
    /// The lease lives, but these flags have been raised: decide again.
    Flagged(Flags),
    /// Somebody else owns the job now, or it has ended; nothing changed.
    LeaseLost,
}

/// Who ends a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndedBy {
    /// The worker that holds it.
    Holder,
    /// Recovery, for this reason.
    Recovery(Interruptor),
}

impl EndedBy {
    /// Whether the lease may only be ended if its holder is dead.
    pub(crate) fn requires_dead_holder(self) -> bool {
        matches!(self, EndedBy::Recovery(why) if why != Interruptor::HungHandler)
    }
}

/// The longest error text that is kept, in bytes.
pub(crate) const MAX_ERROR: usize = 64 * 1024;

/// Text from a handler, as both engines can store it, without NUL and cut:
/// content can never break settling.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    let cut = &text[..text.floor_char_boundary(MAX_ERROR)];
    match cut.contains('\0') {
        true => Cow::Owned(cut.replace('\0', "")),
        false => Cow::Borrowed(cut),
    }
}

/// A handler's result, as it may be stored; one that cannot be is replaced by
/// the reason, because the success itself must not be lost.
pub(crate) fn keepable(result: Box<RawValue>) -> Box<RawValue> {
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
    fn errors_are_cleaned_and_cut_on_a_character() {
        let long = format!("x{}", "é".repeat(40_000));
        assert_eq!(clean(&long).len(), 64 * 1024 - 1);
        assert_eq!(clean("a\0b"), "ab");
    }
}
