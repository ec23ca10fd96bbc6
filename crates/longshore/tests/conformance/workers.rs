//! Workers: registering, beating, dying, going.

use std::time::Duration;

use longshore::store::{Beat, Fenced, NewWorker};
use longshore::{Status, WorkerId};

use crate::fixture::*;

cases! {
    a_worker_is_shown_as_it_registered,
    workers_are_listed_newest_first_with_their_leases,
    a_worker_is_stale_past_its_own_threshold_or_the_one_asked_for,
    a_worker_is_declared_dead_past_its_own_threshold_only,
    a_threshold_asked_for_overrides_the_workers_own,
    a_beat_keeps_a_worker_alive,
    a_late_beat_before_the_sweep_saves_the_worker,
    the_dead_stay_dead,
    an_unknown_worker_is_told_that_it_is_dead,
    a_beat_names_every_lost_lease,
    a_dead_worker_without_leases_is_forgotten,
    a_dead_worker_is_kept_while_a_lease_names_it,
    a_worker_that_retires_is_gone,
    a_worker_that_retires_with_leases_is_dead_and_recovered,
    a_repeated_registration_is_no_error,
    a_live_worker_may_say_anew_what_it_takes,
    leases_are_told_by_their_worker,
    leases_a_worker_does_not_know_of_are_given_back_uncharged,
}

const ALIVE: Beat = Beat::Alive { lost: Vec::new(), cancel: Vec::new() };

async fn a_worker_is_shown_as_it_registered(fixture: Fixture) {
    let worker = NewWorker {
        queues: vec!["letters".into(), "it's".into()],
        kinds: Some(vec!["mail".into()]),
        concurrency: 17,
        stale_after: Duration::from_millis(45_500),
        ..NewWorker::new("host-a/17")
    };
    fixture.store().register(&worker).await.expect("register");
    fixture.advance(5 * SECOND).await;
    assert_eq!(fixture.store().beat(worker.id, &[]).await.expect("beat"), ALIVE);
    let shown = fixture.worker_record(worker.id).await.expect("listed");
    assert_eq!((shown.name.as_str(), shown.queues, shown.kinds), ("host-a/17", worker.queues, worker.kinds));
    assert_eq!((shown.concurrency, shown.stale_after), (17, Duration::from_millis(45_500)));
    assert_eq!((shown.started_at, shown.heartbeat_at), (start(), start() + 5 * SECOND));
    assert_eq!((shown.dead_at, shown.stale, shown.running), (None, false, 0));
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
    let shown: Vec<_> = workers.iter().map(|worker| (worker.id, worker.running)).collect();
    assert_eq!(shown, [(new, 0), (old, 2)]);
}

async fn a_worker_is_stale_past_its_own_threshold_or_the_one_asked_for(fixture: Fixture) {
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

async fn a_worker_is_declared_dead_past_its_own_threshold_only(fixture: Fixture) {
    let (quick, slow) = (fixture.worker_with(10 * SECOND).await, fixture.worker_with(HOUR).await);
    fixture.advance(10 * SECOND).await;
    assert_eq!(fixture.store().mark_dead(None).await.expect("mark_dead"), []);
    fixture.advance(SECOND).await;
    assert_eq!(fixture.store().mark_dead(None).await.expect("mark_dead"), [quick]);
    assert_eq!(fixture.store().beat(slow, &[]).await.expect("beat"), ALIVE);
}

async fn a_threshold_asked_for_overrides_the_workers_own(fixture: Fixture) {
    let (quick, slow) = (fixture.worker_with(10 * SECOND).await, fixture.worker_with(HOUR).await);
    fixture.advance(MINUTE).await;
    assert_eq!(fixture.store().mark_dead(Some(2 * MINUTE)).await.expect("mark_dead"), []);
    let mut dead = fixture.store().mark_dead(Some(30 * SECOND)).await.expect("mark_dead");
    dead.sort();
    let mut both = [quick, slow];
    both.sort();
    assert_eq!(dead, both);
}

async fn a_beat_keeps_a_worker_alive(fixture: Fixture) {
    let worker = fixture.worker().await;
    for _ in 0..3 {
        fixture.advance(50 * SECOND).await;
        assert_eq!(fixture.store().mark_dead(None).await.expect("mark_dead"), []);
        assert_eq!(fixture.store().beat(worker, &[]).await.expect("beat"), ALIVE);
    }
}

async fn a_late_beat_before_the_sweep_saves_the_worker(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.advance(HOUR).await;
    let lease = claimed.lease();
    assert_eq!(fixture.store().beat(lease.worker, &[lease]).await.expect("beat"), ALIVE);
    assert_eq!(fixture.sweep_now().await.recovered, 0);
}

async fn the_dead_stay_dead(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let worker = claimed.lease().worker;
    fixture.advance(61 * SECOND).await;
    assert_eq!(fixture.store().mark_dead(None).await.expect("mark_dead"), [worker]);
    for _ in 0..2 {
        assert_eq!(fixture.store().beat(worker, &[claimed.lease()]).await.expect("beat"), Beat::Dead);
    }
    let again = NewWorker { id: worker, queues: vec!["mail".into()], ..NewWorker::new("test") };
    fixture.store().register(&again).await.expect("register");
    assert_eq!(fixture.store().mark_dead(None).await.expect("mark_dead"), []);
    let shown = fixture.worker_record(worker).await.expect("a lease still names it");
    assert_eq!(shown.queues, ["default"]);
    assert_eq!((shown.dead_at, shown.heartbeat_at), (Some(start() + 61 * SECOND), start()));
}

async fn an_unknown_worker_is_told_that_it_is_dead(fixture: Fixture) {
    assert_eq!(fixture.store().beat(WorkerId::new(), &[]).await.expect("beat"), Beat::Dead);
}

async fn a_beat_names_every_lost_lease(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    for _ in 0..3 {
        fixture.enqueue_kind("mail").await;
    }
    let claimed = fixture.claim(worker, 3).await;
    fixture.must_finish(&claimed[0], done()).await;
    fixture.must_finish(&claimed[2], failed()).await;
    let held: Vec<_> = claimed.iter().map(longshore::store::Claimed::lease).collect();
    let Beat::Alive { mut lost, cancel } = fixture.store().beat(worker, &held).await.expect("beat") else {
        panic!("it lives")
    };
    lost.sort();
    assert_eq!((lost, cancel), (vec![held[0], held[2]], Vec::new()));
}

async fn a_dead_worker_without_leases_is_forgotten(fixture: Fixture) {
    let worker = fixture.worker().await;
    fixture.advance(61 * SECOND).await;
    fixture.store().mark_dead(None).await.expect("mark_dead");
    // For a while it stays visible to people who ask what happened.
    fixture.advance(DAY).await;
    fixture.store().mark_dead(None).await.expect("mark_dead");
    assert!(fixture.worker_record(worker).await.is_none());
}

async fn a_dead_worker_is_kept_while_a_lease_names_it(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.advance(61 * SECOND).await;
    for _ in 0..3 {
        fixture.store().mark_dead(None).await.expect("mark_dead");
        fixture.advance(DAY).await;
    }
    assert!(fixture.worker_record(claimed.lease().worker).await.is_some());
}

async fn a_worker_that_retires_is_gone(fixture: Fixture) {
    let worker = fixture.worker().await;
    fixture.store().retire(worker).await.expect("retire");
    assert!(fixture.worker_record(worker).await.is_none());
    assert_eq!(fixture.store().beat(worker, &[]).await.expect("beat"), Beat::Dead);
    fixture.store().retire(worker).await.expect("retiring again is no error");
}

async fn a_worker_that_retires_with_leases_is_dead_and_recovered(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.store().retire(claimed.lease().worker).await.expect("retire");
    let shown = fixture.worker_record(claimed.lease().worker).await.expect("a lease still names it");
    assert_eq!(shown.dead_at, Some(start()));
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    assert_eq!(fixture.status(claimed.lease().id).await, Status::Retrying);
}

async fn a_repeated_registration_is_no_error(fixture: Fixture) {
    let worker = NewWorker::new("test");
    // The first answer may have been lost.
    fixture.store().register(&worker).await.expect("register");
    fixture.store().register(&worker).await.expect("register");
    assert_eq!(fixture.store().workers(None).await.expect("workers").len(), 1);
}

async fn a_live_worker_may_say_anew_what_it_takes(fixture: Fixture) {
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
    let shown = fixture.worker_record(worker.id).await.expect("listed");
    assert_eq!((&shown.queues, &shown.kinds, shown.concurrency), (&other.queues, &other.kinds, 9));
    assert_eq!((shown.name, shown.stale_after), (worker.name, worker.stale_after), "who it is stays");
    assert_eq!((shown.started_at, shown.heartbeat_at), (start(), start() + 5 * SECOND));
}

async fn leases_are_told_by_their_worker(fixture: Fixture) {
    for _ in 0..4 {
        fixture.enqueue_kind("mail").await;
    }
    let (worker, other) = (fixture.worker().await, fixture.worker().await);
    let held = fixture.claim(worker, 3).await;
    fixture.claim_one(other).await;
    let told = async |worker| {
        let mut leases = fixture.store().leases(worker).await.expect("leases");
        leases.sort();
        leases
    };
    assert_eq!(told(worker).await, [held[0].lease(), held[1].lease(), held[2].lease()]);
    fixture.must_finish(&held[1], done()).await;
    assert_eq!(told(worker).await, [held[0].lease(), held[2].lease()]);
    assert_eq!(told(other).await.len(), 1);
    assert_eq!(told(WorkerId::new()).await, []);
}

async fn leases_a_worker_does_not_know_of_are_given_back_uncharged(fixture: Fixture) {
    for _ in 0..4 {
        fixture.enqueue_kind("mail").await;
    }
    let (worker, other) = (fixture.worker().await, fixture.worker().await);
    let held = fixture.claim(worker, 3).await;
    let foreign = fixture.claim_one(other).await;
    let known = [held[1].lease()];
    assert_eq!(fixture.give_back_unknown(worker, &known).await.expect("give back"), 2);
    assert_eq!(fixture.give_back_unknown(worker, &known).await.expect("give back"), 0);
    assert_eq!(fixture.store().leases(worker).await.expect("leases"), known);
    assert_eq!(fixture.store().leases(other).await.expect("leases"), [foreign.lease()]);
    for lost in [&held[0], &held[2]] {
        let job = fixture.job(lost.lease().id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Queued, 0, 0));
        assert_eq!(fixture.finish(lost, done()).await, Fenced::LeaseLost);
    }
    fixture.must_finish(&held[1], done()).await;
    let again = fixture.claim(worker, 9).await;
    assert_eq!(ids(&again), [held[0].lease().id, held[2].lease().id]);
    assert!(again.iter().all(|job| job.attempt() == 1 && job.lease().lease_no == 2), "{again:?}");
}
