use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::enqueue::{EnqueuedAs, NewJob, UniqueMode};
use crate::job::{AttemptEnd, Status};
use crate::lifecycle::{self, Ending, Flags, Interruption, Recovery, Running};
use crate::retry::RetryPolicy;

/// A folder that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("longshore-{}", Uuid::now_v7()));
        std::fs::create_dir(&folder).unwrap();
        Folder(folder)
    }

    fn url(&self) -> String {
        format!("sqlite:{}", self.path().display())
    }

    fn path(&self) -> PathBuf {
        self.0.join("queue.db")
    }

    async fn store(&self) -> SqliteStore {
        let store = SqliteStore::open(&self.url()).await.unwrap();
        store.migrate().await.unwrap();
        store
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn memory() -> SqliteStore {
    let store = SqliteStore::open("sqlite::memory:").await.unwrap();
    store.migrate().await.unwrap();
    store
}

fn job(kind: &str) -> NewJob {
    NewJob::new(kind, &json!({ "from": kind }))
}

async fn add(store: &SqliteStore, job: NewJob) -> JobId {
    store.enqueue(&[job.validate().unwrap()]).await.unwrap()[0].id
}

async fn worker(store: &SqliteStore) -> WorkerId {
    let worker = NewWorker::new("tester");
    store.register(&worker).await.unwrap();
    worker.id
}

async fn claim(store: &SqliteStore, request: &ClaimRequest) -> Vec<Claimed> {
    store.claim(request, &mut ClaimCursor::default()).await.unwrap().jobs
}

async fn claim_one(store: &SqliteStore, worker: WorkerId) -> Claimed {
    claim(store, &ClaimRequest::new(worker, 1)).await.remove(0)
}

fn ids(jobs: &[Claimed]) -> Vec<JobId> {
    jobs.iter().map(|job| job.lease.id).collect()
}

fn settlement(job: &Claimed, ending: Ending) -> Settlement {
    let leave = lifecycle::settle(&job.running(), ending);
    Settlement { lease: job.lease, seen: Some(Flags::default()), leave, follow_ups: Vec::new() }
}

async fn settle(store: &SqliteStore, job: &Claimed, ending: Ending) -> Settled {
    store.settle(&[settlement(job, ending)]).await.unwrap()[0]
}

fn success() -> Ending {
    Ending::Succeeded { result: None }
}

fn failure(error: &str) -> Ending {
    Ending::Failed { error: error.into(), retry_in: Some(Duration::ZERO) }
}

fn interruption() -> Ending {
    Ending::Interrupted(Interruption { delay: Duration::ZERO, max_interruptions: 3 })
}

async fn assert_sound(store: &SqliteStore) {
    assert_eq!(store.check().await.unwrap().problems, Vec::<String>::new());
}

fn run_async(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(test);
}

#[test]
fn claims_come_by_priority_across_queues_then_by_time() {
    run_async(async {
        let store = memory().await;
        let start = store.now().await.unwrap();
        let at = |seconds: i64| start - chrono::Duration::seconds(100 - seconds);
        let low = add(&store, job("a").priority(-3).run_at(at(1))).await;
        let late = add(&store, job("a").queue("mail").priority(7).run_at(at(30))).await;
        let early = add(&store, job("a").priority(7).run_at(at(20))).await;
        let middle = add(&store, job("a").queue("mail").priority(7).run_at(at(25))).await;
        add(&store, job("a").priority(9).run_at(at(500))).await;
        add(&store, job("a").queue("other").priority(9)).await;
        let mut request = ClaimRequest::new(worker(&store).await, 3);
        request.queues = vec!["default".into(), "mail".into(), "mail".into()];
        let mut cursor = ClaimCursor::default();
        let first = store.claim(&request, &mut cursor).await.unwrap();
        assert_eq!((ids(&first.jobs), first.more), (vec![early, middle, late], true));
        let second = store.claim(&request, &mut cursor).await.unwrap();
        assert_eq!((ids(&second.jobs), second.more), (vec![low], false));
        assert_sound(&store).await;
    });
}

#[test]
fn a_claimed_job_carries_what_was_asked() {
    run_async(async {
        let store = memory().await;
        let asked = job("resize")
            .priority(4)
            .max_attempts(5)
            .timeout(Some(Duration::from_millis(1500)))
            .flags(["gpu"])
            .tags(["blue"])
            .retry(RetryPolicy::fixed(Duration::from_secs(9)));
        add(&store, asked).await;
        let claimed = claim_one(&store, worker(&store).await).await;
        assert_eq!((claimed.kind(), claimed.queue(), claimed.priority()), ("resize", "default", 4));
        assert_eq!((claimed.attempt(), claimed.max_attempts(), claimed.lease().lease_no), (1, 5, 1));
        assert_eq!(claimed.payload(), r#"{"from":"resize"}"#);
        assert_eq!(claimed.timeout(), Some(Duration::from_millis(1500)));
        assert_eq!((claimed.flags(), claimed.tags()), (&["gpu".to_owned()][..], &["blue".to_owned()][..]));
        assert_eq!(claimed.backoff(), Some(Duration::from_secs(9)));
    });
}

#[test]
fn kinds_and_flags_choose_what_is_claimed() {
    run_async(async {
        let store = memory().await;
        add(&store, job("unknown")).await;
        add(&store, job("mail").flags(["gpu", "beta"])).await;
        let gpu = add(&store, job("mail").flags(["gpu"])).await;
        add(&store, job("mail")).await;
        let mut request = ClaimRequest::new(worker(&store).await, 10);
        request.kinds = Some(vec!["mail".into()]);
        request.accept_flags = vec!["gpu".into()];
        request.forbid_flags = vec!["beta".into()];
        assert_eq!(ids(&claim(&store, &request).await), [gpu]);
    });
}

#[test]
fn a_dead_or_unknown_worker_gets_nothing() {
    run_async(async {
        let store = memory().await;
        add(&store, job("a")).await;
        assert!(claim(&store, &ClaimRequest::new(WorkerId::new(), 1)).await.is_empty());
        let dead = worker(&store).await;
        store.pin_clock(Some(Utc::now() + chrono::Duration::hours(1))).await.unwrap();
        assert_eq!(store.mark_dead(None).await.unwrap(), [dead]);
        assert!(claim(&store, &ClaimRequest::new(dead, 1)).await.is_empty());
        assert_eq!(store.beat(dead, &[]).await.unwrap(), Beat::Dead);
    });
}

#[test]
fn at_most_one_suspect_is_claimed_in_its_place() {
    run_async(async {
        let store = memory().await;
        let me = worker(&store).await;
        add(&store, job("a").priority(5)).await;
        add(&store, job("a").priority(1)).await;
        let held = claim(&store, &ClaimRequest::new(me, 2)).await;
        for held in &held {
            assert_eq!(settle(&store, held, interruption()).await, Settled::Stored);
        }
        let suspects = ids(&held);
        let high = add(&store, job("a").priority(9)).await;
        let low = add(&store, job("a").priority(0)).await;
        let mut request = ClaimRequest::new(me, 1);
        request.suspects = Suspects::Leave;
        assert_eq!(ids(&claim(&store, &request).await), [high]);
        request.limit = 10;
        request.suspects = Suspects::One;
        assert_eq!(ids(&claim(&store, &request).await), [suspects[0], low]);
        assert_eq!(ids(&claim(&store, &request).await), [suspects[1]]);
    });
}

#[test]
fn a_limited_queue_is_never_overdrawn() {
    run_async(async {
        let store = memory().await;
        let me = worker(&store).await;
        let before = add(&store, job("a").queue("serial")).await;
        let mut request = ClaimRequest::new(me, 10);
        request.queues = vec!["serial".into(), "default".into()];
        let held = claim(&store, &request).await;
        assert_eq!(ids(&held), [before]);
        // The lease taken before there was a limit counts.
        store.set_queue("serial", &QueueChange { paused: None, limit: Some(Some(2)) }).await.unwrap();
        let first = add(&store, job("a").queue("serial").priority(5)).await;
        let second = add(&store, job("a").queue("serial").priority(1)).await;
        let open = add(&store, job("a")).await;
        let mut cursor = ClaimCursor::default();
        let claims = store.claim(&request, &mut cursor).await.unwrap();
        assert_eq!(ids(&claims.jobs), [first, open]);
        assert!(store.claim(&request, &mut cursor).await.unwrap().jobs.is_empty());
        settle(&store, &held[0], success()).await;
        assert_eq!(ids(&store.claim(&request, &mut cursor).await.unwrap().jobs), [second]);
        let serial = &store.queues().await.unwrap()[1];
        assert_eq!((serial.name.as_str(), serial.limit, serial.running), ("serial", Some(2), 2));
        assert!(
            store.set_queue("serial", &QueueChange { paused: None, limit: Some(Some(0)) }).await.is_err()
        );
    });
}

#[test]
fn a_resumed_cursor_finds_what_arrived_behind_it() {
    run_async(async {
        let store = memory().await;
        let jobs = (0..30).map(|_| job("a").validate().unwrap()).collect::<Vec<_>>();
        store.enqueue(&jobs).await.unwrap();
        let request = ClaimRequest::new(worker(&store).await, 10);
        let mut cursor = ClaimCursor::default();
        let mut seen = ids(&store.claim(&request, &mut cursor).await.unwrap().jobs);
        let behind = add(&store, job("a").run_at(DateTime::UNIX_EPOCH)).await;
        let above = add(&store, job("a").priority(3)).await;
        // Heads are scanned at a bounded pace, so a claim may come back empty.
        let patience = std::time::Instant::now() + Duration::from_secs(10);
        while seen.len() < 32 && std::time::Instant::now() < patience {
            seen.extend(ids(&store.claim(&request, &mut cursor).await.unwrap().jobs));
        }
        assert_eq!(seen.len(), 32);
        assert!(seen.contains(&behind) && seen.contains(&above));
    });
}

#[test]
fn late_settle_from_a_lost_lease_changes_nothing() {
    run_async(async {
        let store = memory().await;
        let (slow, fast) = (worker(&store).await, worker(&store).await);
        let id = add(&store, job("a")).await;
        let lost = claim_one(&store, slow).await;
        assert_eq!(settle(&store, &lost, interruption()).await, Settled::Stored);
        let held = claim_one(&store, fast).await;
        assert_eq!(held.lease().lease_no, 2);
        for ending in [success(), failure("late"), Ending::Released] {
            assert_eq!(settle(&store, &lost, ending).await, Settled::LeaseLost);
        }
        assert_eq!(store.mark_started(&lost.lease).await.unwrap(), Fenced::LeaseLost);
        let data = serde_json::value::to_raw_value(&json!(1)).unwrap();
        assert_eq!(store.save_checkpoint(&lost.lease, &data).await.unwrap(), Fenced::LeaseLost);
        assert_eq!(store.progress(&[(lost.lease, data)]).await.unwrap(), [Fenced::LeaseLost]);
        assert_eq!(
            store.beat(slow, &[lost.lease]).await.unwrap(),
            Beat::Alive { lost: vec![lost.lease], cancel: Vec::new() }
        );
        assert_eq!(store.get(id).await.unwrap().unwrap().locked_by, Some(fast));
        assert_sound(&store).await;
    });
}

#[test]
fn a_repeated_settle_says_stored_again() {
    run_async(async {
        let store = memory().await;
        let me = worker(&store).await;
        let id = add(&store, job("a").max_attempts(2)).await;
        let first = claim_one(&store, me).await;
        for _ in 0..2 {
            assert_eq!(settle(&store, &first, failure("bo\0om")).await, Settled::Stored);
        }
        // A sweeper's charge in the holder's name is not the holder's own.
        assert_eq!(settle(&store, &first, failure("other")).await, Settled::LeaseLost);
        let second = claim_one(&store, me).await;
        for _ in 0..2 {
            assert_eq!(settle(&store, &second, success()).await, Settled::Stored);
        }
        let record = store.get(id).await.unwrap().unwrap();
        assert_eq!((record.status, record.attempts), (Status::Succeeded, 2));
        assert_eq!(record.last_error.as_deref(), Some("boom"));
        assert_eq!(record.last_failed_at, Some(record.errors[0].ended_at));
        assert_eq!((record.errors.len(), record.errors[0].what), (1, AttemptEnd::Failed));
        assert_sound(&store).await;
    });
}

#[test]
fn a_raised_flag_sends_the_decision_back() {
    run_async(async {
        let store = memory().await;
        let me = worker(&store).await;
        let id = add(&store, job("a")).await;
        let held = claim_one(&store, me).await;
        let state = store.locate(id).await.unwrap().unwrap();
        assert_eq!(store.operate(id, &state, &Operation::RequestCancel).await.unwrap(), Operated::Done);
        assert_eq!(
            store.beat(me, &[held.lease]).await.unwrap(),
            Beat::Alive { lost: Vec::new(), cancel: vec![held.lease] }
        );
        let flags = Flags { cancel_requested: true, superseded: false };
        assert_eq!(settle(&store, &held, failure("no")).await, Settled::Flagged(flags));
        let running = Running { flags, ..held.running() };
        let leave = lifecycle::settle(&running, failure("no"));
        let again = Settlement { seen: Some(flags), leave, ..settlement(&held, success()) };
        assert_eq!(store.settle(&[again]).await.unwrap(), [Settled::Stored]);
        assert_eq!(store.get(id).await.unwrap().unwrap().status, Status::Cancelled);
        assert_sound(&store).await;
    });
}

#[test]
fn follow_ups_exist_only_if_the_settle_was_stored() {
    run_async(async {
        let store = memory().await;
        let me = worker(&store).await;
        add(&store, job("a")).await;
        let held = claim_one(&store, me).await;
        let next = job("next").validate().unwrap();
        let with = |ending| Settlement { follow_ups: vec![next.clone()], ..settlement(&held, ending) };
        let stale = Settlement { lease: Lease { lease_no: 9, ..held.lease }, ..with(success()) };
        assert_eq!(store.settle(&[stale]).await.unwrap(), [Settled::LeaseLost]);
        assert!(store.get(next.id()).await.unwrap().is_none());
        for _ in 0..2 {
            assert_eq!(store.settle(&[with(success())]).await.unwrap(), [Settled::Stored]);
        }
        assert!(store.get(next.id()).await.unwrap().is_some());
        assert_sound(&store).await;
    });
}

#[test]
fn one_idempotency_key_makes_one_job_however_many_ask() {
    run_async(async {
        let folder = Folder::new();
        let stores = [Arc::new(folder.store().await), Arc::new(folder.store().await)];
        let tasks = (0..10).map(|n| {
            let store = stores[n % 2].clone();
            let job = NewJob::new("a", &n).idempotency_key("order-17").validate().unwrap();
            tokio::spawn(async move { store.enqueue(&[job]).await.unwrap()[0] })
        });
        let mut answers = Vec::new();
        for task in tasks.collect::<Vec<_>>() {
            answers.push(task.await.unwrap());
        }
        let created = answers.iter().filter(|answer| answer.how == EnqueuedAs::Created).collect::<Vec<_>>();
        assert_eq!(created.len(), 1);
        assert!(answers.iter().all(|answer| answer.id == created[0].id));
    });
}

#[test]
fn a_repeated_enqueue_is_the_same_job() {
    run_async(async {
        let store = memory().await;
        let me = worker(&store).await;
        let plain = job("a").validate().unwrap();
        let keyed = job("b").unique_key("k", UniqueMode::Replace).idempotency_key("i").validate().unwrap();
        for _ in 0..2 {
            for answer in store.enqueue(&[plain.clone(), keyed.clone()]).await.unwrap() {
                assert_eq!(answer.how, EnqueuedAs::Created);
            }
        }
        for held in claim(&store, &ClaimRequest::new(me, 9)).await {
            settle(&store, &held, success()).await;
        }
        // The key is free by now, and must not go to a job that has ended.
        assert_eq!(store.enqueue(&[keyed]).await.unwrap()[0].how, EnqueuedAs::Created);
        assert_sound(&store).await;
    });
}

#[test]
fn unique_keys_dedupe_replace_and_move_on() {
    run_async(async {
        let store = memory().await;
        let me = worker(&store).await;
        let keyed = |n: i64, mode| NewJob::new("a", &n).unique_key("k", mode);
        let far = Utc::now() + chrono::Duration::hours(5);
        let first = keyed(1, UniqueMode::Dedupe).run_at(far).validate().unwrap();
        store.enqueue(std::slice::from_ref(&first)).await.unwrap();
        let answer = |jobs: Vec<Enqueued>| (jobs[0].id, jobs[0].how);

        let same = keyed(2, UniqueMode::Dedupe).validate().unwrap();
        assert_eq!(answer(store.enqueue(&[same]).await.unwrap()), (first.id(), EnqueuedAs::Existing));
        let kept = keyed(3, UniqueMode::PreserveRunAt).priority(8).validate().unwrap();
        assert_eq!(answer(store.enqueue(&[kept]).await.unwrap()), (first.id(), EnqueuedAs::Replaced));
        let record = store.get(first.id()).await.unwrap().unwrap();
        assert_eq!((record.payload.get(), record.priority), ("3", 8));
        assert_eq!(record.run_at.timestamp(), far.timestamp());
        let now = keyed(4, UniqueMode::Replace).validate().unwrap();
        assert_eq!(answer(store.enqueue(&[now]).await.unwrap()), (first.id(), EnqueuedAs::Replaced));

        let held = claim_one(&store, me).await;
        assert_eq!((held.lease().id, held.payload()), (first.id(), "4"));
        let newer = keyed(5, UniqueMode::Replace).validate().unwrap();
        assert_eq!(
            answer(store.enqueue(std::slice::from_ref(&newer)).await.unwrap()),
            (newer.id(), EnqueuedAs::Created)
        );
        let flags = Flags { cancel_requested: false, superseded: true };
        assert_eq!(settle(&store, &held, failure("x")).await, Settled::Flagged(flags));
        assert_sound(&store).await;
        assert_eq!(settle_as(&store, &held, flags, failure("x")).await, Settled::Stored);

        // The old job cannot come back while the new one lives.
        let ended = store.locate(first.id()).await.unwrap().unwrap();
        let reopened = store.operate(first.id(), &ended, &Operation::Reopen).await.unwrap();
        assert_eq!(reopened, Operated::KeyTaken(newer.id()));
        let waiting = store.locate(newer.id()).await.unwrap().unwrap();
        let cancelled =
            store.operate(newer.id(), &waiting, &Operation::Cancel { attempts: 0 }).await.unwrap();
        assert_eq!(cancelled, Operated::Done);
        assert_eq!(store.operate(first.id(), &ended, &Operation::Reopen).await.unwrap(), Operated::Done);
        let record = store.get(first.id()).await.unwrap().unwrap();
        assert_eq!((record.status, record.attempts, record.lease_no), (Status::Queued, 0, 1));
        assert_sound(&store).await;
    });
}

async fn settle_as(store: &SqliteStore, job: &Claimed, flags: Flags, ending: Ending) -> Settled {
    let leave = lifecycle::settle(&Running { flags, ..job.running() }, ending);
    let settlement = Settlement { lease: job.lease, seen: Some(flags), leave, follow_ups: Vec::new() };
    store.settle(&[settlement]).await.unwrap()[0]
}

#[test]
fn an_operators_move_is_refused_once_the_job_has_moved() {
    run_async(async {
        let store = memory().await;
        let me = worker(&store).await;
        let id = add(&store, job("a").delay(Duration::from_secs(900))).await;
        let waiting = store.locate(id).await.unwrap().unwrap();
        let edit = crate::Edit::default().priority(6).payload("[7]").validate().unwrap();
        assert_eq!(store.operate(id, &waiting, &Operation::Rewrite(edit)).await.unwrap(), Operated::Done);
        assert_eq!(store.operate(id, &waiting, &Operation::RunNow).await.unwrap(), Operated::Done);
        let held = claim_one(&store, me).await;
        assert_eq!((held.priority(), held.payload()), (6, "[7]"));
        for to in [Operation::RunNow, Operation::Cancel { attempts: 0 }] {
            assert_eq!(store.operate(id, &waiting, &to).await.unwrap(), Operated::Moved);
        }
        settle(&store, &held, success()).await;
        let ended = store.locate(id).await.unwrap().unwrap();
        assert_eq!(store.operate(id, &ended, &Operation::Remove).await.unwrap(), Operated::Done);
        assert_eq!(store.operate(id, &ended, &Operation::Remove).await.unwrap(), Operated::Moved);
        assert!(store.locate(id).await.unwrap().is_none());
        assert!(store.counts().await.unwrap().is_empty());
        assert_sound(&store).await;
    });
}

#[test]
fn only_the_dead_are_robbed() {
    run_async(async {
        let store = memory().await;
        let start = Utc::now();
        let later = |seconds| Some(start + chrono::Duration::seconds(seconds));
        store.pin_clock(later(0)).await.unwrap();
        let me = worker(&store).await;
        add(&store, job("plain")).await;
        add(&store, job("tough").flags(["infrastructure_resilient"])).await;
        assert_eq!(claim(&store, &ClaimRequest::new(me, 2)).await.len(), 2);
        let kinds = async |scope: SweepScope| {
            let found = store.interrupted(&scope).await.unwrap();
            found.into_iter().map(|lease| (lease.kind.clone(), lease.why)).collect::<Vec<_>>()
        };
        store.pin_clock(later(61)).await.unwrap();
        assert_eq!(kinds(SweepScope::default()).await, [("plain".into(), Interruptor::DeadWorker)]);
        let lease = store.interrupted(&SweepScope::default()).await.unwrap().remove(0);
        let recovery = Recovery::Default(Interruption::default());
        let settlement = Settlement {
            lease: lease.lease(),
            seen: Some(Flags::default()),
            leave: lifecycle::recover(&lease.running, recovery),
            follow_ups: Vec::new(),
        };
        let take = [(lease.why, settlement)];
        assert_eq!(store.recover(&take).await.unwrap(), [Settled::LeaseLost], "not declared dead yet");
        assert_eq!(store.mark_dead(None).await.unwrap(), [me]);
        assert_eq!(store.recover(&take).await.unwrap(), [Settled::Stored]);
        assert_eq!(store.recover(&take).await.unwrap(), [Settled::LeaseLost], "once is enough");
        assert_eq!(store.get(lease.id).await.unwrap().unwrap().status, Status::Retrying);
        assert!(kinds(SweepScope::default()).await.is_empty());
        store.pin_clock(later(181)).await.unwrap();
        assert_eq!(kinds(SweepScope::default()).await, [("tough".into(), Interruptor::DeadWorker)]);
        assert_sound(&store).await;
    });
}

#[test]
fn hung_handlers_and_orphans_are_found() {
    run_async(async {
        let store = memory().await;
        let start = Utc::now();
        store.pin_clock(Some(start)).await.unwrap();
        let me = worker(&store).await;
        add(&store, job("endless").timeout(None)).await;
        add(&store, job("hung").timeout(Some(Duration::from_secs(10)))).await;
        assert_eq!(claim(&store, &ClaimRequest::new(me, 2)).await.len(), 2);
        store.pin_clock(Some(start + chrono::Duration::seconds(71))).await.unwrap();
        store.beat(me, &[]).await.unwrap();
        let found = store.interrupted(&SweepScope::default()).await.unwrap();
        assert_eq!(
            (found.len(), found[0].kind.as_str(), found[0].why),
            (1, "hung", Interruptor::HungHandler)
        );
        store.engine.write(|tx| tx.execute("delete from workers", [])).await.unwrap();
        let found = store.interrupted(&SweepScope::default()).await.unwrap();
        assert!(found.iter().all(|lease| lease.why == Interruptor::UnknownWorker) && found.len() == 2);
    });
}

#[test]
fn retention_keeps_each_outcome_its_own_time_and_the_counts_true() {
    run_async(async {
        let store = memory().await;
        let start = Utc::now();
        store.pin_clock(Some(start)).await.unwrap();
        let me = worker(&store).await;
        for _ in 0..5 {
            add(&store, job("a")).await;
        }
        for (n, held) in claim(&store, &ClaimRequest::new(me, 5)).await.iter().enumerate() {
            let ending =
                if n == 0 { Ending::Failed { error: "x".into(), retry_in: None } } else { success() };
            settle(&store, held, ending).await;
        }
        store.pin_clock(Some(start + chrono::Duration::days(8))).await.unwrap();
        let policy = Retention::default();
        assert_eq!(store.retain(&policy, 3).await.unwrap(), Retained { removed: 2, done: false });
        assert!(store.fold_tallies(100).await.unwrap() > 0);
        assert_eq!(store.retain(&policy, 3).await.unwrap(), Retained { removed: 2, done: true });
        assert_sound(&store).await;
        let counts = store.counts().await.unwrap();
        assert_eq!((counts.len(), counts[0].status, counts[0].jobs), (1, Status::FailedPermanent, 1));
        assert_eq!(store.retain(&policy, 3).await.unwrap(), Retained { removed: 0, done: true });
    });
}

#[test]
fn retention_leaps_over_what_is_young_by_its_id() {
    run_async(async {
        let store = memory().await;
        let me = worker(&store).await;
        let old = JobId("01800000-0000-7000-8000-000000000001".parse().unwrap());
        let unordered = JobId("ff000000-0000-4000-8000-000000000001".parse().unwrap());
        for job in [job("a").id(old), job("a"), job("a").id(unordered)] {
            add(&store, job).await;
        }
        for held in claim(&store, &ClaimRequest::new(me, 9)).await {
            settle(&store, &held, success()).await;
        }
        let age = "update finished set finished_at = 1000";
        store.engine.write(move |tx| tx.execute(age, [])).await.unwrap();
        let retained = store.retain(&Retention::default(), 100).await.unwrap();
        assert_eq!(retained, Retained { removed: 2, done: true }, "the young one was never looked at");
        assert_sound(&store).await;
    });
}

#[test]
fn lists_page_by_id_and_filter() {
    run_async(async {
        let store = memory().await;
        let mut all = Vec::new();
        for n in 0..7 {
            all.push(add(&store, job(if n % 2 == 0 { "even" } else { "odd" }).tags([format!("t{n}")])).await);
        }
        all.reverse();
        let page = |page: Page| (page.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), page.next);
        let filter = ListFilter { limit: 3, ..ListFilter::default() };
        let first = page(store.list(&filter).await.unwrap());
        assert_eq!(first, (all[..3].to_vec(), Some(all[2])));
        let second = ListFilter { cursor: first.1, offset: 1, ..filter.clone() };
        assert_eq!(page(store.list(&second).await.unwrap()).0, all[4..7]);
        let even =
            ListFilter { kind: Some("even".into()), status: Some(Status::Queued), ..ListFilter::default() };
        assert_eq!(page(store.list(&even).await.unwrap()), (vec![all[0], all[2], all[4], all[6]], None));
        let tagged = ListFilter { tag: Some("t5".into()), ..ListFilter::default() };
        assert_eq!(page(store.list(&tagged).await.unwrap()).0, [all[1]]);
        let far = ListFilter { offset: 10_001, ..ListFilter::default() };
        let refused = store.list(&far).await.unwrap_err();
        assert!(refused.field() == Some("offset") && refused.to_string().contains("cursor"));
    });
}

#[test]
fn check_names_what_is_wrong() {
    run_async(async {
        let store = memory().await;
        for key in ["k1", "k2"] {
            add(&store, job("a").unique_key(key, UniqueMode::Dedupe)).await;
        }
        add(&store, job("a")).await;
        store
            .engine
            .write(|tx| {
                tx.conn.execute_batch(
                    "delete from keys where key = 'k1';
                     update keys set key = 'k3' where key = 'k2';
                     delete from ready where keyed = 0;
                     insert into finished (id, finished_at, lease_no, outcome, attempts, max_attempts, interruptions)
                     values (zeroblob(16), 1, 1, 'succeeded', 1, 1, 0);
                     insert into tallies values (0, 'q', 'k', 'cancelled', 0, 0, 4);",
                )?;
                Ok(())
            })
            .await
            .unwrap();
        let report = store.check().await.unwrap();
        let has = |words: &str| report.problems.iter().filter(|problem| problem.contains(words)).count();
        assert_eq!(report.jobs, 3);
        assert_eq!(has("in ready 0, in running 0 and in finished 0"), 1);
        assert_eq!(has("in finished but not in jobs"), 1);
        assert_eq!(has("unique key `k3` belongs to"), 1);
        assert_eq!(has("does not own its unique key"), 2);
        assert_eq!(has("say 4 cancelled jobs, but there are 0"), 1);
    });
}

#[test]
fn a_failing_call_is_undone_alone() {
    run_async(async {
        let folder = Folder::new();
        let store = Arc::new(folder.store().await);
        // Holding the write lock from outside makes the calls gather.
        let blocker = Connection::open(folder.path()).unwrap();
        blocker.execute_batch("begin immediate").unwrap();
        let mut tasks = Vec::new();
        for n in 0..20 {
            let store = store.clone();
            tasks.push(tokio::spawn(async move {
                let job = NewJob::new("a", &n).validate().unwrap();
                store
                    .engine
                    .write(move |tx| {
                        enqueue::enqueue(tx, &[job])?;
                        match n % 4 {
                            0 => Err(Error::conflict("on purpose").into()),
                            1 => panic!("on purpose"),
                            _ => Ok(()),
                        }
                    })
                    .await
            }));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        blocker.execute_batch("rollback").unwrap();
        let mut stored = 0;
        for task in tasks {
            stored += u64::from(task.await.unwrap().is_ok());
        }
        assert_eq!(stored, 10);
        assert_eq!(store.check().await.unwrap(), CheckReport { jobs: 10, problems: Vec::new() });
    });
}

#[test]
fn two_stores_on_one_file_never_share_a_job_and_wake_each_other() {
    run_async(async {
        let folder = Folder::new();
        let (one, two) = (Arc::new(folder.store().await), Arc::new(folder.store().await));
        let mut wakeups = two.subscribe().await.unwrap();
        tokio::time::sleep(Duration::from_millis(150)).await;
        let jobs = (0..400).map(|n| NewJob::new("a", &n).validate().unwrap()).collect::<Vec<_>>();
        one.enqueue(&jobs).await.unwrap();
        let woken = tokio::time::timeout(Duration::from_secs(2), wakeups.next()).await;
        assert_eq!(woken.unwrap(), None, "a look at every queue");
        two.wake(&["mail".into()]).await.unwrap();
        assert_eq!(wakeups.next().await.as_deref(), Some("mail"));

        let drain = |store: Arc<SqliteStore>| async move {
            let request = ClaimRequest::new(worker(&store).await, 7);
            let mut cursor = ClaimCursor::default();
            let mut seen = Vec::new();
            let mut idle = 0;
            while idle < 5 {
                let claims = store.claim(&request, &mut cursor).await.unwrap();
                idle = if claims.jobs.is_empty() { idle + 1 } else { 0 };
                tokio::time::sleep(Duration::from_millis(if idle > 0 { 20 } else { 0 })).await;
                for held in &claims.jobs {
                    assert_eq!(settle(&store, held, success()).await, Settled::Stored);
                }
                seen.extend(ids(&claims.jobs));
            }
            seen
        };
        let (a, b) = tokio::join!(tokio::spawn(drain(one.clone())), tokio::spawn(drain(two.clone())));
        let mut seen = [a.unwrap(), b.unwrap()].concat();
        seen.sort();
        assert_eq!(seen, jobs.iter().map(ValidJob::id).collect::<Vec<_>>());
        assert_sound(&two).await;
    });
}

#[test]
fn a_claim_that_nobody_awaits_leases_nothing() {
    run_async(async {
        let folder = Folder::new();
        let store = folder.store().await;
        let me = worker(&store).await;
        add(&store, job("a")).await;
        let blocker = Connection::open(folder.path()).unwrap();
        blocker.execute_batch("begin immediate").unwrap();
        let (request, mut cursor) = (ClaimRequest::new(me, 1), ClaimCursor::default());
        let given_up =
            tokio::time::timeout(Duration::from_millis(30), store.claim(&request, &mut cursor)).await;
        assert!(given_up.is_err());
        blocker.execute_batch("rollback").unwrap();
        assert_eq!(store.claim(&request, &mut cursor).await.unwrap().jobs.len(), 1);
    });
}

#[test]
fn a_job_enqueued_in_the_callers_transaction_goes_with_it() {
    run_async(async {
        let folder = Folder::new();
        let store = folder.store().await;
        let mut mine = Connection::open(folder.path()).unwrap();
        let job = job("a").validate().unwrap();
        let tx = mine.transaction().unwrap();
        store.enqueue_in(&tx, std::slice::from_ref(&job)).unwrap();
        drop(tx);
        assert!(store.get(job.id()).await.unwrap().is_none());
        let tx = mine.transaction().unwrap();
        store.enqueue_in(&tx, std::slice::from_ref(&job)).unwrap();
        tx.commit().unwrap();
        assert!(store.get(job.id()).await.unwrap().is_some());
    });
}

#[test]
fn exactly_one_caller_fires_a_tick() {
    run_async(async {
        let store = memory().await;
        let tick = DateTime::from_timestamp(1_700_000_000, 0).unwrap();
        let next = tick + chrono::Duration::minutes(1);
        let mut schedule = Schedule {
            name: "nightly".into(),
            expression: "0 3 * * *".into(),
            zone: "Europe/Oslo".into(),
            missed: "one".into(),
            template: "{}".into(),
            paused: true,
            next_at: tick,
            last_at: None,
        };
        store.put_schedule(&schedule).await.unwrap();
        let jobs = [job("a").validate().unwrap()];
        assert!(!store.fire("nightly", tick, next, &jobs).await.unwrap());
        schedule.paused = false;
        store.put_schedule(&schedule).await.unwrap();
        assert!(store.fire("nightly", tick, next, &jobs).await.unwrap());
        assert!(!store.fire("nightly", tick, next, &jobs).await.unwrap());
        let moved = Schedule { next_at: next, last_at: Some(tick), ..schedule };
        assert_eq!(store.schedules().await.unwrap(), [moved]);
        assert!(store.remove_schedule("nightly").await.unwrap());
        assert!(!store.remove_schedule("nightly").await.unwrap());
    });
}

#[test]
fn opening_and_migrating_tell_what_is_wrong() {
    run_async(async {
        let folder = Folder::new();
        let missing = format!("sqlite:{}/none/queue.db", folder.0.display());
        for url in
            [missing.as_str(), "sqlite:", "sqlite:a.db?mode=ro", &format!("sqlite:{}", folder.0.display())]
        {
            assert_eq!(SqliteStore::open(url).await.unwrap_err().field(), Some("url"), "{url}");
        }
        std::fs::write(folder.0.join("text"), "not a database, however long it may be".repeat(40)).unwrap();
        let text = SqliteStore::open(&format!("sqlite:{}/text", folder.0.display())).await;
        assert!(text.unwrap_err().to_string().contains("not an SQLite database"));

        let store = SqliteStore::open(&folder.url()).await.unwrap();
        assert_eq!(store.schema_version().await.unwrap(), 0);
        let early = store.get(JobId::new()).await.unwrap_err();
        assert!(early.is_schema() && early.to_string().contains("longshore migrate"));
        assert!(store.enqueue(&[job("a").validate().unwrap()]).await.unwrap_err().is_schema());
        assert_eq!(store.migrate().await.unwrap(), Migrated { from: 0, to: SCHEMA_VERSION });
        assert_eq!(store.migrate().await.unwrap(), Migrated { from: SCHEMA_VERSION, to: SCHEMA_VERSION });
        let newer = "insert into migrations (version, applied_at) values (99, 0)";
        store.engine.write(move |tx| tx.execute(newer, [])).await.unwrap();
        let newer = store.migrate().await.unwrap_err();
        assert!(newer.is_schema() && newer.to_string().contains("upgrade"));
    });
}

#[test]
fn a_locked_database_is_unavailable_and_a_read_only_one_says_so() {
    run_async(async {
        let folder = Folder::new();
        let store = folder.store().await;
        let blocker = Connection::open(folder.path()).unwrap();
        blocker.execute_batch("begin immediate").unwrap();
        assert!(store.wake(&["default".into()]).await.is_ok());
        assert!(store.get(JobId::new()).await.unwrap().is_none(), "readers do not wait");
        let refused = store.enqueue(&[job("a").validate().unwrap()]).await.unwrap_err();
        assert!(refused.is_unavailable());
        blocker.execute_batch("rollback").unwrap();
        store.engine.write(|tx| Ok(tx.conn.pragma_update(None, "query_only", true)?)).await.unwrap();
        assert!(store.enqueue(&[job("a").validate().unwrap()]).await.unwrap_err().is_read_only());
    });
}

#[test]
fn the_claims_walk_their_indexes() {
    run_async(async {
        let store = memory().await;
        let plan = store.engine.write(|tx| {
            let sql = format!("explain query plan {}", claim::NEXT_DUE);
            let nulls = [(); 5].map(|()| rusqlite::types::Null);
            tx.rows(&sql, rusqlite::params_from_iter(nulls), |row| row.get::<_, String>(3))
        });
        let plan = plan.await.unwrap();
        let range = "COVERING INDEX ready_claim (queue=? AND priority=? AND (run_at,id)>(?,?) AND run_at<?)";
        assert!(plan.len() == 1 && plan[0].contains(range), "no scan, no sorting: {plan:?}");
    });
}

#[test]
fn errors_are_cleaned_and_cut_on_a_character() {
    let long = format!("x{}", "é".repeat(40_000));
    assert_eq!(clean(&long).len(), 64 * 1024 - 1);
    assert_eq!(clean("a\0b"), "ab");
}
