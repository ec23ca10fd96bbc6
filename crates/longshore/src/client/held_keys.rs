//! Which keys callers of this process wait for, because another client's open
//! transaction holds them. New jobs with such a key wait outside the lane, so that they
//! do not delay other keys. One job per key waits in the database and the others wait
//! here, so that one key cannot occupy all connections for waiting. When that job is
//! stored, nobody holds the key any more, and the others need not wait for their turns.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::rules::enqueue::ValidJob;

#[derive(Debug, Default)]
pub(super) struct HeldKeys(Mutex<Maps>);

#[derive(Debug, Default)]
struct Maps {
    idempotency: HashMap<String, HeldKey>,
    unique: HashMap<String, HeldKey>,
}

#[derive(Debug)]
struct HeldKey {
    waiting: usize,
    turn: Arc<Semaphore>,
}

impl HeldKeys {
    /// Whether no job waits for a key.
    pub(super) fn is_empty(&self) -> bool {
        let maps = self.lock();
        maps.idempotency.is_empty() && maps.unique.is_empty()
    }

    /// Whether a job waits for one of the keys of this job.
    pub(super) fn contains_key_of(&self, job: &ValidJob) -> bool {
        let maps = self.lock();
        let has = |map: &HashMap<String, HeldKey>, key: Option<&String>| {
            !map.is_empty() && key.is_some_and(|key| map.contains_key(key))
        };
        has(&maps.idempotency, job.idempotency_key.as_ref()) || has(&maps.unique, unique_key(job))
    }

    /// Records that this job waits for its keys, until the returned value is dropped.
    pub(super) fn wait_for_keys_of(self: &Arc<Self>, job: &ValidJob) -> KeyWaiter {
        let mut maps = self.lock();
        let wait = |map: &mut HashMap<String, HeldKey>, key: &String| {
            let held = map
                .entry(key.clone())
                .or_insert_with(|| HeldKey { waiting: 0, turn: Arc::new(Semaphore::new(1)) });
            held.waiting += 1;
            (key.clone(), held.turn.clone())
        };
        KeyWaiter {
            held: self.clone(),
            idempotency: job.idempotency_key.as_ref().map(|key| wait(&mut maps.idempotency, key)),
            unique: unique_key(job).map(|key| wait(&mut maps.unique, key)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Maps> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unique_key(job: &ValidJob) -> Option<&String> {
    job.unique.as_ref().map(|(key, _)| key)
}

/// A job that waits for its keys: each key, and the turns of those that wait for it.
pub(super) struct KeyWaiter {
    held: Arc<HeldKeys>,
    idempotency: Option<(String, Arc<Semaphore>)>,
    unique: Option<(String, Arc<Semaphore>)>,
}

/// What a job waited for.
pub(super) enum Turn {
    /// It is the only job of this process that may wait in the database for the key, until
    /// this is dropped.
    Own(OwnedSemaphorePermit),
    /// Another job got the key meanwhile, so nobody holds it.
    KeyIsFree,
}

impl KeyWaiter {
    /// Waits until no other job of this process waits in the database for the same key.
    /// A job with two keys takes its turn by the unique one.
    pub(super) async fn turn(&self) -> Turn {
        let Some((_, turn)) = self.unique.as_ref().or(self.idempotency.as_ref()) else {
            return Turn::KeyIsFree;
        };
        turn.clone().acquire_owned().await.map_or(Turn::KeyIsFree, Turn::Own)
    }

    /// Lets all other jobs that wait for the keys of this one continue, because this one is
    /// stored. New jobs with these keys do not wait.
    pub(super) fn report_free(&self) {
        self.for_each_key(|map, key, turn| {
            map.remove(key);
            turn.close();
        });
    }

    /// Calls `work` for each key of this job that was not reported as free.
    fn for_each_key(&self, work: impl Fn(&mut HashMap<String, HeldKey>, &String, &Semaphore)) {
        let mut maps = self.held.lock();
        let Maps { idempotency, unique } = &mut *maps;
        for (map, key) in [(idempotency, &self.idempotency), (unique, &self.unique)] {
            if let Some((key, turn)) = key
                && map.get(key).is_some_and(|held| Arc::ptr_eq(&held.turn, turn))
            {
                work(map, key, turn);
            }
        }
    }
}

impl Drop for KeyWaiter {
    fn drop(&mut self) {
        self.for_each_key(|map, key, _| {
            let Some(held) = map.get_mut(key) else { return };
            held.waiting -= 1;
            if held.waiting == 0 {
                map.remove(key);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::enqueue::{NewJob, UniqueMode};

    #[test]
    fn a_key_is_held_while_a_job_waits_for_it() {
        let valid = |job: NewJob| job.validate().unwrap();
        let by_id = |key: &str| valid(NewJob::new("a", &1).idempotency_key(key));
        let by_unique = |key: &str| valid(NewJob::new("a", &1).unique_key(key, UniqueMode::Dedupe));
        let held = Arc::<HeldKeys>::default();
        let (one, two) = (held.wait_for_keys_of(&by_id("k")), held.wait_for_keys_of(&by_id("k")));
        assert!(held.contains_key_of(&by_id("k")));
        assert!(!held.contains_key_of(&by_unique("k")), "the two types of keys are independent");
        assert!(!held.contains_key_of(&by_id("other")));
        drop(one);
        assert!(held.contains_key_of(&by_id("k")));
        drop(two);
        assert!(!held.contains_key_of(&by_id("k")));
        assert!(held.lock().idempotency.is_empty());
    }

    #[tokio::test]
    async fn jobs_that_wait_continue_when_one_of_them_got_the_key() {
        let job = NewJob::new("a", &1).idempotency_key("k").validate().unwrap();
        let held = Arc::<HeldKeys>::default();
        let (one, two) = (held.wait_for_keys_of(&job), held.wait_for_keys_of(&job));
        let turn = one.turn().await;
        assert!(matches!(turn, Turn::Own(_)));
        one.report_free();
        assert!(matches!(two.turn().await, Turn::KeyIsFree));
        assert!(!held.contains_key_of(&job), "new jobs do not wait");
        // The key is held again. Those that waited for it before do not count.
        let again = held.wait_for_keys_of(&job);
        drop((turn, one, two));
        assert!(held.contains_key_of(&job));
        assert!(matches!(again.turn().await, Turn::Own(_)));
    }
}
