//! Why is it not running, and how does the queue do?

use longshore::store::NewWorker;
use longshore::{JobId, NewJob, Outcome, WorkerId};
use serde_json::{Value, json};

use super::client::HttpClient;
use crate::fixture::{Fixture, HOUR, MINUTE, SECOND, done, failed, job};

cases! {
    each_reason_is_told_where_it_is_the_reason,
    a_suspect_is_told_that_it_waits_as_one,
    a_place_and_an_estimate_are_given,
    jobs_that_none_of_its_workers_takes_are_not_ahead,
    a_job_whose_workers_are_all_busy_is_told_so,
    what_a_person_must_mend_is_told_before_the_job_is_due,
    a_full_queue_is_no_reason_where_no_worker_could_run_the_job,
    a_job_of_a_lost_worker_waits_for_a_sweep,
    a_job_whose_worker_signed_off_waits_for_a_sweep,
    stats_tell_counts_rates_and_latencies,
    a_rate_is_over_the_same_time_however_short_the_series,
}

async fn explain(http: &HttpClient, id: JobId) -> Value {
    http.get(&format!("/jobs/{id}/explain")).await.expect_status(200).json()
}

/// A worker of these kinds of the default queue.
async fn crew(fixture: &Fixture, kinds: &[&str]) {
    let kinds = Some(kinds.iter().map(|kind| (*kind).to_owned()).collect());
    fixture.store().register(&NewWorker { kinds, ..NewWorker::new("crew") }).await.expect("register");
}

/// A worker of any kind that runs one job at a time.
async fn loner(fixture: &Fixture) -> WorkerId {
    let worker = NewWorker { concurrency: 1, stale_after: HOUR, ..NewWorker::new("loner") };
    fixture.store().register(&worker).await.expect("register");
    worker.id
}

fn assert_says(told: &Value, words: &[&str]) {
    let message = told["message"].as_str().expect("a message");
    for words in words {
        assert!(message.contains(words), "`{words}` is missing: {message}");
    }
}

async fn each_reason_is_told_where_it_is_the_reason(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    assert_eq!(explain(&http, id).await["reason"], "no_worker_for_queue");
    // A server that only looks after the queue is no help.
    crew(&fixture, &[]).await;
    assert_eq!(explain(&http, id).await["reason"], "no_worker_for_queue");
    crew(&fixture, &["other"]).await;
    assert_eq!(explain(&http, id).await["reason"], "no_worker_for_kind");
    crew(&fixture, &["greet"]).await;
    let turn = explain(&http, id).await;
    assert_eq!((&turn["reason"], &turn["ahead"]), (&json!("waits_its_turn"), &json!(0)));

    fixture.pause("default").await.expect("pause");
    assert_eq!(explain(&http, id).await["reason"], "queue_paused");
    fixture.resume("default").await.expect("resume");

    let later = fixture.add(NewJob::new("greet", &1).delay(MINUTE)).await;
    let told = explain(&http, later).await;
    assert_eq!((&told["reason"], &told["estimated_seconds"]), (&json!("not_due"), &json!(60.0)));

    fixture.limit("default", Some(1)).await.expect("limit");
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    let next = fixture.add(job("greet")).await;
    assert_eq!(explain(&http, next).await["reason"], "queue_limit");
    assert_eq!(explain(&http, id).await["reason"], "running");
    fixture.cancel(id).await.expect("cancel");
    assert_eq!(explain(&http, id).await["reason"], "stopping");
    fixture.must_finish(&claimed, failed()).await;
    assert_eq!(explain(&http, id).await["reason"], "finished");

    let claimed = fixture.claim_one(worker).await;
    fixture.must_finish(&claimed, failed()).await;
    assert_eq!(explain(&http, next).await["reason"], "waits_for_retry");
    http.get("/jobs/01990000-0000-7000-8000-000000000000/explain").await.expect_problem(404, "not_found", "");
}

async fn a_suspect_is_told_that_it_waits_as_one(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let dead = fixture.worker_with(10 * SECOND).await;
    fixture.claim_one(dead).await;
    fixture.advance(11 * SECOND).await;
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    fixture.advance(MINUTE).await;
    crew(&fixture, &["greet"]).await;
    assert_eq!(explain(&http, id).await["reason"], "suspect_waits");
}

async fn a_place_and_an_estimate_are_given(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for _ in 0..10 {
        fixture.ended(job("greet"), Outcome::Succeeded).await;
    }
    fixture.advance(100 * SECOND).await;
    crew(&fixture, &["greet"]).await;
    for _ in 0..5 {
        fixture.add(job("greet").priority(5)).await;
    }
    let told = explain(&http, fixture.add(job("greet")).await).await;
    assert_eq!(told["ahead"], 5);
    let seconds = told["estimated_seconds"].as_f64().expect("an estimate");
    // Ten in something over 100 s: five take about 50 s; minutes are the grain.
    assert!((40.0..90.0).contains(&seconds), "{told}");
}

async fn jobs_that_none_of_its_workers_takes_are_not_ahead(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.ended(job("greet"), Outcome::Succeeded).await;
    fixture.advance(100 * SECOND).await;
    for _ in 0..30 {
        fixture.add(job("stray").priority(5)).await;
    }
    fixture.add(job("wave").priority(5)).await;
    let id = fixture.add(job("greet")).await;
    crew(&fixture, &["greet"]).await;
    let told = explain(&http, id).await;
    assert_eq!((&told["ahead"], &told["estimated_seconds"]), (&json!(0), &json!(0.0)), "{told}");
    crew(&fixture, &["greet", "wave"]).await;
    assert_eq!(explain(&http, id).await["ahead"], 1);
    // This one never takes the job, so what it takes does not matter.
    crew(&fixture, &["stray"]).await;
    assert_eq!(explain(&http, id).await["ahead"], 1);
    fixture.worker().await;
    assert_eq!(explain(&http, id).await["ahead"], 31);
}

async fn a_job_whose_workers_are_all_busy_is_told_so(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let worker = loner(&fixture).await;
    fixture.add(job("greet")).await;
    let claimed = fixture.claim_one(worker).await;
    let id = fixture.add(job("greet")).await;
    let told = explain(&http, id).await;
    assert_eq!((&told["reason"], &told["ahead"]), (&json!("workers_busy"), &json!(0)));
    assert_eq!(told["estimated_seconds"], Value::Null, "nothing has ended yet");
    assert_says(&told, &[&worker.to_string(), "busy", "no job of its queue comes first"]);

    fixture.advance(20 * SECOND).await;
    fixture.must_finish(&claimed, done()).await;
    assert_eq!(explain(&http, id).await["reason"], "waits_its_turn");
    fixture.add(job("greet").priority(2)).await;
    fixture.add(job("greet").priority(1)).await;
    assert_eq!(fixture.claim(worker, 1).await.len(), 1);
    let told = explain(&http, id).await;
    assert_eq!((&told["reason"], &told["ahead"]), (&json!("workers_busy"), &json!(1)));
    // Two jobs of 20 s, one after the other; a bucket is up to a fifth wide.
    let seconds = told["estimated_seconds"].as_f64().expect("an estimate");
    assert!((40.0..50.0).contains(&seconds), "{told}");

    loner(&fixture).await;
    assert_eq!(explain(&http, id).await["reason"], "waits_its_turn");
}

async fn what_a_person_must_mend_is_told_before_the_job_is_due(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet").delay(HOUR)).await;
    let due = fixture.job(id).await.run_at.to_string();
    let told = explain(&http, id).await;
    assert_eq!((&told["reason"], &told["estimated_seconds"]), (&json!("no_worker_for_queue"), &Value::Null));
    assert_says(&told, &["`longshore worker --queues default`", "not due before", &due]);
    crew(&fixture, &["other"]).await;
    let told = explain(&http, id).await;
    assert_eq!((&told["reason"], &told["estimated_seconds"]), (&json!("no_worker_for_kind"), &Value::Null));
    assert_says(&told, &["`greet`", "`longshore worker --queues default`", "not due before", &due]);

    fixture.pause("default").await.expect("pause");
    let told = explain(&http, id).await;
    assert_eq!(told["reason"], "queue_paused");
    assert_says(&told, &["no live worker of queue `default` handles kind `greet`"]);
    crew(&fixture, &["greet"]).await;
    let told = explain(&http, id).await;
    assert_eq!((&told["reason"], &told["estimated_seconds"]), (&json!("queue_paused"), &Value::Null));
    assert!(told["due_at"].is_string(), "{told}");
    let commands = ["`longshore queues resume default`", "`POST /queues/default/resume`"];
    assert_says(&told, &[commands[0], commands[1], "not due before", &due]);
    fixture.resume("default").await.expect("resume");
    assert_eq!(explain(&http, id).await["reason"], "not_due");
}

async fn a_full_queue_is_no_reason_where_no_worker_could_run_the_job(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.limit("default", Some(1)).await.expect("limit");
    fixture.add(job("stray")).await;
    let worker = NewWorker { kinds: Some(vec!["stray".into()]), ..NewWorker::new("strays only") };
    fixture.store().register(&worker).await.expect("register");
    fixture.claim_one(worker.id).await;
    let id = fixture.add(job("greet")).await;
    assert_eq!(explain(&http, id).await["reason"], "no_worker_for_kind");
    crew(&fixture, &["greet"]).await;
    assert_eq!(explain(&http, id).await["reason"], "queue_limit");
}

async fn a_job_of_a_lost_worker_waits_for_a_sweep(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let worker = fixture.worker_with(10 * SECOND).await;
    fixture.claim_one(worker).await;
    let last_sign = fixture.now().await.to_string();
    fixture.advance(10 * SECOND).await;
    assert_eq!(explain(&http, id).await["reason"], "running");
    fixture.advance(SECOND).await;
    let told = explain(&http, id).await;
    assert_eq!((&told["reason"], &told["status"]), (&json!("worker_lost"), &json!("running")));
    let since = format!("silent since {last_sign}");
    assert_says(&told, &[&worker.to_string(), &since, "the next sweep gives it back", "`longshore sweep`"]);
    fixture.cancel(id).await.expect("cancel");
    let told = explain(&http, id).await;
    assert_eq!(told["reason"], "worker_lost");
    assert_says(&told, &["the next sweep ends it as cancelled"]);
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    assert_eq!(explain(&http, id).await["reason"], "finished");
}

async fn a_job_whose_worker_signed_off_waits_for_a_sweep(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let plain = fixture.add(job("greet")).await;
    let tough = fixture.add(job("greet").flags(["infrastructure_resilient"])).await;
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 2).await.len(), 2);
    fixture.advance(SECOND).await;
    fixture.store().retire(worker).await.expect("retire");
    let told = explain(&http, plain).await;
    assert_eq!(told["reason"], "worker_lost");
    let left = format!("signed off or was declared dead at {}", fixture.now().await);
    assert_says(&told, &[&left, "the next sweep gives it back"]);
    assert_says(&explain(&http, tough).await, &[&left, "its flags give it 180 s"]);
    fixture.sweep_now().await;
    assert_eq!(explain(&http, plain).await["status"], "retrying");
    assert_eq!(explain(&http, tough).await["reason"], "worker_lost");
}

async fn stats_tell_counts_rates_and_latencies(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for _ in 0..3 {
        fixture.ended(job("greet"), Outcome::Succeeded).await;
    }
    fixture.ended(job("greet"), Outcome::FailedPermanent).await;
    fixture.add(job("greet")).await;
    let stats = http.get("/stats").await.expect_status(200).json();
    let total = |field: &str| -> u64 {
        stats["series"].as_array().expect("points").iter().filter_map(|point| point[field].as_u64()).sum()
    };
    assert_eq!((total("succeeded"), total("failed_permanent"), total("cancelled")), (3, 1, 0));
    assert!(stats["per_second"].as_f64().expect("a rate") > 0.0);
    let counted: u64 =
        stats["counts"].as_array().expect("counts").iter().filter_map(|count| count["jobs"].as_u64()).sum();
    assert_eq!(counted, 5);
    let none = http.get("/stats?queue=elsewhere").await.expect_status(200).json();
    assert_eq!((&none["counts"], &none["series"]), (&json!([]), &json!([])));
    http.get("/stats?minutes=0").await.expect_status(200);
    http.get("/stats?hours=1").await.expect_problem(400, "bad_request", "hours");
}

async fn a_rate_is_over_the_same_time_however_short_the_series(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for _ in 0..6 {
        fixture.ended(job("greet"), longshore::Outcome::Succeeded).await;
    }
    fixture.advance(2 * MINUTE).await;
    let (short, long) = (http.get("/stats?minutes=1").await, http.get("/stats?minutes=60").await);
    let (short, long) = (short.expect_status(200).json(), long.expect_status(200).json());
    assert_eq!(short["per_second"], long["per_second"]);
    assert_eq!(long["per_second"], json!(6.0 / 300.0));
    assert_eq!((&short["series"], long["series"].as_array().map(Vec::len)), (&json!([]), Some(1)));
}
