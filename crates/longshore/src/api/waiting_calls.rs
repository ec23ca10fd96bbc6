//! Limits the calls that take long on purpose: those that wait for work or for the end of a job, and
//! streams. Each one occupies a connection, so without a limit one token could keep all others out.
//!
//! A call above the limit does not wait. Its response says with `Retry-After` when to call again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::{HeaderName, HeaderValue, header};
use uuid::Uuid;

use super::auth::Caller;

/// How many calls may wait by default: half of the connections of [`Limits`](super::Limits).
pub(super) const DEFAULT_LIMIT: usize = 512;
/// When a call that could not wait should be repeated, in seconds. A worker polls as often.
const RETRY_AFTER: u32 = 2;

/// The calls that wait.
#[derive(Debug)]
pub(super) struct WaitingCalls {
    limit: usize,
    by_token: Mutex<HashMap<Option<Uuid>, usize>>,
}

/// A call that waits. Dropping it makes room for another one.
pub(super) struct WaitingCall {
    calls: Arc<WaitingCalls>,
    token: Option<Uuid>,
}

impl WaitingCalls {
    pub(super) fn new(limit: usize) -> Arc<Self> {
        Arc::new(WaitingCalls { limit, by_token: Mutex::default() })
    }

    /// Lets a call wait, unless too many do. One token may have half of them, each of two tokens a third, and so on, so
    /// that there is always room for one more. Callers without a token share all of them, because there are no others
    /// on such a server.
    pub(super) fn begin(self: &Arc<Self>, caller: &Caller) -> Option<WaitingCall> {
        let token = caller.token();
        let mut by_token = self.by_token();
        let of_token = by_token.get(&token).copied().unwrap_or(0);
        let tokens = by_token.len() + usize::from(of_token == 0);
        let share = if token.is_some() { self.limit.div_ceil(tokens + 1) } else { self.limit };
        if of_token >= share || by_token.values().sum::<usize>() >= self.limit {
            return None;
        }
        by_token.insert(token, of_token + 1);
        drop(by_token);
        Some(WaitingCall { calls: self.clone(), token })
    }

    fn by_token(&self) -> MutexGuard<'_, HashMap<Option<Uuid>, usize>> {
        self.by_token.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WaitingCall {
    fn drop(&mut self) {
        let mut by_token = self.calls.by_token();
        match by_token.get_mut(&self.token) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                by_token.remove(&self.token);
            }
        }
    }
}

/// The header of a response to a call that could not wait.
pub(super) fn retry_after() -> (HeaderName, HeaderValue) {
    (header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::TokenRecord;

    fn caller() -> Caller {
        Caller::Token(Arc::new(TokenRecord {
            id: Uuid::now_v7(),
            name: "shop".into(),
            scopes: vec!["work".into()],
            queues: None,
            created_at: chrono::Utc::now(),
            expires_at: None,
            revoked_at: None,
        }))
    }

    #[test]
    fn a_token_leaves_room_for_one_more() {
        let calls = WaitingCalls::new(12);
        let tokens: Vec<Caller> = (0..3).map(|_| caller()).collect();
        let mut open = Vec::new();
        for (token, share) in tokens.iter().zip([6, 4, 2]) {
            let begun: Vec<_> = (0..12).map_while(|_| calls.begin(token)).collect();
            assert_eq!(begun.len(), share);
            open.push(begun);
        }
        // What one token ends is for the others: with three of them, each has a quarter.
        open[0].truncate(1);
        let begun: Vec<_> = (0..12).map_while(|_| calls.begin(&tokens[2])).collect();
        assert_eq!(begun.len(), 1);
        drop((open, begun));
        assert!(calls.by_token().is_empty());
        let open: Vec<_> = (0..13).map_while(|_| calls.begin(&Caller::Anonymous)).collect();
        assert_eq!(open.len(), 12);
    }
}
