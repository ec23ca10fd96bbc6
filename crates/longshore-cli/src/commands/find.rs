//! Finds words that were probably meant instead of mistyped ones.

use longshore::nearest::{nearest, suggestion};
use longshore::{ALL_QUEUES, DEFAULT_QUEUE, builtin};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::queues::Queue;
use super::stats::all_counts;
use crate::endpoint::Endpoint;
use crate::failure::Failure;
use crate::output::Out;

/// Something with a name.
#[derive(Deserialize)]
pub(super) struct Named {
    pub(super) name: String,
}

/// The names in a list of the API. Empty if it cannot be read: the caller only wants to give
/// advice.
pub(super) async fn names(endpoint: &Endpoint, path: &str) -> Vec<String> {
    let Ok(reply) = endpoint.get(&[path]).send().await else { return Vec::new() };
    let named: Vec<Named> = reply.read().unwrap_or_default();
    named.into_iter().map(|named| named.name).collect()
}

/// The registered kinds and the built-in ones.
pub(super) async fn kinds(endpoint: &Endpoint) -> Vec<String> {
    let reply = super::kinds::all(endpoint, false).await;
    let named: Vec<Named> = reply.and_then(|reply| reply.read()).unwrap_or_default();
    let mut kinds: Vec<String> = named.into_iter().map(|named| named.name).collect();
    kinds.extend(builtin::names().map(str::to_owned));
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}

/// The default queue, the queues with settings or jobs, and those that workers name.
pub(super) async fn queues(endpoint: &Endpoint) -> Vec<String> {
    known_queues(&workers(endpoint).await.unwrap_or_default(), endpoint).await
}

/// The queues that these workers name, and all others that are known.
async fn known_queues(workers: &[Worker], endpoint: &Endpoint) -> Vec<String> {
    let mut queues = names(endpoint, "queues").await;
    // The list above has no queues whose jobs have all finished.
    queues.extend(all_counts(endpoint).await.unwrap_or_default().into_iter().map(|count| count.queue));
    queues
        .extend(workers.iter().flat_map(|worker| &worker.queues).filter(|name| *name != ALL_QUEUES).cloned());
    queues.push(DEFAULT_QUEUE.into());
    queues.sort_unstable();
    queues.dedup();
    queues
}

/// The part of a worker that says which jobs it takes.
#[derive(Deserialize)]
struct Worker {
    queues: Vec<String>,
    kinds: Option<Vec<String>>,
    stale: bool,
    dead_at: Option<IgnoredAny>,
}

impl Worker {
    fn is_live(&self) -> bool {
        !self.stale && self.dead_at.is_none()
    }

    fn takes_every_queue(&self) -> bool {
        self.queues.iter().any(|name| name == ALL_QUEUES)
    }
}

/// The workers that run jobs, also stale and dead ones.
async fn workers(endpoint: &Endpoint) -> Result<Vec<Worker>, Failure> {
    let mut workers: Vec<Worker> = endpoint.get(&["workers"]).send().await?.read()?;
    // A server that only does upkeep runs no jobs.
    workers.retain(|worker| worker.kinds.as_ref().is_none_or(|kinds| !kinds.is_empty()));
    Ok(workers)
}

/// A warning about a queue that has no settings and no jobs, and that no worker names: its name may
/// be mistyped. `None` if it has, or if the output is JSON.
pub(super) async fn unknown_queue(endpoint: &Endpoint, queue: &str, out: &Out) -> Option<String> {
    if out.json {
        return None;
    }
    let workers = workers(endpoint).await.unwrap_or_default();
    let known = known_queues(&workers, endpoint).await;
    if known.iter().any(|name| name == queue) {
        return None;
    }
    let is_served = workers.iter().any(|worker| worker.is_live() && worker.takes_every_queue());
    let lacks = if is_served { "no settings and no jobs" } else { "no settings, no jobs and no worker" };
    let suggestion = suggestion(queue, known.iter().map(String::as_str));
    Some(format!("queue `{queue}` is unknown: it had {lacks}{suggestion}"))
}

/// Warns after an enqueue into a queue that has no other job, no settings and no worker, if another
/// queue has a similar name.
pub(super) async fn warn_of_new_queue(endpoint: &Endpoint, queue: &str, out: &Out) {
    if out.json || queue == DEFAULT_QUEUE {
        return;
    }
    let Ok(workers) = workers(endpoint).await else { return };
    let served = || workers.iter().flat_map(|worker| &worker.queues).map(String::as_str);
    if served().any(|name| name == queue || name == ALL_QUEUES) {
        return;
    }
    let Ok(reply) = endpoint.get(&["queues"]).send().await else { return };
    let queues: Vec<Queue> = reply.read().unwrap_or_default();
    let is_used = |known: &Queue| known.paused || known.limit.is_some() || known.waiting + known.running > 1;
    if queues.iter().any(|known| known.name == queue && is_used(known)) {
        return;
    }
    let others = queues.iter().map(|known| known.name.as_str()).chain(served()).chain([DEFAULT_QUEUE]);
    let Some(found) = nearest(queue, others.filter(|name| *name != queue)) else { return };
    // The queue may have had jobs that have finished.
    let counts = all_counts(endpoint).await.unwrap_or_default();
    let jobs: u64 = counts.iter().filter(|count| count.queue == queue).map(|count| count.jobs).sum();
    if jobs <= 1 {
        out.note(format_args!(
            "warning: queue `{queue}` has no other job and no worker; did you mean `{found}`?"
        ));
    }
}

/// Names the kind or the queue that was probably meant, after a list had no jobs of it.
pub(super) async fn suggest_filter(endpoint: &Endpoint, kind: Option<&str>, queue: Option<&str>, out: &Out) {
    if let Some(kind) = kind {
        let mut known = kinds(endpoint).await;
        // Jobs may be of kinds that are not registered.
        known.extend(all_counts(endpoint).await.unwrap_or_default().into_iter().map(|count| count.kind));
        note_unless_known("kind", kind, &known, out);
    }
    if let Some(queue) = queue {
        let known = queues(endpoint).await;
        note_unless_known("queue", queue, &known, out);
    }
}

fn note_unless_known(what: &str, word: &str, known: &[String], out: &Out) {
    if !known.iter().any(|name| name == word)
        && let Some(found) = nearest(word, known.iter().map(String::as_str))
    {
        out.note(format_args!("no {what} `{word}` is known; did you mean `{found}`?"));
    }
}
