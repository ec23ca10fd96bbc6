//! A cancel of a running job stops its handler at once. The workers here send a heartbeat
//! once an hour, so each case fails if only a heartbeat could deliver the cancel.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use longshore::store::{Lease, NewWorker, Notice};
use longshore::worker::{Batched, Builder, RunningWorker, Settings, StopReason};
use longshore::{Client, Context, Failure, JobId, Status, Worker};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use crate::fixture::*;
use crate::http::client::HttpClient;
use crate::locks::in_time;
use crate::worker::{Started, run_worker, until_status};

cases! {
    a_cancel_stops_a_handler_between_heartbeats,
    a_cancel_by_another_client_stops_a_handler_between_heartbeats,
    a_bulk_cancel_stops_all_handlers_between_heartbeats,
    a_cancel_between_claim_and_start_prevents_the_start,
    a_cancel_of_another_workers_job_stops_no_handler,
    is_cancelled_asks_the_database,
    is_cancelled_without_a_database_returns_what_the_worker_knows,
    is_cancelled_notices_a_lost_lease,
    the_cancels_of_a_worker_are_its_live_leases_with_a_requested_cancel,
    a_notice_of_a_cancel_reaches_subscribers_and_wakes_no_queue,
    many_cancels_cause_few_notifications,
}

cases! {
    only on postgres:
    a_cancel_from_sql_stops_a_handler_between_heartbeats,
    a_cancel_missed_without_a_listening_connection_is_found_after_reconnecting,
    a_worker_without_notifications_finds_a_cancel_by_polling,
}

cases! {
    only on sqlite:
    a_cancel_by_another_program_stops_a_handler_between_heartbeats,
}

/// A worker that sends its second heartbeat after an hour.
fn worker_of(client: Client) -> Builder {
    let settings = Settings { heartbeat_interval: HOUR, stale_after: DAY, ..Settings::default() };
    Worker::builder(client).settings(settings)
}

/// A worker whose handlers of `mail` wait for their stop token and record the reason.
struct Waiting {
    running: RunningWorker,
    started: Started,
    reasons: Arc<Mutex<Vec<StopReason>>>,
}

impl Waiting {
    async fn start(builder: Builder) -> Self {
        let (started, reasons) = (Started::new(), Arc::<Mutex<Vec<StopReason>>>::default());
        let (starts, seen) = (started.clone(), reasons.clone());
        let handler = move |_: Value, ctx: Context| {
            let (starts, seen) = (starts.clone(), seen.clone());
            async move {
                starts.increment();
                let reason = ctx.stopped().await;
                seen.lock().expect("lock").push(reason);
                Err(Failure::retry("stopped"))
            }
        };
        let running = run_worker(builder.function("mail", handler)).await;
        Waiting { running, started, reasons }
    }

    /// Waits until the jobs are cancelled; their handlers must have been stopped for that
    /// reason.
    async fn must_be_cancelled(self, fixture: &Fixture, ids: &[JobId]) {
        for id in ids {
            until_status(fixture, *id, Status::Cancelled).await;
        }
        assert_eq!(*self.reasons.lock().expect("lock"), vec![StopReason::Cancelled; ids.len()]);
        self.running.stop_now().await;
    }
}

/// Sets the flag without notifying anybody.
async fn request_silently(fixture: &Fixture, id: JobId) {
    let set = match fixture.engine() {
        Engine::Postgres => "update running set cancel_requested = true where id = {id}",
        Engine::Sqlite => "update running set cancel_requested = 1 where id = {id}",
    };
    fixture.sql(set, Some(id)).await;
}

// ---- handlers that wait for their token --------------------------------------------

async fn a_cancel_stops_a_handler_between_heartbeats(fixture: Fixture) {
    let id = fixture.add(job("mail")).await;
    let waiting = Waiting::start(worker_of(fixture.client())).await;
    waiting.started.wait_for(1).await;
    fixture.cancel(id).await.expect("cancel");
    waiting.must_be_cancelled(&fixture, &[id]).await;
}

async fn a_cancel_by_another_client_stops_a_handler_between_heartbeats(fixture: Fixture) {
    let id = fixture.add(job("mail")).await;
    let waiting = Waiting::start(worker_of(fixture.client())).await;
    waiting.started.wait_for(1).await;
    fixture.second_client().await.cancel(id).await.expect("cancel");
    waiting.must_be_cancelled(&fixture, &[id]).await;
}

async fn a_bulk_cancel_stops_all_handlers_between_heartbeats(fixture: Fixture) {
    let ids =
        [fixture.add(job("mail")).await, fixture.add(job("mail")).await, fixture.add(job("mail")).await];
    let waiting = Waiting::start(worker_of(fixture.second_client().await)).await;
    waiting.started.wait_for(3).await;
    let http = HttpClient::new(&fixture);
    let body = json!({ "action": "cancel", "filter": { "kind": "mail" } });
    let response = http.post("/jobs/bulk", &body).await.expect_status(200);
    assert_eq!(response.json()["changed"], 3);
    waiting.must_be_cancelled(&fixture, &ids).await;
}

async fn a_cancel_from_sql_stops_a_handler_between_heartbeats(fixture: Fixture) {
    let id = fixture.add(job("mail")).await;
    let waiting = Waiting::start(worker_of(fixture.client())).await;
    waiting.started.wait_for(1).await;
    assert_eq!(crate::sql::call(&fixture, "cancel", id).await, "pending");
    waiting.must_be_cancelled(&fixture, &[id]).await;
}

async fn a_cancel_by_another_program_stops_a_handler_between_heartbeats(fixture: Fixture) {
    let id = fixture.add(job("mail")).await;
    let waiting = Waiting::start(worker_of(fixture.client())).await;
    waiting.started.wait_for(1).await;
    request_silently(&fixture, id).await;
    waiting.must_be_cancelled(&fixture, &[id]).await;
}

async fn a_cancel_missed_without_a_listening_connection_is_found_after_reconnecting(fixture: Fixture) {
    const DISCONNECT: &str = "
        select count(pg_terminate_backend(pid))
          from pg_stat_activity
         where pid <> pg_backend_pid()
           and query ilike 'listen%' || current_schema() || '.stop%'";
    let id = fixture.add(job("mail")).await;
    let waiting = Waiting::start(worker_of(fixture.client())).await;
    waiting.started.wait_for(1).await;
    assert_eq!(fixture.query_number(DISCONNECT, None).await, 1);
    request_silently(&fixture, id).await;
    waiting.must_be_cancelled(&fixture, &[id]).await;
}

async fn a_worker_without_notifications_finds_a_cancel_by_polling(fixture: Fixture) {
    let id = fixture.add(job("mail")).await;
    let client = Client::connect(&with_parameter(&fixture.url(), "notify=off")).await.expect("connect");
    let waiting = Waiting::start(worker_of(client)).await;
    waiting.started.wait_for(1).await;
    request_silently(&fixture, id).await;
    waiting.must_be_cancelled(&fixture, &[id]).await;
}

async fn a_cancel_of_another_workers_job_stops_no_handler(fixture: Fixture) {
    let elsewhere = fixture.running(job("mail")).await;
    let id = fixture.add(job("mail")).await;
    let waiting = Waiting::start(worker_of(fixture.client())).await;
    waiting.started.wait_for(1).await;
    fixture.cancel(elsewhere.lease().id).await.expect("cancel");
    fixture.flush().await;
    fixture.cancel(id).await.expect("cancel");
    waiting.must_be_cancelled(&fixture, &[id]).await;
    assert_eq!(fixture.status(elsewhere.lease().id).await, Status::Running);
}

// ---- before the start ----------------------------------------------------------------

/// The worker has one slot. A slot has room for a whole batch, so the worker claims both
/// jobs together, and one of them waits for the slot.
async fn a_cancel_between_claim_and_start_prevents_the_start(fixture: Fixture) {
    let second = fixture.add(job("mail")).await;
    let first = fixture.add(job("mail").priority(9)).await;
    let batch = async |jobs: Vec<Batched<Value>>| jobs.iter().map(|_| Ok(())).collect();
    let settings =
        Settings { concurrency: 1, heartbeat_interval: HOUR, stale_after: DAY, ..Settings::default() };
    let builder = Worker::builder(fixture.client()).settings(settings).batch("bulk", 4, batch);
    let waiting = Waiting::start(builder).await;
    waiting.started.wait_for(1).await;
    // A check that finds the second cancel also finds the first one.
    let other = fixture.second_client().await;
    for id in [second, first] {
        other.cancel(id).await.expect("cancel");
    }
    until_status(&fixture, second, Status::Cancelled).await;
    waiting.must_be_cancelled(&fixture, &[first]).await;
}

// ---- handlers that ask -----------------------------------------------------------------

/// A running job whose handler calls `is_cancelled` on request.
struct Asking {
    running: RunningWorker,
    id: JobId,
    requests: mpsc::UnboundedSender<()>,
    results: mpsc::UnboundedReceiver<(bool, Option<StopReason>)>,
}

impl Asking {
    async fn start(fixture: &Fixture) -> Self {
        let id = fixture.add(job("mail")).await;
        let (requests, requested) = mpsc::unbounded_channel::<()>();
        let (result, results) = mpsc::unbounded_channel();
        let requested = Arc::new(tokio::sync::Mutex::new(requested));
        let handler = move |_: Value, ctx: Context| {
            let (requested, result) = (requested.clone(), result.clone());
            async move {
                let mut requested = requested.lock().await;
                while ctx.stop_reason().is_none() && requested.recv().await.is_some() {
                    let _ = result.send((ctx.is_cancelled().await, ctx.stop_reason()));
                }
                Err(Failure::retry("stopped"))
            }
        };
        let running = worker_of(fixture.client()).function("mail", handler).build().expect("build");
        Asking { running: running.start().await.expect("start"), id, requests, results }
    }

    async fn is_cancelled(&mut self) -> bool {
        self.ask().await.0
    }

    /// What `is_cancelled` returned, and why the handler should stop.
    async fn ask(&mut self) -> (bool, Option<StopReason>) {
        self.requests.send(()).expect("the worker runs");
        in_time(self.results.recv()).await.expect("a result")
    }
}

async fn is_cancelled_asks_the_database(fixture: Fixture) {
    let mut asking = Asking::start(&fixture).await;
    let id = asking.id;
    assert!(!asking.is_cancelled().await);
    request_silently(&fixture, id).await;
    assert!(asking.is_cancelled().await);
    until_status(&fixture, id, Status::Cancelled).await;
    asking.running.stop().await;
}

async fn is_cancelled_without_a_database_returns_what_the_worker_knows(fixture: Fixture) {
    let mut asking = Asking::start(&fixture).await;
    let id = asking.id;
    assert!(!asking.is_cancelled().await);
    fixture.sql("alter table running rename to unreachable", None).await;
    assert!(!asking.is_cancelled().await, "an error is not a cancel");
    fixture.sql("alter table unreachable rename to running", None).await;
    fixture.cancel(id).await.expect("cancel");
    assert!(asking.is_cancelled().await);
    until_status(&fixture, id, Status::Cancelled).await;
    asking.running.stop().await;
}

async fn is_cancelled_notices_a_lost_lease(fixture: Fixture) {
    let mut asking = Asking::start(&fixture).await;
    let id = asking.id;
    assert!(!asking.is_cancelled().await);
    fixture.sql("update running set lease_no = 7 where id = {id}", Some(id)).await;
    assert_eq!(asking.ask().await, (false, Some(StopReason::LeaseLost)));
    // The handler ends, and its result is not stored.
    asking.running.stop().await;
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.lease_no), (Status::Running, 7));
}

// ---- the store ---------------------------------------------------------------------------

async fn the_cancels_of_a_worker_are_its_live_leases_with_a_requested_cancel(fixture: Fixture) {
    let (mine, other) = (fixture.worker_with(DAY).await, fixture.worker_with(DAY).await);
    for kind in ["keep", "stop", "ended", "also"] {
        fixture.enqueue_kind(kind).await;
    }
    let held = fixture.claim(mine, 4).await;
    fixture.enqueue_kind("foreign").await;
    let foreign = fixture.claim_one(other).await;
    for claimed in [&held[1], &held[2], &held[3], &foreign] {
        fixture.cancel(claimed.lease().id).await.expect("cancel");
    }
    fixture.must_finish(&held[2], failed()).await;
    let heartbeat = fixture.worker_record(mine).await.expect("the worker").heartbeat_at;
    fixture.advance(MINUTE).await;
    let cancels = async |worker| fixture.store().cancels(worker).await.expect("cancels");
    assert_eq!(cancels(mine).await, [held[1].lease(), held[3].lease()]);
    assert_eq!(cancels(other).await, [foreign.lease()]);
    assert_eq!(cancels(NewWorker::new("unknown").id).await, Vec::<Lease>::new());
    assert_eq!(fixture.worker_record(mine).await.expect("the worker").heartbeat_at, heartbeat);
}

async fn a_notice_of_a_cancel_reaches_subscribers_and_wakes_no_queue(fixture: Fixture) {
    let store = fixture.store();
    let mut wakeups = store.subscribe().await.expect("subscribe");
    let mut cancels = store.subscribe_to_cancels().await.expect("subscribe");
    let worker = NewWorker::new("mine").id;
    // A queue can have the name of a worker's id.
    let notices = [Notice::Due(worker.to_string()), Notice::Cancel(worker)];
    assert!(store.notify_local(&notices));
    store.notify_others(&notices).await.expect("notify");
    in_time(cancels.next(|id| id == worker)).await;
    assert_eq!(in_time(wakeups.next()).await, Some(worker.to_string()));
    store.notify_local(&[Notice::Cancel(worker), Notice::Due("last".into())]);
    assert_eq!(in_time(wakeups.next()).await.as_deref(), Some("last"));
}

async fn many_cancels_cause_few_notifications(fixture: Fixture) {
    const JOBS: u32 = 200;
    fixture.enqueue_many((0..JOBS).map(|_| job("mail"))).await.expect("enqueue");
    let worker = fixture.worker_with(DAY).await;
    let held = fixture.claim(worker, JOBS).await;
    let subscriber = fixture.second_client().await;
    let mut cancels = subscriber.store().subscribe_to_cancels().await.expect("subscribe");
    let sent = watch::Sender::new(false);
    let all_sent = sent.subscribe();
    let counted = tokio::spawn(async move {
        let mut count = 0;
        loop {
            match tokio::time::timeout(SECOND, cancels.next(|id| id == worker)).await {
                Ok(()) => count += 1,
                Err(_) if *all_sent.borrow() && count > 0 => return count,
                Err(_) => {}
            }
        }
    });
    let began = Instant::now();
    let cancel = |claimed: longshore::store::Claimed| {
        let client = fixture.client();
        tokio::spawn(async move { client.cancel(claimed.lease().id).await.expect("cancel") })
    };
    for task in held.into_iter().map(cancel).collect::<Vec<_>>() {
        task.await.expect("task");
    }
    fixture.flush().await;
    // One per 10 ms, and one for the flush.
    let limit = 2 + began.elapsed().as_millis() / 10;
    sent.send_replace(true);
    let count = counted.await.expect("counted");
    assert!(count <= limit, "{count} notifications, at most {limit} expected");
}
