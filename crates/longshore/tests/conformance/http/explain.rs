//! `explain`, which says why a job is not running, and the statistics of the queues.

use longshore::store::NewWorker;
use longshore::{ALL_QUEUES, JobId, NewJob, Outcome, WorkerId};
use serde_json::{Value, json};

use super::client::HttpClient;
use crate::fixture::{Fixture, HOUR, MINUTE, SECOND, done, failed, job};

cases! {
    explain_returns_each_reason_in_its_situation,
    a_worker_of_every_queue_can_run_a_job_of_any_queue,
    explain_says_that_a_suspect_waits_as_a_suspect,
    explain_returns_the_number_of_jobs_ahead_and_an_estimate,
    there_is_no_estimate_if_nothing_has_ended_for_five_minutes,
    explain_lists_every_cause_with_its_remedy,
    jobs_that_no_worker_of_the_job_handles_are_not_ahead,
    explain_says_when_all_workers_of_a_job_are_busy,
    explain_names_problems_for_an_operator_before_the_job_is_due,
    a_missing_worker_is_explained_before_a_full_queue,
    explain_says_that_a_job_of_a_silent_worker_waits_for_a_sweep,
    explain_says_that_a_job_whose_worker_signed_off_waits_for_a_sweep,
    explain_says_how_long_a_worker_with_a_resilient_job_may_be_silent,
    stats_refuse_names_that_no_database_can_store,
    stats_contain_counts_and_rates,
    the_rate_does_not_depend_on_the_length_of_the_series,
}

async fn explain(http: &HttpClient, id: JobId) -> Value {
    http.get(&format!("/jobs/{id}/explain")).await.expect_status(200).json()
}

/// Registers a worker for these kinds on the default queue.
async fn register_worker(fixture: &Fixture, kinds: &[&str]) {
    let kinds = Some(kinds.iter().map(|kind| (*kind).to_owned()).collect());
    fixture.store().register(&NewWorker { kinds, ..NewWorker::new("worker") }).await.expect("register");
}

/// Registers a worker for all kinds that runs one job at a time.
async fn register_serial_worker(fixture: &Fixture) -> WorkerId {
    let worker = NewWorker { concurrency: 1, stale_after: HOUR, ..NewWorker::new("serial") };
    fixture.store().register(&worker).await.expect("register");
    worker.id
}

fn assert_message(explained: &Value, parts: &[&str]) {
    let message = explained["message"].as_str().expect("a message");
    for part in parts {
        assert!(message.contains(part), "`{part}` is missing: {message}");
    }
}

async fn a_worker_of_every_queue_can_run_a_job_of_any_queue(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet").queue("mail")).await;
    fixture.store().register(&NewWorker::new("default only")).await.expect("register");
    assert_eq!(explain(&http, id).await["reason"], "no_worker_for_queue");
    let every = NewWorker { queues: vec![ALL_QUEUES.into()], ..NewWorker::new("every queue") };
    fixture.store().register(&every).await.expect("register");
    assert_eq!(explain(&http, id).await["reason"], "waits_its_turn");
}

async fn explain_returns_each_reason_in_its_situation(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    assert_eq!(explain(&http, id).await["reason"], "no_worker_for_queue");
    // A server that only does upkeep does not run jobs.
    register_worker(&fixture, &[]).await;
    assert_eq!(explain(&http, id).await["reason"], "no_worker_for_queue");
    register_worker(&fixture, &["other"]).await;
    assert_eq!(explain(&http, id).await["reason"], "no_worker_for_kind");
    register_worker(&fixture, &["greet"]).await;
    let next = explain(&http, id).await;
    assert_eq!((&next["reason"], &next["ahead"]), (&json!("waits_its_turn"), &json!(0)));

    fixture.pause("default").await.expect("pause");
    assert_eq!(explain(&http, id).await["reason"], "queue_paused");
    fixture.resume("default").await.expect("resume");

    let later = fixture.add(NewJob::new("greet", &1).delay(MINUTE)).await;
    let explained = explain(&http, later).await;
    assert_eq!((&explained["reason"], &explained["estimated_seconds"]), (&json!("not_due"), &json!(60.0)));

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

async fn explain_says_that_a_suspect_waits_as_a_suspect(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let dead = fixture.worker_with(10 * SECOND).await;
    fixture.claim_one(dead).await;
    fixture.advance(11 * SECOND).await;
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    fixture.advance(MINUTE).await;
    register_worker(&fixture, &["greet"]).await;
    assert_eq!(explain(&http, id).await["reason"], "suspect_waits");
}

async fn explain_returns_the_number_of_jobs_ahead_and_an_estimate(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for _ in 0..10 {
        fixture.ended(job("greet"), Outcome::Succeeded).await;
    }
    fixture.advance(100 * SECOND).await;
    register_worker(&fixture, &["greet"]).await;
    for _ in 0..5 {
        fixture.add(job("greet").priority(5)).await;
    }
    let explained = explain(&http, fixture.add(job("greet")).await).await;
    assert_eq!(explained["ahead"], 5);
    let seconds = explained["estimated_seconds"].as_f64().expect("an estimate");
    // Ten jobs in a bit over 100 s, so five take about 50 s. Tallies are per minute.
    assert!((40.0..90.0).contains(&seconds), "{explained}");
}

async fn there_is_no_estimate_if_nothing_has_ended_for_five_minutes(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.ended(job("greet"), Outcome::Succeeded).await;
    let id = fixture.add(job("greet")).await;
    fixture.advance(4 * MINUTE).await;
    register_worker(&fixture, &["greet"]).await;
    let explained = explain(&http, id).await;
    assert!(explained["estimated_seconds"].is_f64(), "{explained}");
    assert!(!explained["message"].as_str().expect("a message").contains("has ended"), "{explained}");
    fixture.advance(5 * MINUTE).await;
    register_worker(&fixture, &["greet"]).await;
    let explained = explain(&http, id).await;
    assert_eq!(
        (&explained["reason"], &explained["estimated_seconds"]),
        (&json!("waits_its_turn"), &Value::Null)
    );
    assert_message(&explained, &["nothing of this queue has ended for 8 min"]);
    let new = explain(&http, fixture.add(job("greet")).await).await;
    assert!(!new["message"].as_str().expect("a message").contains("has ended"), "it is due since now: {new}");
    fixture.advance(2 * HOUR).await;
    register_worker(&fixture, &["greet"]).await;
    assert_message(&explain(&http, id).await, &["nothing of this queue has ended in the last hour"]);
}

async fn explain_lists_every_cause_with_its_remedy(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet").queue("mail").group("acme").delay(HOUR)).await;
    fixture.pause("mail").await.expect("pause");
    let paused = longshore::GroupChange { paused: Some(true), ..longshore::GroupChange::default() };
    fixture.set_group("mail", "acme", paused).await.expect("pause");
    let explained = explain(&http, id).await;
    let causes = explained["causes"].as_array().expect("causes");
    let reasons: Vec<&Value> = causes.iter().map(|cause| &cause["reason"]).collect();
    assert_eq!(reasons, ["queue_paused", "group_paused", "no_worker_for_queue", "not_due"]);
    assert_eq!(explained["reason"], "queue_paused");
    assert_eq!(causes[1]["message"], "group `acme` of queue `mail` is paused");
    assert_eq!(
        causes[1]["remedy"],
        "resume it with `longshore groups resume mail acme` or `PATCH /queues/mail/groups/acme`"
    );
    assert_message(
        &explained,
        &["queue `mail` is paused; resume it", "; and group `acme`", "; and it is not due"],
    );
}

async fn jobs_that_no_worker_of_the_job_handles_are_not_ahead(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.ended(job("greet"), Outcome::Succeeded).await;
    fixture.advance(100 * SECOND).await;
    for _ in 0..30 {
        fixture.add(job("other").priority(5)).await;
    }
    fixture.add(job("wave").priority(5)).await;
    let id = fixture.add(job("greet")).await;
    register_worker(&fixture, &["greet"]).await;
    let explained = explain(&http, id).await;
    assert_eq!(
        (&explained["ahead"], &explained["estimated_seconds"]),
        (&json!(0), &json!(0.0)),
        "{explained}"
    );
    register_worker(&fixture, &["greet", "wave"]).await;
    assert_eq!(explain(&http, id).await["ahead"], 1);
    // This worker does not handle the job, so its kinds do not count.
    register_worker(&fixture, &["other"]).await;
    assert_eq!(explain(&http, id).await["ahead"], 1);
    fixture.worker().await;
    assert_eq!(explain(&http, id).await["ahead"], 31);
}

async fn explain_says_when_all_workers_of_a_job_are_busy(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let worker = register_serial_worker(&fixture).await;
    fixture.add(job("greet")).await;
    let claimed = fixture.claim_one(worker).await;
    let id = fixture.add(job("greet")).await;
    let explained = explain(&http, id).await;
    assert_eq!((&explained["reason"], &explained["ahead"]), (&json!("workers_busy"), &json!(0)));
    assert_eq!(explained["estimated_seconds"], Value::Null, "no job has ended yet");
    assert_message(&explained, &[&worker.to_string(), "busy", "no job of its queue comes first"]);

    fixture.advance(20 * SECOND).await;
    fixture.must_finish(&claimed, done()).await;
    assert_eq!(explain(&http, id).await["reason"], "waits_its_turn");
    fixture.add(job("greet").priority(2)).await;
    fixture.add(job("greet").priority(1)).await;
    assert_eq!(fixture.claim(worker, 1).await.len(), 1);
    let explained = explain(&http, id).await;
    assert_eq!((&explained["reason"], &explained["ahead"]), (&json!("workers_busy"), &json!(1)));
    // Two jobs of 20 s in sequence. A duration bucket is up to a fifth too high.
    let seconds = explained["estimated_seconds"].as_f64().expect("an estimate");
    assert!((40.0..50.0).contains(&seconds), "{explained}");

    register_serial_worker(&fixture).await;
    assert_eq!(explain(&http, id).await["reason"], "waits_its_turn");
}

async fn explain_names_problems_for_an_operator_before_the_job_is_due(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet").delay(HOUR)).await;
    let due = fixture.job(id).await.run_at.to_string();
    let explained = explain(&http, id).await;
    assert_eq!(
        (&explained["reason"], &explained["estimated_seconds"]),
        (&json!("no_worker_for_queue"), &Value::Null)
    );
    assert_message(&explained, &["`longshore worker --queues default`", "not due before", &due]);
    register_worker(&fixture, &["other"]).await;
    let explained = explain(&http, id).await;
    assert_eq!(
        (&explained["reason"], &explained["estimated_seconds"]),
        (&json!("no_worker_for_kind"), &Value::Null)
    );
    assert_message(&explained, &["`greet`", "`longshore worker --queues default`", "not due before", &due]);

    fixture.pause("default").await.expect("pause");
    let explained = explain(&http, id).await;
    assert_eq!(explained["reason"], "queue_paused");
    assert_message(&explained, &["no live worker of queue `default` handles kind `greet`"]);
    register_worker(&fixture, &["greet"]).await;
    let explained = explain(&http, id).await;
    assert_eq!(
        (&explained["reason"], &explained["estimated_seconds"]),
        (&json!("queue_paused"), &Value::Null)
    );
    assert!(explained["due_at"].is_string(), "{explained}");
    let commands = ["`longshore queues resume default`", "`POST /queues/default/resume`"];
    assert_message(&explained, &[commands[0], commands[1], "not due before", &due]);
    fixture.resume("default").await.expect("resume");
    assert_eq!(explain(&http, id).await["reason"], "not_due");
}

async fn a_missing_worker_is_explained_before_a_full_queue(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.limit("default", Some(1)).await.expect("limit");
    fixture.add(job("other")).await;
    let worker = NewWorker { kinds: Some(vec!["other".into()]), ..NewWorker::new("other only") };
    fixture.store().register(&worker).await.expect("register");
    fixture.claim_one(worker.id).await;
    let id = fixture.add(job("greet")).await;
    assert_eq!(explain(&http, id).await["reason"], "no_worker_for_kind");
    register_worker(&fixture, &["greet"]).await;
    assert_eq!(explain(&http, id).await["reason"], "queue_limit");
}

async fn explain_says_that_a_job_of_a_silent_worker_waits_for_a_sweep(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let worker = fixture.worker_with(10 * SECOND).await;
    fixture.claim_one(worker).await;
    let last_heartbeat = fixture.now().await.to_string();
    fixture.advance(10 * SECOND).await;
    assert_eq!(explain(&http, id).await["reason"], "running");
    fixture.advance(SECOND).await;
    let explained = explain(&http, id).await;
    assert_eq!((&explained["reason"], &explained["status"]), (&json!("worker_lost"), &json!("running")));
    let since = format!("no heartbeat since {last_heartbeat}");
    assert_message(
        &explained,
        &[&worker.to_string(), &since, "the next sweep returns it", "`longshore sweep`"],
    );
    fixture.cancel(id).await.expect("cancel");
    let explained = explain(&http, id).await;
    assert_eq!(explained["reason"], "worker_lost");
    assert_message(&explained, &["the next sweep ends it as cancelled"]);
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    assert_eq!(explain(&http, id).await["reason"], "finished");
}

async fn explain_says_that_a_job_whose_worker_signed_off_waits_for_a_sweep(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let plain = fixture.add(job("greet")).await;
    let resilient = fixture.add(job("greet").flags(["infrastructure_resilient"])).await;
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 2).await.len(), 2);
    fixture.advance(SECOND).await;
    fixture.store().retire(worker).await.expect("retire");
    let explained = explain(&http, plain).await;
    assert_eq!(explained["reason"], "worker_lost");
    let since = format!("signed off or was declared dead at {}", fixture.now().await);
    assert_message(&explained, &[&since, "the next sweep returns it"]);
    // A worker that signed off runs nothing any more, so its resilient jobs need not wait.
    assert_message(&explain(&http, resilient).await, &[&since, "the next sweep returns it"]);
    assert_eq!(fixture.sweep_now().await.recovered, 2);
    assert_eq!(explain(&http, resilient).await["status"], "retrying");
}

async fn explain_says_how_long_a_worker_with_a_resilient_job_may_be_silent(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let plain = fixture.add(job("greet")).await;
    fixture.add(job("greet").flags(["infrastructure_resilient"])).await;
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 2).await.len(), 2);
    fixture.advance(61 * SECOND).await;
    assert_message(&explain(&http, plain).await, &["a resilient job allows the worker 180 s"]);
    fixture.advance(2 * MINUTE).await;
    assert_message(&explain(&http, plain).await, &["the next sweep returns it"]);
}

async fn stats_refuse_names_that_no_database_can_store(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for query in ["queue=%00", "kind=a%00"] {
        http.get(&format!("/stats?{query}")).await.expect_problem(400, "bad_request", "NUL");
    }
}

async fn stats_contain_counts_and_rates(fixture: Fixture) {
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
    let jobs: u64 =
        stats["counts"].as_array().expect("counts").iter().filter_map(|count| count["jobs"].as_u64()).sum();
    assert_eq!(jobs, 5);
    let none = http.get("/stats?queue=other").await.expect_status(200).json();
    assert_eq!((&none["counts"], &none["series"]), (&json!([]), &json!([])));
    http.get("/stats?minutes=0").await.expect_status(200);
    http.get("/stats?hours=1").await.expect_problem(400, "bad_request", "hours");
}

async fn the_rate_does_not_depend_on_the_length_of_the_series(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for _ in 0..6 {
        fixture.ended(job("greet"), longshore::Outcome::Succeeded).await;
    }
    fixture.advance(2 * MINUTE).await;
    let (short, long) = (http.get("/stats?minutes=1").await, http.get("/stats?minutes=60").await);
    let (short, long) = (short.expect_status(200).json(), long.expect_status(200).json());
    assert_eq!(short["per_second"], long["per_second"]);
    // From 07:05:00, the start of the minute five minutes ago, to 07:10:09.
    let per_second = long["per_second"].as_f64().expect("a rate");
    assert!((per_second - 6.0 / 309.0).abs() < 1e-9, "{per_second}");
    assert_eq!((&short["series"], long["series"].as_array().map(Vec::len)), (&json!([]), Some(1)));
}
