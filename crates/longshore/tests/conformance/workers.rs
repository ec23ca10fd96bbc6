//! Workers: registering, beating, dying, going.

use std::time::Duration;

use longshore::store::{Beat, Fenced, NewWorker};
use longshore::{Status, WorkerId};

use crate::bench::*;

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

async fn a_worker_is_shown_as_it_registered(bench: Bench) {
    let worker = NewWorker {
        queues: vec!["letters".into(), "it's".into()],
        kinds: Some(vec!["mail".into()]),
        concurrency: 17,
        stale_after: Duration::from_millis(45_500),
        ..NewWorker::new("host-a/17")
    };
    bench.store().register(&worker).await.expect("register");
    bench.advance(5 * SECOND).await;
    assert_eq!(bench.store().beat(worker.id, &[]).await.expect("beat"), ALIVE);
    let shown = bench.worker_record(worker.id).await.expect("listed");
    assert_eq!((shown.name.as_str(), shown.queues, shown.kinds), ("host-a/17", worker.queues, worker.kinds));
    assert_eq!((shown.concurrency, shown.stale_after), (17, Duration::from_millis(45_500)));
    assert_eq!((shown.started_at, shown.heartbeat_at), (start(), start() + 5 * SECOND));
    assert_eq!((shown.dead_at, shown.stale, shown.running), (None, false, 0));
}

async fn workers_are_listed_newest_first_with_their_leases(bench: Bench) {
    let old = bench.worker_with(HOUR).await;
    bench.advance(SECOND).await;
    let new = bench.worker_with(HOUR).await;
    for _ in 0..3 {
        bench.enqueue_kind("mail").await;
    }
    bench.claim(old, 2).await;
    let workers = bench.store().workers(None).await.expect("workers");
    let shown: Vec<_> = workers.iter().map(|worker| (worker.id, worker.running)).collect();
    assert_eq!(shown, [(new, 0), (old, 2)]);
}

async fn a_worker_is_stale_past_its_own_threshold_or_the_one_asked_for(bench: Bench) {
    let (quick, slow) = (bench.worker_with(10 * SECOND).await, bench.worker_with(HOUR).await);
    bench.advance(11 * SECOND).await;
    let stale = async |threshold| {
        let workers = bench.store().workers(threshold).await.expect("workers");
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

async fn a_worker_is_declared_dead_past_its_own_threshold_only(bench: Bench) {
    let (quick, slow) = (bench.worker_with(10 * SECOND).await, bench.worker_with(HOUR).await);
    bench.advance(10 * SECOND).await;
    assert_eq!(bench.store().mark_dead(None).await.expect("mark_dead"), []);
    bench.advance(SECOND).await;
    assert_eq!(bench.store().mark_dead(None).await.expect("mark_dead"), [quick]);
    assert_eq!(bench.store().beat(slow, &[]).await.expect("beat"), ALIVE);
}

async fn a_threshold_asked_for_overrides_the_workers_own(bench: Bench) {
    let (quick, slow) = (bench.worker_with(10 * SECOND).await, bench.worker_with(HOUR).await);
    bench.advance(MINUTE).await;
    assert_eq!(bench.store().mark_dead(Some(2 * MINUTE)).await.expect("mark_dead"), []);
    let mut dead = bench.store().mark_dead(Some(30 * SECOND)).await.expect("mark_dead");
    dead.sort();
    let mut both = [quick, slow];
    both.sort();
    assert_eq!(dead, both);
}

async fn a_beat_keeps_a_worker_alive(bench: Bench) {
    let worker = bench.worker().await;
    for _ in 0..3 {
        bench.advance(50 * SECOND).await;
        assert_eq!(bench.store().mark_dead(None).await.expect("mark_dead"), []);
        assert_eq!(bench.store().beat(worker, &[]).await.expect("beat"), ALIVE);
    }
}

async fn a_late_beat_before_the_sweep_saves_the_worker(bench: Bench) {
    let claimed = bench.running(job("mail")).await;
    bench.advance(HOUR).await;
    let lease = claimed.lease();
    assert_eq!(bench.store().beat(lease.worker, &[lease]).await.expect("beat"), ALIVE);
    assert_eq!(bench.sweep_now().await.recovered, 0);
}

async fn the_dead_stay_dead(bench: Bench) {
    let claimed = bench.running(job("mail")).await;
    let worker = claimed.lease().worker;
    bench.advance(61 * SECOND).await;
    assert_eq!(bench.store().mark_dead(None).await.expect("mark_dead"), [worker]);
    for _ in 0..2 {
        assert_eq!(bench.store().beat(worker, &[claimed.lease()]).await.expect("beat"), Beat::Dead);
    }
    let again = NewWorker { id: worker, queues: vec!["mail".into()], ..NewWorker::new("bench") };
    bench.store().register(&again).await.expect("register");
    assert_eq!(bench.store().mark_dead(None).await.expect("mark_dead"), []);
    let shown = bench.worker_record(worker).await.expect("a lease still names it");
    assert_eq!(shown.queues, ["default"]);
    assert_eq!((shown.dead_at, shown.heartbeat_at), (Some(start() + 61 * SECOND), start()));
}

async fn an_unknown_worker_is_told_that_it_is_dead(bench: Bench) {
    assert_eq!(bench.store().beat(WorkerId::new(), &[]).await.expect("beat"), Beat::Dead);
}

async fn a_beat_names_every_lost_lease(bench: Bench) {
    let worker = bench.worker_with(DAY).await;
    for _ in 0..3 {
        bench.enqueue_kind("mail").await;
    }
    let claimed = bench.claim(worker, 3).await;
    bench.must_finish(&claimed[0], done()).await;
    bench.must_finish(&claimed[2], failed()).await;
    let held: Vec<_> = claimed.iter().map(longshore::store::Claimed::lease).collect();
    let Beat::Alive { mut lost, cancel } = bench.store().beat(worker, &held).await.expect("beat") else {
        panic!("it lives")
    };
    lost.sort();
    assert_eq!((lost, cancel), (vec![held[0], held[2]], Vec::new()));
}

async fn a_dead_worker_without_leases_is_forgotten(bench: Bench) {
    let worker = bench.worker().await;
    bench.advance(61 * SECOND).await;
    bench.store().mark_dead(None).await.expect("mark_dead");
    // For a while it stays visible to people who ask what happened.
    bench.advance(DAY).await;
    bench.store().mark_dead(None).await.expect("mark_dead");
    assert!(bench.worker_record(worker).await.is_none());
}

async fn a_dead_worker_is_kept_while_a_lease_names_it(bench: Bench) {
    let claimed = bench.running(job("mail")).await;
    bench.advance(61 * SECOND).await;
    for _ in 0..3 {
        bench.store().mark_dead(None).await.expect("mark_dead");
        bench.advance(DAY).await;
    }
    assert!(bench.worker_record(claimed.lease().worker).await.is_some());
}

async fn a_worker_that_retires_is_gone(bench: Bench) {
    let worker = bench.worker().await;
    bench.store().retire(worker).await.expect("retire");
    assert!(bench.worker_record(worker).await.is_none());
    assert_eq!(bench.store().beat(worker, &[]).await.expect("beat"), Beat::Dead);
    bench.store().retire(worker).await.expect("retiring again is no error");
}

async fn a_worker_that_retires_with_leases_is_dead_and_recovered(bench: Bench) {
    let claimed = bench.running(job("mail")).await;
    bench.store().retire(claimed.lease().worker).await.expect("retire");
    let shown = bench.worker_record(claimed.lease().worker).await.expect("a lease still names it");
    assert_eq!(shown.dead_at, Some(start()));
    assert_eq!(bench.sweep_now().await.recovered, 1);
    assert_eq!(bench.status(claimed.lease().id).await, Status::Retrying);
}

async fn a_repeated_registration_is_no_error(bench: Bench) {
    let worker = NewWorker::new("bench");
    // The first answer may have been lost.
    bench.store().register(&worker).await.expect("register");
    bench.store().register(&worker).await.expect("register");
    assert_eq!(bench.store().workers(None).await.expect("workers").len(), 1);
}

async fn a_live_worker_may_say_anew_what_it_takes(bench: Bench) {
    let worker = NewWorker::new("bench");
    bench.store().register(&worker).await.expect("register");
    bench.advance(5 * SECOND).await;
    let other = NewWorker {
        queues: vec!["mail".into()],
        kinds: Some(vec!["letter".into()]),
        concurrency: 9,
        stale_after: HOUR,
        name: "other".into(),
        ..worker.clone()
    };
    bench.store().register(&other).await.expect("register");
    let shown = bench.worker_record(worker.id).await.expect("listed");
    assert_eq!((&shown.queues, &shown.kinds, shown.concurrency), (&other.queues, &other.kinds, 9));
    assert_eq!((shown.name, shown.stale_after), (worker.name, worker.stale_after), "who it is stays");
    assert_eq!((shown.started_at, shown.heartbeat_at), (start(), start() + 5 * SECOND));
}

async fn leases_are_told_by_their_worker(bench: Bench) {
    for _ in 0..4 {
        bench.enqueue_kind("mail").await;
    }
    let (worker, other) = (bench.worker().await, bench.worker().await);
    let held = bench.claim(worker, 3).await;
    bench.claim_one(other).await;
    let told = async |worker| {
        let mut leases = bench.store().leases(worker).await.expect("leases");
        leases.sort();
        leases
    };
    assert_eq!(told(worker).await, [held[0].lease(), held[1].lease(), held[2].lease()]);
    bench.must_finish(&held[1], done()).await;
    assert_eq!(told(worker).await, [held[0].lease(), held[2].lease()]);
    assert_eq!(told(other).await.len(), 1);
    assert_eq!(told(WorkerId::new()).await, []);
}

async fn leases_a_worker_does_not_know_of_are_given_back_uncharged(bench: Bench) {
    for _ in 0..4 {
        bench.enqueue_kind("mail").await;
    }
    let (worker, other) = (bench.worker().await, bench.worker().await);
    let held = bench.claim(worker, 3).await;
    let foreign = bench.claim_one(other).await;
    let known = [held[1].lease()];
    assert_eq!(bench.release_unknown(worker, &known, std::time::Duration::ZERO).await.expect("release"), 2);
    assert_eq!(bench.release_unknown(worker, &known, std::time::Duration::ZERO).await.expect("release"), 0);
    assert_eq!(bench.store().leases(worker).await.expect("leases"), known);
    assert_eq!(bench.store().leases(other).await.expect("leases"), [foreign.lease()]);
    for lost in [&held[0], &held[2]] {
        let job = bench.job(lost.lease().id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Queued, 0, 0));
        assert_eq!(bench.finish(lost, done()).await, Fenced::LeaseLost);
    }
    bench.must_finish(&held[1], done()).await;
    let again = bench.claim(worker, 9).await;
    assert_eq!(ids(&again), [held[0].lease().id, held[2].lease().id]);
    assert!(again.iter().all(|job| job.attempt() == 1 && job.lease().lease_no == 2), "{again:?}");
}
