//! Calls of this process on the same flow take turns: each holds the lock of the flow's row until its commit, so the others
//! wait here, and not with a connection each.
//!
//! A flow that another client's open transaction has locked is refused after [`MAX_LOCK_WAIT`], also to those in line. The
//! time in which other calls changed the flow does not count.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::OwnedMutexGuard;

use super::run::MAX_LOCK_WAIT;
use crate::job::FlowId;

/// The flows with calls, each with the line of its calls.
#[derive(Debug, Default)]
pub(super) struct FlowTurns(Mutex<HashMap<FlowId, Weak<Line>>>);

/// The calls wait in order. The contents belong to the one whose turn it is.
type Line = tokio::sync::Mutex<Last>;

/// How the last turn ended.
#[derive(Debug, Default)]
struct Last {
    /// When a call last got the lock.
    got_lock_at: Option<Instant>,
    /// Whether the flow was locked for too long.
    was_refused: bool,
}

impl FlowTurns {
    /// Waits until no other call of this process is on the flow.
    pub(super) async fn wait(&self, flow: FlowId) -> Turn {
        let began = Instant::now();
        Turn { last: self.line(flow).lock_owned().await, began }
    }

    fn line(&self, flow: FlowId) -> Arc<Line> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.retain(|_, line| line.strong_count() > 0);
        let found = lines.get(&flow).and_then(Weak::upgrade);
        found.unwrap_or_else(|| {
            let line = Arc::default();
            lines.insert(flow, Arc::downgrade(&line));
            line
        })
    }
}

/// The turn of a call. It ends when this is dropped.
pub(super) struct Turn {
    last: OwnedMutexGuard<Last>,
    began: Instant,
}

impl Turn {
    /// A difference for which it is not worth to try again.
    const CLOSE: Duration = Duration::from_millis(200);

    /// For how long this call may still wait for the lock of another client's transaction; `None` if the call before
    /// this one has just waited in vain for as long as this one may wait.
    pub(super) fn max_lock_wait(&self) -> Option<Duration> {
        let since = self.last.got_lock_at.map_or(self.began, |at| at.max(self.began));
        let left = (since + MAX_LOCK_WAIT).saturating_duration_since(Instant::now());
        (left > Turn::CLOSE || !self.last.was_refused).then_some(left)
    }

    /// Ends the turn. `got_lock` says whether the call got the lock of the flow.
    pub(super) fn end(mut self, got_lock: bool) {
        self.last.was_refused = !got_lock;
        if got_lock {
            self.last.got_lock_at = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn calls_on_a_flow_take_turns_and_leave_nothing_behind() {
        let turns = Arc::new(FlowTurns::default());
        let (one, other) = (FlowId::new(), FlowId::new());
        let first = turns.wait(one).await;
        drop(turns.wait(other).await);
        let second = {
            let turns = turns.clone();
            tokio::spawn(async move { turns.wait(one).await })
        };
        tokio::task::yield_now().await;
        assert!(!second.is_finished());
        first.end(true);
        drop(second.await.unwrap());
        drop(turns.wait(other).await);
        assert_eq!(turns.0.lock().unwrap().len(), 1, "only the last flow, until the next call");
    }

    #[tokio::test]
    async fn only_the_time_in_which_no_call_got_the_lock_counts() {
        let turns = FlowTurns::default();
        let flow = FlowId::new();
        let line = turns.line(flow);
        let began = Instant::now().checked_sub(2 * MAX_LOCK_WAIT).unwrap();
        let wait = |was_refused, got_lock_at| {
            *line.try_lock().unwrap() = Last { got_lock_at, was_refused };
            Turn { last: line.clone().try_lock_owned().unwrap(), began }.max_lock_wait()
        };
        assert_eq!(wait(true, None), None, "the call before this one has waited for as long");
        assert_eq!(wait(false, None), Some(Duration::ZERO), "the flow may be free by now");
        let left = wait(true, Some(Instant::now())).unwrap();
        assert!(left > MAX_LOCK_WAIT / 2, "others have changed the flow meanwhile: {left:?}");
    }
}
