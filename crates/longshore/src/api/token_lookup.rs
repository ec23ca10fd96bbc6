//! Finds tokens by their hash. Owns the cache of valid tokens and the lookups of the
//! others; what a token permits is in `auth`.
//!
//! Anyone can send tokens that do not exist, so these must not cost a statement each:
//! requests with tokens that are not cached share lookups, and the number of lookups per
//! second is limited. Unknown tokens are not cached: a token works as soon as it is
//! created, and a flood of invented tokens does not displace valid ones.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::problem::{ApiResult, Problem, Slug};
use crate::client::Client;
use crate::error::Result;
use crate::store::TokenRecord;

/// How long a valid token is cached. A revoked token stays valid for at most this long.
const TTL: Duration = Duration::from_secs(2);
/// The time between two lookups, in the long run.
const INTERVAL: Duration = Duration::from_millis(100);
/// How many lookups may follow each other without a pause.
const BURST: u32 = 10;
/// How many tokens are cached. When the cache is full, it is emptied.
const MAX_CACHED: usize = 10_000;

type Hash = [u8; 32];
type Lookup = Pin<Box<dyn Future<Output = Result<Vec<Option<TokenRecord>>>> + Send>>;
/// A valid token; `None` if the token is unknown, expired or revoked.
pub(super) type Found = ApiResult<Option<Arc<TokenRecord>>>;

/// Finds tokens by their hash.
pub(super) struct TokenLookup {
    /// Reads the tokens with these hashes from the database, in the same order.
    read: Box<dyn Fn(Vec<Hash>) -> Lookup + Send + Sync>,
    state: Mutex<State>,
    /// Notified if the next lookup must not wait.
    urgent: Notify,
}

#[derive(Default)]
struct State {
    /// Valid tokens, with the time of their lookup.
    valid: HashMap<Hash, (Instant, Arc<TokenRecord>)>,
    /// The requests that wait for the next lookup. There are at most as many as open
    /// requests.
    waiting: HashMap<Hash, Vec<oneshot::Sender<Found>>>,
    /// Whether a task performs lookups.
    is_running: bool,
    /// When the next lookup would be due if all lookups were `INTERVAL` apart.
    next_due: Option<Instant>,
}

impl TokenLookup {
    pub(super) fn new(client: Client) -> Arc<Self> {
        TokenLookup::reading(move |hashes| {
            let client = client.clone();
            Box::pin(async move { client.tokens_by_hash(&hashes).await })
        })
    }

    fn reading(read: impl Fn(Vec<Hash>) -> Lookup + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(TokenLookup { read: Box::new(read), state: Mutex::default(), urgent: Notify::new() })
    }

    /// A valid token, if it is cached.
    pub(super) fn cached(&self, hash: &Hash) -> Option<Arc<TokenRecord>> {
        let state = self.state();
        let (at, token) = state.valid.get(hash)?;
        (at.elapsed() < TTL).then(|| token.clone())
    }

    /// Looks a token up, together with those of other requests.
    pub(super) async fn find(self: &Arc<Self>, hash: Hash) -> Found {
        let (reply, found) = oneshot::channel();
        {
            let mut state = self.state();
            // A flood of unknown tokens must not delay requests with valid ones.
            if state.valid.contains_key(&hash) {
                self.urgent.notify_one();
            }
            state.waiting.entry(hash).or_default().push(reply);
            if !std::mem::replace(&mut state.is_running, true) {
                tokio::spawn(Running(self.clone()).look_up_until_none_waits());
            }
        }
        // The reply is missing only if the task has panicked.
        found.await.unwrap_or_else(|_| Err(Problem::new(Slug::Internal, "internal error; try again")))
    }

    /// Removes a token from the cache.
    pub(super) fn forget(&self, hash: &Hash) {
        self.state().valid.remove(hash);
    }

    async fn look_up(&self, waiting: HashMap<Hash, Vec<oneshot::Sender<Found>>>) {
        let (hashes, replies): (Vec<Hash>, Vec<_>) = waiting.into_iter().unzip();
        let found = (self.read)(hashes.clone()).await.map_err(Problem::from);
        let now = Instant::now();
        for (i, (hash, replies)) in hashes.into_iter().zip(replies).enumerate() {
            let found = match &found {
                Ok(tokens) => Ok(tokens.get(i).cloned().flatten().map(Arc::new)),
                Err(problem) => Err(problem.clone()),
            };
            if let Ok(token) = &found {
                self.state().store(hash, now, token.clone());
            }
            for reply in replies {
                // A request that was dropped does not receive.
                let _ = reply.send(found.clone());
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for TokenLookup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenLookup").finish_non_exhaustive()
    }
}

impl State {
    fn store(&mut self, hash: Hash, now: Instant, token: Option<Arc<TokenRecord>>) {
        match token {
            Some(token) => {
                if self.valid.len() >= MAX_CACHED {
                    self.valid.clear();
                }
                self.valid.insert(hash, (now, token));
            }
            None => {
                self.valid.remove(&hash);
            }
        }
    }
}

/// The task that performs lookups. If it ends early, the requests that wait get an
/// error and the next request starts a new task.
struct Running(Arc<TokenLookup>);

impl Running {
    async fn look_up_until_none_waits(self) {
        loop {
            let next_due = self.0.state().next_due;
            if let Some(wait) = next_due.and_then(|due| due.checked_duration_since(Instant::now()))
                && let Some(wait) = wait.checked_sub(BURST * INTERVAL)
            {
                tokio::select! {
                    () = tokio::time::sleep(wait) => {}
                    () = self.0.urgent.notified() => {}
                }
            }
            let waiting = {
                let mut state = self.0.state();
                if state.waiting.is_empty() {
                    state.is_running = false;
                    return;
                }
                let now = Instant::now();
                let due = state.next_due.map_or(now, |due| due.max(now)) + INTERVAL;
                // Urgent lookups do not wait. However many there were, the next one that
                // is not urgent waits for one interval at most.
                state.next_due = Some(due.min(now + (BURST + 1) * INTERVAL));
                std::mem::take(&mut state.waiting)
            };
            self.0.look_up(waiting).await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut state = self.0.state();
            state.is_running = false;
            state.waiting.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use chrono::Utc;
    use uuid::Uuid;

    use super::*;

    fn hash(n: u32) -> Hash {
        let mut hash = [0; 32];
        hash[..4].copy_from_slice(&n.to_be_bytes());
        hash
    }

    fn token() -> TokenRecord {
        TokenRecord {
            id: Uuid::now_v7(),
            name: "shop".into(),
            scopes: vec!["read".into()],
            queues: None,
            created_at: Utc::now(),
            expires_at: None,
            revoked_at: None,
        }
    }

    /// Token 0 is valid and all others are unknown. Counts the lookups.
    fn lookup() -> (Arc<TokenLookup>, Arc<AtomicUsize>) {
        let lookups = Arc::new(AtomicUsize::new(0));
        let counted = lookups.clone();
        let lookup = TokenLookup::reading(move |hashes| {
            counted.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                tokio::time::sleep(Duration::from_millis(1)).await;
                Ok(hashes.into_iter().map(|wanted| (wanted == hash(0)).then(token)).collect())
            })
        });
        (lookup, lookups)
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_unknown_tokens_costs_few_lookups_and_no_memory() {
        let (lookup, lookups) = lookup();
        let started = Instant::now();
        assert!(lookup.find(hash(0)).await.unwrap().is_some());
        for round in 0..15 {
            let mut requests = tokio::task::JoinSet::new();
            for n in 1..=100 {
                let lookup = lookup.clone();
                requests.spawn(async move { lookup.find(hash(round * 100 + n)).await.unwrap() });
            }
            while let Some(found) = requests.join_next().await {
                assert!(found.unwrap().is_none());
            }
        }
        let allowed = (started.elapsed().as_millis() / INTERVAL.as_millis()) as usize + BURST as usize + 1;
        assert!(lookups.load(Ordering::Relaxed) <= allowed, "{lookups:?} of {allowed}");
        assert_eq!(lookup.state().valid.len(), 1);
        assert!(lookup.state().waiting.is_empty());
        assert!(lookup.cached(&hash(0)).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_known_token_does_not_wait_for_the_limit_on_lookups() {
        let (lookup, lookups) = lookup();
        lookup.find(hash(0)).await.unwrap();
        let started = Instant::now();
        lookup.state().next_due = Some(started + Duration::from_secs(3600));
        let unknown = tokio::spawn({
            let lookup = lookup.clone();
            async move { lookup.find(hash(1)).await.unwrap() }
        });
        while lookup.state().waiting.is_empty() {
            tokio::task::yield_now().await;
        }
        assert!(lookup.find(hash(0)).await.unwrap().is_some());
        assert!(unknown.await.unwrap().is_none());
        assert!(started.elapsed() < INTERVAL, "{:?}", started.elapsed());
        assert_eq!(lookups.load(Ordering::Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_token_does_not_wait_for_the_lookups_of_known_ones() {
        let (lookup, _) = lookup();
        for _ in 0..60 {
            lookup.find(hash(0)).await.unwrap();
        }
        let started = Instant::now();
        lookup.find(hash(1)).await.unwrap();
        assert!(started.elapsed() < 2 * INTERVAL, "{:?}", started.elapsed());
    }
}
