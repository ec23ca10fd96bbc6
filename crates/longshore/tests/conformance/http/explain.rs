//! Why is it not running, and how does the queue do?

use longshore::store::NewWorker;
use longshore::{JobId, NewJob, Outcome};
use serde_json::{Value, json};

use super::web::Web;
use crate::bench::{Bench, MINUTE, SECOND, failed, job};

async fn explain(web: &Web, id: JobId) -> Value {
    web.get(&format!("/jobs/{id}/explain")).await.is(200).json()
}

/// A worker of these kinds of the default queue.
async fn crew(bench: &Bench, kinds: &[&str]) {
    let kinds = Some(kinds.iter().map(|kind| (*kind).to_owned()).collect());
    bench.store().register(&NewWorker { kinds, ..NewWorker::new("crew") }).await.expect("register");
}

pub(crate) async fn each_reason_is_told_where_it_is_the_reason(bench: Bench) {
    let web = Web::new(&bench);
    let id = bench.add(job("greet")).await;
    assert_eq!(explain(&web, id).await["reason"], "no_worker_for_queue");
    // A server that only looks after the queue is no help.
    crew(&bench, &[]).await;
    assert_eq!(explain(&web, id).await["reason"], "no_worker_for_queue");
    crew(&bench, &["other"]).await;
    assert_eq!(explain(&web, id).await["reason"], "no_worker_for_kind");
    crew(&bench, &["greet"]).await;
    let turn = explain(&web, id).await;
    assert_eq!((&turn["reason"], &turn["ahead"]), (&json!("waits_its_turn"), &json!(0)));

    bench.pause("default").await.expect("pause");
    assert_eq!(explain(&web, id).await["reason"], "queue_paused");
    bench.resume("default").await.expect("resume");

    let later = bench.add(NewJob::new("greet", &1).delay(MINUTE)).await;
    let told = explain(&web, later).await;
    assert_eq!((&told["reason"], &told["estimated_seconds"]), (&json!("not_due"), &json!(60.0)));

    bench.limit("default", Some(1)).await.expect("limit");
    let worker = bench.worker().await;
    let claimed = bench.claim_one(worker).await;
    let next = bench.add(job("greet")).await;
    assert_eq!(explain(&web, next).await["reason"], "queue_limit");
    assert_eq!(explain(&web, id).await["reason"], "running");
    bench.cancel(id).await.expect("cancel");
    assert_eq!(explain(&web, id).await["reason"], "stopping");
    bench.must_finish(&claimed, failed()).await;
    assert_eq!(explain(&web, id).await["reason"], "finished");

    let claimed = bench.claim_one(worker).await;
    bench.must_finish(&claimed, failed()).await;
    assert_eq!(explain(&web, next).await["reason"], "waits_for_retry");
    web.get("/jobs/01990000-0000-7000-8000-000000000000/explain").await.is_problem(404, "not_found", "");
}

pub(crate) async fn a_suspect_is_told_that_it_waits_as_one(bench: Bench) {
    let web = Web::new(&bench);
    let id = bench.add(job("greet")).await;
    let dead = bench.worker_with(10 * SECOND).await;
    bench.claim_one(dead).await;
    bench.advance(11 * SECOND).await;
    assert_eq!(bench.sweep_now().await.recovered, 1);
    bench.advance(MINUTE).await;
    crew(&bench, &["greet"]).await;
    assert_eq!(explain(&web, id).await["reason"], "suspect_waits");
}

pub(crate) async fn a_place_and_an_estimate_are_given(bench: Bench) {
    let web = Web::new(&bench);
    for _ in 0..10 {
        bench.ended(job("greet"), Outcome::Succeeded).await;
    }
    bench.advance(100 * SECOND).await;
    crew(&bench, &["greet"]).await;
    for _ in 0..5 {
        bench.add(job("greet").priority(5)).await;
    }
    let told = explain(&web, bench.add(job("greet")).await).await;
    assert_eq!(told["ahead"], 5);
    let seconds = told["estimated_seconds"].as_f64().expect("an estimate");
    // Ten in something over 100 s: five take about 50 s; minutes are the grain.
    assert!((40.0..90.0).contains(&seconds), "{told}");
}

pub(crate) async fn stats_tell_counts_rates_and_latencies(bench: Bench) {
    let web = Web::new(&bench);
    for _ in 0..3 {
        bench.ended(job("greet"), Outcome::Succeeded).await;
    }
    bench.ended(job("greet"), Outcome::FailedPermanent).await;
    bench.add(job("greet")).await;
    let stats = web.get("/stats").await.is(200).json();
    let total = |field: &str| -> u64 {
        stats["series"].as_array().expect("points").iter().filter_map(|point| point[field].as_u64()).sum()
    };
    assert_eq!((total("succeeded"), total("failed_permanent"), total("cancelled")), (3, 1, 0));
    assert!(stats["per_second"].as_f64().expect("a rate") > 0.0);
    let counted: u64 =
        stats["counts"].as_array().expect("counts").iter().filter_map(|count| count["jobs"].as_u64()).sum();
    assert_eq!(counted, 5);
    let none = web.get("/stats?queue=elsewhere").await.is(200).json();
    assert_eq!((&none["counts"], &none["series"]), (&json!([]), &json!([])));
    web.get("/stats?minutes=0").await.is(200);
    web.get("/stats?hours=1").await.is_problem(400, "bad_request", "hours");
}
