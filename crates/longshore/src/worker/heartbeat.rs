//! The heartbeat: a thread and a connection of its own, so that handlers which
//! block every thread of the runtime do not make the worker look dead.
//!
//! The beat carries the leases held here and brings back those that are lost and
//! those to cancel. When the database is out of reach, handlers are stopped
//! before their leases can be given away.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Settings;
use super::context::{Attempt, StopReason};
use super::shared::{Phase, Shared};
use crate::client::Client;
use crate::error::{Error, Result};
use crate::job::WorkerId;
use crate::store::{Beat, NewWorker};

/// A beat that failed is tried again this soon.
const AGAIN_AFTER: Duration = Duration::from_millis(500);

/// Beats until the worker has ended.
pub(super) fn spawn(shared: Arc<Shared>, client: Client) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::unavailable("cannot start the heartbeat").with_source(error))?;
    let body = move || {
        runtime.block_on(async {
            tokio::select! {
                () = beat(&shared, &client) => {}
                () = watch(&shared) => {}
                () = shared.reached(Phase::Ended) => {}
            }
        });
    };
    std::thread::Builder::new()
        .name("longshore-beat".into())
        .spawn(body)
        .map(drop)
        .map_err(|error| Error::unavailable("cannot start the heartbeat's thread").with_source(error))
}

async fn beat(shared: &Shared, client: &Client) {
    let interval = shared.settings.heartbeat_interval;
    let mut told_off: Vec<Arc<Attempt>> = Vec::new();
    loop {
        let (sent, worker) = (Instant::now(), shared.worker());
        let held = shared.held.leases(worker);
        let answer = tokio::time::timeout(interval.max(AGAIN_AFTER), client.beat(worker, &held)).await;
        // Whoever did not stop within a heartbeat is dropped.
        told_off.drain(..).for_each(|attempt| attempt.control.abort(StopReason::LeaseLost));
        let wait = match answer {
            Ok(Ok(Beat::Alive { lost, cancel })) => {
                shared.contact.heard(sent, interval);
                for attempt in lost.iter().filter_map(|lease| shared.held.get(lease)) {
                    attempt.control.stop(StopReason::LeaseLost);
                    told_off.push(attempt);
                }
                for attempt in cancel.iter().filter_map(|lease| shared.held.get(lease)) {
                    attempt.control.stop(StopReason::Cancelled);
                }
                interval
            }
            Ok(Ok(Beat::Dead)) => {
                told_off = shared.held.all();
                told_off.iter().for_each(|attempt| attempt.control.stop(StopReason::LeaseLost));
                register_anew(shared, client, worker).await
            }
            Ok(Err(error)) => {
                shared.contact.broke();
                tracing::warn!(%error, "the heartbeat did not get through");
                AGAIN_AFTER.min(interval)
            }
            Err(_) => {
                shared.contact.broke();
                tracing::warn!("the heartbeat was not answered in time");
                Duration::ZERO
            }
        };
        tokio::time::sleep(wait).await;
    }
}

/// Goes on under a new id after the old one was declared dead.
async fn register_anew(shared: &Shared, client: &Client, dead: WorkerId) -> Duration {
    let (worker, sent) = (WorkerId::new(), Instant::now());
    tracing::warn!(old = %dead, new = %worker, "this worker was declared dead; it begins anew under another id");
    match client.register(&registration(&shared.settings, shared.registry.kinds(), worker)).await {
        Ok(()) => {
            // Whoever was taken for dead is not the one to judge others yet.
            shared.contact.broke();
            shared.contact.heard(sent, shared.settings.heartbeat_interval);
            shared.become_worker(worker);
            shared.settings.heartbeat_interval
        }
        Err(error) => {
            tracing::warn!(%error, "could not register");
            AGAIN_AFTER
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
    }
}

/// Stops handlers two heartbeats before the worker's threshold runs out, and
/// drops them one heartbeat before, counted from the last beat that arrived.
async fn watch(shared: &Shared) {
    let settings = &shared.settings;
    let interval = settings.heartbeat_interval;
    loop {
        tokio::time::sleep(interval / 10).await;
        if !shared.contact.is_out_of_reach(settings) {
            continue;
        }
        let silence = shared.contact.silence();
        for attempt in shared.held.all() {
            let threshold = settings.stale_after * settings.recovery.patience_for(attempt.claimed.flags());
            if silence + interval * 2 >= threshold {
                if attempt.control.reason().is_none() {
                    let job_id = attempt.claimed.lease().id;
                    tracing::warn!(%job_id, ?silence, "the database is out of reach; stopping the handler before its lease can be given away");
                }
                attempt.control.stop(StopReason::Disconnected);
            }
            if silence + interval >= threshold {
                attempt.control.abort(StopReason::Disconnected);
            }
        }
    }
}
