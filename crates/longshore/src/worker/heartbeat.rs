//! The heartbeat. It has its own thread and connection, so that handlers that block
//! every thread of the runtime do not make the worker look dead.
//!
//! A heartbeat sends the leases held here; its reply names those that are lost and those to
//! cancel. Between heartbeats, the check of `cancel` uses the same thread and connection. If
//! the database cannot be reached for too long, this module stops the handlers
//! before other workers can recover their jobs (the self-stop).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::context::{Attempt, StopReason};
use super::shared::{Phase, Shared};
use super::{Settings, cancel};
use crate::client::Client;
use crate::error::{Error, Result};
use crate::job::WorkerId;
use crate::store::{Beat, NewWorker};

/// How soon a failed heartbeat is sent again.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Starts the heartbeat thread; it runs until the worker has ended.
pub(super) fn spawn(shared: Arc<Shared>, client: Client) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::unavailable("cannot start the heartbeat").with_source(error))?;
    let body = move || {
        runtime.block_on(async {
            tokio::select! {
                () = send_heartbeats(&shared, &client) => {}
                () = stop_handlers_without_contact(&shared) => {}
                () = cancel::check(&shared, &client) => {}
                () = shared.reached(Phase::Ended) => {}
            }
        });
    };
    std::thread::Builder::new()
        .name("longshore-beat".into())
        .spawn(body)
        .map(drop)
        .map_err(|error| Error::unavailable("cannot start the heartbeat thread").with_source(error))
}

async fn send_heartbeats(shared: &Shared, client: &Client) {
    let interval = shared.settings.heartbeat_interval;
    let mut stopped: Vec<Arc<Attempt>> = Vec::new();
    loop {
        let (sent, worker_id) = (Instant::now(), shared.worker_id());
        let held = shared.held.leases(worker_id);
        let reply = tokio::time::timeout(interval.max(RETRY_DELAY), client.beat(worker_id, &held)).await;
        // Drop the handlers that did not stop within one heartbeat.
        stopped.drain(..).for_each(|attempt| attempt.control.abort(StopReason::LeaseLost));
        let wait = match reply {
            Ok(Ok(Beat::Alive { lost, cancel })) => {
                shared.contact.acknowledged(sent, interval);
                for attempt in lost.iter().filter_map(|lease| shared.held.get(lease)) {
                    attempt.control.stop(StopReason::LeaseLost);
                    stopped.push(attempt);
                }
                shared.held.cancel(&cancel);
                interval
            }
            Ok(Ok(Beat::Dead)) => {
                stopped = shared.held.all();
                stopped.iter().for_each(|attempt| attempt.control.stop(StopReason::LeaseLost));
                register_again(shared, client, worker_id).await
            }
            Ok(Err(error)) => {
                shared.contact.failed();
                tracing::warn!(%error, %worker_id, "the heartbeat failed; retrying");
                RETRY_DELAY.min(interval)
            }
            Err(_) => {
                shared.contact.failed();
                tracing::warn!(%worker_id, "the heartbeat timed out; retrying");
                Duration::ZERO
            }
        };
        tokio::time::sleep(wait).await;
    }
}

/// Registers under a new id after the old one was declared dead. Returns the time to wait before
/// the next heartbeat.
async fn register_again(shared: &Shared, client: &Client, dead: WorkerId) -> Duration {
    let (worker_id, sent) = (WorkerId::new(), Instant::now());
    tracing::warn!(old = %dead, new = %worker_id, "this worker was declared dead; registering again under a new id");
    match client.register(&registration(&shared.settings, shared.registry.kinds(), worker_id)).await {
        Ok(()) => {
            // This worker was just declared dead itself, so it must not sweep yet: mark
            // its contact as broken.
            shared.contact.failed();
            shared.contact.acknowledged(sent, shared.settings.heartbeat_interval);
            shared.set_worker_id(worker_id);
            shared.settings.heartbeat_interval
        }
        Err(error) => {
            tracing::warn!(%error, %worker_id, "could not register again; retrying");
            RETRY_DELAY
        }
    }
}

pub(super) fn registration(settings: &Settings, kinds: Option<Vec<String>>, id: WorkerId) -> NewWorker {
    NewWorker {
        id,
        name: format!("{}-{}", settings.name_prefix, &id.0.simple().to_string()[20..]),
        queues: settings.queues.clone(),
        kinds,
        concurrency: settings.concurrency,
        stale_after: settings.stale_after,
        host: host(),
        pid: Some(std::process::id()),
        version: Some(env!("CARGO_PKG_VERSION").into()),
    }
}

/// The name of this host, if it can be read without a system call of our own.
fn host() -> Option<String> {
    let named = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let named =
        named.or_else(|| ["HOSTNAME", "COMPUTERNAME"].iter().find_map(|name| std::env::var(name).ok()));
    named.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// What has to happen to a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Stop,
    Drop,
}

/// A handler is stopped two heartbeats before the worker's threshold runs out, and dropped one
/// heartbeat before. `silence` counts from the time the last acknowledged heartbeat was sent.
fn due_without_contact(silence: Duration, interval: Duration, threshold: Duration) -> Option<Due> {
    match threshold.saturating_sub(silence) {
        left if left <= interval => Some(Due::Drop),
        left if left <= interval * 2 => Some(Due::Stop),
        _ => None,
    }
}

/// Stops handlers before other workers can recover their jobs.
async fn stop_handlers_without_contact(shared: &Shared) {
    let settings = &shared.settings;
    let interval = settings.heartbeat_interval;
    loop {
        tokio::time::sleep(interval / 10).await;
        if !shared.contact.is_past_self_stop(settings) {
            continue;
        }
        let silence = shared.contact.silence();
        for attempt in shared.held.all() {
            let threshold =
                settings.stale_after * settings.recovery.threshold_factor(attempt.claimed.flags());
            let due = due_without_contact(silence, interval, threshold);
            if due >= Some(Due::Stop) {
                if attempt.control.reason().is_none() {
                    let job_id = attempt.claimed.lease().id;
                    tracing::warn!(%job_id, ?silence, "cannot reach the database; stopping the handler before another worker can recover its job");
                }
                attempt.control.stop(StopReason::Disconnected);
            }
            if due >= Some(Due::Drop) {
                attempt.control.abort(StopReason::Disconnected);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handlers_stop_two_heartbeats_before_the_threshold_and_are_dropped_one_before() {
        let due = |silence| {
            let seconds = Duration::from_secs;
            due_without_contact(seconds(silence), seconds(10), seconds(60))
        };
        assert_eq!([due(0), due(39)], [None, None]);
        assert_eq!([due(40), due(49)], [Some(Due::Stop); 2]);
        assert_eq!([due(50), due(60), due(90)], [Some(Due::Drop); 3]);
    }
}
