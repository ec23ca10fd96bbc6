//! Workers: registration, heartbeats, death and signing off. `recovery.rs` tests what
//! happens to their jobs.

use std::time::Duration;

use longshore::store::{Beat, Claimed, Fenced, NewWorker, Registration};
use longshore::{Status, SweepScope, WorkerId};

use crate::fixture::*;

cases! {
    a_worker_record_contains_every_registered_field,
    a_registration_is_found_by_the_workers_id,
    workers_are_listed_newest_first_with_their_leases,
    a_worker_is_stale_past_its_own_or_the_requested_threshold,
    a_worker_is_declared_dead_only_past_its_own_threshold,
    a_requested_threshold_overrides_the_workers_own,
    a_heartbeat_keeps_a_worker_alive,
    a_late_heartbeat_before_the_sweep_keeps_the_worker_alive,
    a_dead_worker_cannot_become_alive_again,
    a_heartbeat_of_an_unknown_worker_returns_dead,
    a_heartbeat_returns_every_lost_lease,
    a_heartbeat_lists_the_live_leases_of_its_worker,
    a_dead_worker_without_leases_is_removed_after_a_while,
    a_dead_worker_is_kept_while_it_has_leases,
    a_worker_that_signs_off_is_removed,
    a_worker_that_signs_off_with_leases_is_dead_and_its_jobs_are_recovered,
    a_repeated_registration_is_accepted,
    registering_again_updates_the_workers_queues_and_kinds,
    leases_are_listed_per_worker,
    leases_that_a_worker_does_not_know_are_released_uncharged,
}

const ALIVE: Beat = Beat::Alive { lost: Vec::new(), cancel: Vec::new() };

async fn a_worker_record_contains_every_registered_field(fixture: Fixture) {
    let worker = NewWorker {
        queues: vec!["letters".into(), "it's".into()],
        kinds: Some(vec!["mail".into()]),
        concurrency: 17,
        stale_after: Duration::from_millis(45_500),
        host: Some("crane-7".into()),
        pid: Some(u32::MAX),
        version: Some("0.0.9".into()),
        ..NewWorker::new("host-a/17")
    };
    fixture.store().register(&worker).await.expect("register");
    fixture.advance(5 * SECOND).await;
    assert_eq!(fixture.store().beat(worker.id, &[]).await.expect("beat"), ALIVE);
    let record = fixture.worker_record(worker.id).await.expect("worker");
    assert_eq!(
        (record.name.as_str(), record.queues, record.kinds),
        ("host-a/17", worker.queues, worker.kinds)
    );
    assert_eq!((record.concurrency, record.stale_after), (17, Duration::from_millis(45_500)));
    assert_eq!((record.started_at, record.heartbeat_at), (start(), start() + 5 * SECOND));
    assert_eq!((record.dead_at, record.stale, record.running), (None, false, 0));
    assert_eq!((record.host, record.pid, record.version), (worker.host, worker.pid, worker.version));
    let unknown = fixture.worker_record(fixture.worker().await).await.expect("worker");
    assert_eq!((unknown.host, unknown.pid, unknown.version), (None, None, None));
}

async fn a_registration_is_found_by_the_workers_id(fixture: Fixture) {
    fixture.worker_with(HOUR).await;
    let worker = NewWorker {
        queues: vec!["letters".into(), "it's".into()],
        stale_after: Duration::from_millis(45_500),
        ..NewWorker::new("host-a/17")
    };
    fixture.store().register(&worker).await.expect("register");
    let registration = Registration { queues: worker.queues, stale_after: worker.stale_after };
    let find = async |id| fixture.store().registration(id).await.expect("registration");
    assert_eq!(find(worker.id).await, Some(registration.clone()));
    assert_eq!(find(WorkerId::new()).await, None);
    fixture.advance(MINUTE).await;
    fixture.sweep_now().await;
    assert!(fixture.worker_record(worker.id).await.is_some_and(|record| record.dead_at.is_some()));
    assert_eq!(find(worker.id).await, Some(registration), "a dead worker keeps its registration");
}

async fn workers_are_listed_newest_first_with_their_leases(fixture: Fixture) {
    let old = fixture.worker_with(HOUR).await;
    fixture.advance(SECOND).await;
    let new = fixture.worker_with(HOUR).await;
    for _ in 0..3 {
        fixture.enqueue_kind("mail").await;
    }
    fixture.claim(old, 2).await;
    let workers = fixture.store().workers(None).await.expect("workers");
    let record: Vec<_> = workers.iter().map(|worker| (worker.id, worker.running)).collect();
    assert_eq!(record, [(new, 0), (old, 2)]);
}

async fn a_worker_is_stale_past_its_own_or_the_requested_threshold(fixture: Fixture) {
    let (quick, slow) = (fixture.worker_with(10 * SECOND).await, fixture.worker_with(HOUR).await);
    fixture.advance(11 * SECOND).await;
    let stale = async |threshold| {
        let workers = fixture.store().workers(threshold).await.expect("workers");
        let mut stale: Vec<_> =
            workers.into_iter().filter(|worker| worker.stale).map(|worker| worker.id).collect();
        stale.sort();
        stale
    };
    assert_eq!(stale(None).await, [quick]);
    assert_eq!(stale(Some(MINUTE)).await, []);
    let mut both = [quick, slow];
    both.sort();
    assert_eq!(stale(Some(5 * SECOND)).await, both);
}

async fn a_worker_is_declared_dead_only_past_its_own_threshold(fixture: Fixture) {
    let (quick, slow) = (fixture.worker_with(10 * SECOND).await, fixture.worker_with(HOUR).await);
    fixture.advance(10 * SECOND).await;
    assert_eq!(fixture.store().mark_dead(&SweepScope::default()).await.expect("mark_dead"), []);
    fixture.advance(SECOND).await;
    assert_eq!(fixture.store().mark_dead(&SweepScope::default()).await.expect("mark_dead"), [quick]);
    assert_eq!(fixture.store().beat(slow, &[]).await.expect("beat"), ALIVE);
}

async fn a_requested_threshold_overrides_the_workers_own(fixture: Fixture) {
    let (quick, slow) = (fixture.worker_with(10 * SECOND).await, fixture.worker_with(HOUR).await);
    fixture.advance(MINUTE).await;
    assert_eq!(
        fixture
            .store()
            .mark_dead(&SweepScope { threshold: Some(2 * MINUTE), ..SweepScope::default() })
            .await
            .expect("mark_dead"),
        []
    );
    let mut dead = fixture
        .store()
        .mark_dead(&SweepScope { threshold: Some(30 * SECOND), ..SweepScope::default() })
        .await
        .expect("mark_dead");
    dead.sort();
    let mut both = [quick, slow];
    both.sort();
    assert_eq!(dead, both);
}

async fn a_heartbeat_keeps_a_worker_alive(fixture: Fixture) {
    let worker = fixture.worker().await;
    for _ in 0..3 {
        fixture.advance(50 * SECOND).await;
        assert_eq!(fixture.store().mark_dead(&SweepScope::default()).await.expect("mark_dead"), []);
        assert_eq!(fixture.store().beat(worker, &[]).await.expect("beat"), ALIVE);
    }
}

async fn a_late_heartbeat_before_the_sweep_keeps_the_worker_alive(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.advance(HOUR).await;
    let lease = claimed.lease();
    assert_eq!(fixture.store().beat(lease.worker, &[lease]).await.expect("beat"), ALIVE);
    assert_eq!(fixture.sweep_now().await.recovered, 0);
}

async fn a_dead_worker_cannot_become_alive_again(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let worker = claimed.lease().worker;
    fixture.advance(61 * SECOND).await;
    assert_eq!(fixture.store().mark_dead(&SweepScope::default()).await.expect("mark_dead"), [worker]);
    for _ in 0..2 {
        assert_eq!(fixture.store().beat(worker, &[claimed.lease()]).await.expect("beat"), Beat::Dead);
    }
    let again = NewWorker { id: worker, queues: vec!["mail".into()], ..NewWorker::new("test") };
    fixture.store().register(&again).await.expect("register");
    assert_eq!(fixture.store().mark_dead(&SweepScope::default()).await.expect("mark_dead"), []);
    let record = fixture.worker_record(worker).await.expect("kept because of its lease");
    assert_eq!(record.queues, ["default"]);
    assert_eq!((record.dead_at, record.heartbeat_at), (Some(start() + 61 * SECOND), start()));
}

async fn a_heartbeat_of_an_unknown_worker_returns_dead(fixture: Fixture) {
    assert_eq!(fixture.store().beat(WorkerId::new(), &[]).await.expect("beat"), Beat::Dead);
}

async fn a_heartbeat_returns_every_lost_lease(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    for _ in 0..3 {
        fixture.enqueue_kind("mail").await;
    }
    let claimed = fixture.claim(worker, 3).await;
    fixture.must_finish(&claimed[0], done()).await;
    fixture.must_finish(&claimed[2], failed()).await;
    let held: Vec<_> = claimed.iter().map(longshore::store::Claimed::lease).collect();
    let Beat::Alive { mut lost, cancel } = fixture.store().beat(worker, &held).await.expect("beat") else {
        panic!("the worker must be alive")
    };
    lost.sort();
    assert_eq!((lost, cancel), (vec![held[0], held[2]], Vec::new()));
}

async fn a_heartbeat_lists_the_live_leases_of_its_worker(fixture: Fixture) {
    let suspect = fixture.suspect(job("mail")).await;
    let plain = fixture.add(job("mail")).await;
    let worker = fixture.worker().await;
    let mut claimed = fixture.claim(worker, 2).await;
    claimed.sort_by_key(|job| job.lease().id);
    assert_eq!(claimed.len(), 2);
    fixture.add(job("mail")).await;
    fixture.claim(fixture.worker().await, 1).await;
    fixture.cancel(plain).await.expect("cancel");
    fixture.advance(3 * SECOND).await;
    let live = fixture.store().beat_and_list(worker).await.expect("beat").expect("alive");
    let brief: Vec<_> =
        live.iter().map(|live| (live.lease, live.age, live.is_suspect, live.cancel_requested)).collect();
    let of = |job: &Claimed| {
        let id = job.lease().id;
        (job.lease(), 3 * SECOND, id == suspect, id == plain)
    };
    assert_eq!(brief, claimed.iter().map(of).collect::<Vec<_>>());
    let record = fixture.workers(None).await.expect("workers").into_iter().find(|known| known.id == worker);
    assert_eq!(record.expect("the worker").heartbeat_at, fixture.now().await);
    assert_eq!(fixture.store().beat_and_list(WorkerId::new()).await.expect("beat"), None);
    fixture.advance(10 * MINUTE).await;
    fixture.sweep_now().await;
    assert_eq!(fixture.store().beat_and_list(worker).await.expect("beat"), None, "a dead worker stays dead");
}

async fn a_dead_worker_without_leases_is_removed_after_a_while(fixture: Fixture) {
    let worker = fixture.worker().await;
    fixture.advance(61 * SECOND).await;
    fixture.store().mark_dead(&SweepScope::default()).await.expect("mark_dead");
    // It stays listed for a while, so that operators can see what happened.
    fixture.advance(DAY).await;
    fixture.store().mark_dead(&SweepScope::default()).await.expect("mark_dead");
    assert!(fixture.worker_record(worker).await.is_none());
}

async fn a_dead_worker_is_kept_while_it_has_leases(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.advance(61 * SECOND).await;
    for _ in 0..3 {
        fixture.store().mark_dead(&SweepScope::default()).await.expect("mark_dead");
        fixture.advance(DAY).await;
    }
    assert!(fixture.worker_record(claimed.lease().worker).await.is_some());
}

async fn a_worker_that_signs_off_is_removed(fixture: Fixture) {
    let worker = fixture.worker().await;
    fixture.store().retire(worker).await.expect("retire");
    assert!(fixture.worker_record(worker).await.is_none());
    assert_eq!(fixture.store().beat(worker, &[]).await.expect("beat"), Beat::Dead);
    fixture.store().retire(worker).await.expect("retire");
}

async fn a_worker_that_signs_off_with_leases_is_dead_and_its_jobs_are_recovered(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.store().retire(claimed.lease().worker).await.expect("retire");
    let record = fixture.worker_record(claimed.lease().worker).await.expect("kept because of its lease");
    assert_eq!(record.dead_at, Some(start()));
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    assert_eq!(fixture.status(claimed.lease().id).await, Status::Retrying);
}

async fn a_repeated_registration_is_accepted(fixture: Fixture) {
    let worker = NewWorker::new("test");
    // The reply to the first registration may have been lost.
    fixture.store().register(&worker).await.expect("register");
    fixture.store().register(&worker).await.expect("register");
    assert_eq!(fixture.store().workers(None).await.expect("workers").len(), 1);
}

async fn registering_again_updates_the_workers_queues_and_kinds(fixture: Fixture) {
    let worker = NewWorker::new("test");
    fixture.store().register(&worker).await.expect("register");
    fixture.advance(5 * SECOND).await;
    let other = NewWorker {
        queues: vec!["mail".into()],
        kinds: Some(vec!["letter".into()]),
        concurrency: 9,
        stale_after: HOUR,
        name: "other".into(),
        ..worker.clone()
    };
    fixture.store().register(&other).await.expect("register");
    let record = fixture.worker_record(worker.id).await.expect("worker");
    assert_eq!((&record.queues, &record.kinds, record.concurrency), (&other.queues, &other.kinds, 9));
    assert_eq!(
        (record.name, record.stale_after),
        (worker.name, worker.stale_after),
        "name and threshold must not change"
    );
    assert_eq!((record.started_at, record.heartbeat_at), (start(), start() + 5 * SECOND));
}

async fn leases_are_listed_per_worker(fixture: Fixture) {
    for _ in 0..4 {
        fixture.enqueue_kind("mail").await;
    }
    let (worker, other) = (fixture.worker().await, fixture.worker().await);
    let held = fixture.claim(worker, 3).await;
    fixture.claim_one(other).await;
    let leases_of = async |worker| {
        let mut leases = fixture.store().leases(worker).await.expect("leases");
        leases.sort();
        leases
    };
    assert_eq!(leases_of(worker).await, [held[0].lease(), held[1].lease(), held[2].lease()]);
    fixture.must_finish(&held[1], done()).await;
    assert_eq!(leases_of(worker).await, [held[0].lease(), held[2].lease()]);
    assert_eq!(leases_of(other).await.len(), 1);
    assert_eq!(leases_of(WorkerId::new()).await, []);
}

async fn leases_that_a_worker_does_not_know_are_released_uncharged(fixture: Fixture) {
    for _ in 0..4 {
        fixture.enqueue_kind("mail").await;
    }
    let (worker, other) = (fixture.worker().await, fixture.worker().await);
    let held = fixture.claim(worker, 3).await;
    let other_claim = fixture.claim_one(other).await;
    let known = [held[1].lease()];
    assert_eq!(fixture.release_unknown(worker, &known).await.expect("release"), 2);
    assert_eq!(fixture.release_unknown(worker, &known).await.expect("release"), 0);
    assert_eq!(fixture.store().leases(worker).await.expect("leases"), known);
    assert_eq!(fixture.store().leases(other).await.expect("leases"), [other_claim.lease()]);
    for lost in [&held[0], &held[2]] {
        let job = fixture.job(lost.lease().id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Queued, 0, 0));
        assert!(job.errors.is_empty(), "they never started: {:?}", job.errors);
        assert_eq!(fixture.finish(lost, done()).await, Fenced::LeaseLost);
    }
    fixture.must_finish(&held[1], done()).await;
    let again = fixture.claim(worker, 9).await;
    assert_eq!(ids(&again), [held[0].lease().id, held[2].lease().id]);
    assert!(again.iter().all(|job| job.attempt() == 1 && job.lease().lease_no == 2), "{again:?}");
}
