//! History for charts: waiting times, failed attempts, depths and ages, by minute and later by hour.

use chrono::{DateTime, Utc};
use longshore::store::{Detail, HistoryFilter};
use longshore::{Measured, Outcome, What};
use serde_json::json;

use crate::fixture::*;
use crate::http::client::HttpClient;

cases! {
    waiting_times_are_counted_from_the_time_a_job_is_due,
    failed_attempts_are_counted_by_queue_and_kind,
    numbers_of_several_processes_add_up,
    one_process_samples_each_minute,
    history_can_be_read_with_less_detail_and_for_some_queues,
    minutes_become_hours_and_are_removed_after_eight_days,
    numbers_that_cannot_be_stored_are_stored_later,
    stats_contain_the_history,
    stats_of_a_queue_contain_its_own_depth,
}

async fn since(fixture: &Fixture, since: DateTime<Utc>) -> Vec<Measured> {
    fixture.store_measures().await;
    fixture.measured(since).await.expect("measured")
}

fn rows(measured: &[Measured], what: What) -> Vec<(&str, &str, u64)> {
    let rows = measured.iter().filter(|measure| measure.what == what);
    rows.map(|measure| (measure.queue.as_str(), measure.kind.as_str(), measure.value)).collect()
}

async fn sample(fixture: &Fixture) -> bool {
    let (counts, overdue) =
        (fixture.counts().await.expect("counts"), fixture.overdue().await.expect("overdue"));
    fixture.store_samples(&counts, &overdue).await.expect("store_samples")
}

async fn waiting_times_are_counted_from_the_time_a_job_is_due(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    for delay in [MINUTE, 2 * MINUTE] {
        fixture.add(job("mail").run_at(start() + delay)).await;
    }
    fixture.advance(3 * MINUTE).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 2);
    let measured = since(&fixture, start()).await;
    assert_eq!(rows(&measured, What::Waited), [("default", "mail", 1), ("default", "mail", 1)]);
    for (measure, waited) in measured.iter().zip([60_000.0, 120_000.0]) {
        assert!((waited..waited * 1.2).contains(&measure.up_to_ms), "{measure:?}");
        assert_eq!(measure.minute.timestamp(), (start().timestamp() / 60 + 3) * 60);
    }
}

async fn failed_attempts_are_counted_by_queue_and_kind(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    for (kind, queue) in [("mail", "a"), ("mail", "a"), ("sms", "b")] {
        fixture.add(job(kind).queue(queue).max_attempts(1)).await;
        let claimed = fixture.claim_from(queue, worker, 1).await.remove(0);
        fixture.must_finish(&claimed, failed()).await;
    }
    fixture.ended(job("mail"), Outcome::Cancelled).await;
    let crashed = fixture.running(job("mail")).await;
    let started = fixture.store().mark_started(&crashed.lease()).await;
    assert_eq!(started.expect("started"), longshore::store::Fenced::Held);
    fixture.crash_all_workers().await;
    let measured = since(&fixture, start()).await;
    assert_eq!(rows(&measured, What::Failed), [("a", "mail", 2), ("b", "sms", 1), ("default", "mail", 1)]);
}

async fn numbers_of_several_processes_add_up(fixture: Fixture) {
    let other = fixture.second_client().await;
    for client in [fixture.client(), other] {
        let claimed = fixture.running(job("mail")).await;
        client.settle_leases(vec![(claimed.lease(), failed(), Vec::new())]).await.expect("settle");
        client.store_measures().await;
    }
    assert_eq!(rows(&since(&fixture, start()).await, What::Failed), [("default", "mail", 2)]);
}

async fn one_process_samples_each_minute(fixture: Fixture) {
    for (queue, jobs) in [("a", 3), ("b", 2)] {
        for _ in 0..jobs {
            fixture.add(job("mail").queue(queue)).await;
        }
    }
    fixture.advance(10 * SECOND).await;
    assert!(sample(&fixture).await);
    fixture.add(job("mail").queue("a")).await;
    assert!(!sample(&fixture).await, "another process has sampled this minute");
    let measured = since(&fixture, start()).await;
    assert_eq!(rows(&measured, What::Depth), [("", "", 5), ("a", "", 3), ("b", "", 2)]);
    assert_eq!(rows(&measured, What::Overdue), [("", "", 10_000), ("a", "", 10_000), ("b", "", 10_000)]);
    fixture.advance(MINUTE).await;
    assert!(sample(&fixture).await);
    let measured = since(&fixture, start() + MINUTE).await;
    assert_eq!(rows(&measured, What::Depth), [("", "", 6), ("a", "", 4), ("b", "", 2)]);
}

async fn history_can_be_read_with_less_detail_and_for_some_queues(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    for (kind, queue) in [("mail", "a"), ("sms", "a"), ("sms", "a"), ("mail", "b"), ("sms", "c")] {
        fixture.add(job(kind).queue(queue).max_attempts(1)).await;
        let claimed = fixture.claim_from(queue, worker, 1).await.remove(0);
        fixture.must_finish(&claimed, failed()).await;
    }
    for (queue, jobs, age) in [("a", 3, 5), ("b", 2, 10), ("c", 1, 0)] {
        for _ in 0..jobs {
            fixture.add(job("mail").queue(queue).run_at(start() - age * SECOND)).await;
        }
    }
    fixture.store_measures().await;
    assert!(sample(&fixture).await);
    let read = async |queues: Option<&[&str]>, detail| {
        let queues = queues.map(|queues| queues.iter().map(|queue| (*queue).to_owned()).collect());
        let filter = HistoryFilter { since: start(), queues, detail };
        let measured = fixture.store().measured(&filter).await.expect("measured");
        let tallied = fixture.store().tallied(&filter).await.expect("tallied");
        let ended: Vec<_> = tallied.into_iter().map(|tally| (tally.queue, tally.kind, tally.jobs)).collect();
        let owned = |what| -> Vec<(String, String, u64)> {
            let rows = rows(&measured, what).into_iter();
            rows.map(|(queue, kind, value)| (queue.to_owned(), kind.to_owned(), value)).collect()
        };
        assert_eq!(ended, owned(What::Failed), "all jobs failed once");
        (ended, owned(What::Depth), owned(What::Overdue))
    };
    let row = |queue: &str, kind: &str, value| (queue.to_owned(), kind.to_owned(), value);

    let (ended, depth, overdue) = read(None, Detail::Total).await;
    assert_eq!(ended, [row("", "", 5)]);
    assert_eq!((depth, overdue), (vec![row("", "", 6)], vec![row("", "", 10_000)]));
    assert_eq!(read(None, Detail::Kinds).await.0, [row("", "mail", 2), row("", "sms", 3)]);
    let (ended, depth, _) = read(None, Detail::Queues).await;
    assert_eq!(ended, [row("a", "", 3), row("b", "", 1), row("c", "", 1)]);
    assert_eq!(depth, [row("", "", 6), row("a", "", 3), row("b", "", 2), row("c", "", 1)]);

    let (ended, depth, overdue) = read(Some(&["a", "b"]), Detail::Total).await;
    assert_eq!(ended, [row("", "", 4)]);
    assert_eq!((depth, overdue), (vec![row("", "", 5)], vec![row("", "", 10_000)]));
    let (ended, _, overdue) = read(Some(&["a"]), Detail::QueuesAndKinds).await;
    assert_eq!(ended, [row("a", "mail", 1), row("a", "sms", 2)]);
    assert_eq!(overdue, [row("a", "", 5_000)]);
    assert_eq!(read(Some(&[]), Detail::Total).await, (vec![], vec![], vec![]));
}

async fn minutes_become_hours_and_are_removed_after_eight_days(fixture: Fixture) {
    // A step takes values of one minute, or all.
    for (step, waiting) in [(2, 6), (1000, 12)] {
        let from = fixture.now().await;
        for jobs in [1, 3, 2] {
            for _ in 0..jobs {
                let claimed = fixture.running(job("mail").max_attempts(1)).await;
                fixture.must_finish(&claimed, failed()).await;
                fixture.add(job("sms").queue("waits")).await;
            }
            sample(&fixture).await;
            fixture.store_measures().await;
            fixture.advance(MINUTE).await;
        }
        let minutes = since(&fixture, from).await;
        assert_eq!(rows(&minutes, What::Failed).len(), 3);
        assert_eq!(minutes.iter().filter(|row| row.what == What::Depth && row.queue.is_empty()).count(), 3);

        fixture.advance(4 * HOUR).await;
        while fixture.store().fold_measures(step).await.expect("fold") > 0 {
            let failed: u64 = rows(&since(&fixture, from).await, What::Failed).iter().map(|row| row.2).sum();
            assert_eq!(failed, 6);
        }
        let hour = since(&fixture, from + 2 * MINUTE).await;
        assert_eq!(rows(&hour, What::Failed), [("default", "mail", 6)]);
        let depth = hour.iter().find(|row| row.what == What::Depth && row.queue.is_empty()).expect("a depth");
        assert_eq!(depth.value, waiting, "the largest of the hour");

        fixture.advance(9 * DAY).await;
        while fixture.store().fold_measures(step).await.expect("fold") > 0 {}
        assert_eq!(since(&fixture, from).await, []);
    }
}

async fn numbers_that_cannot_be_stored_are_stored_later(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, failed()).await;
    fixture.sql("alter table measures rename to elsewhere", None).await;
    fixture.store_measures().await;
    fixture.sql("alter table elsewhere rename to measures", None).await;
    assert_eq!(rows(&since(&fixture, start()).await, What::Failed), [("default", "mail", 1)]);
}

async fn stats_contain_the_history(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let worker = fixture.worker_with(DAY).await;
    fixture.add(job("mail")).await;
    fixture.advance(30 * SECOND).await;
    sample(&fixture).await;
    let claimed = fixture.claim_one(worker).await;
    fixture.must_finish(&claimed, failed()).await;
    fixture.store_measures().await;
    let stats = http.get("/stats").await.expect_status(200).json();
    let point = &stats["series"][0];
    assert_eq!((&point["failed_attempts"], &point["waiting"]), (&json!(1), &json!(1)));
    assert_eq!(point["oldest_due_seconds"], json!(30.0));
    for seconds in [&point["wait_seconds"]["p50"], &stats["wait_seconds"]["p99"]] {
        assert!((30.0..36.0).contains(&seconds.as_f64().expect("seconds")), "{seconds}");
    }
    let of_kind = http.get("/stats?kind=mail").await.expect_status(200).json();
    assert_eq!(of_kind["series"][0]["waiting"], json!(null), "depths are not measured by kind");
    assert_eq!(of_kind["series"][0]["failed_attempts"], json!(1));
    http.get("/stats?minutes=10080").await.expect_status(200);
}

async fn stats_of_a_queue_contain_its_own_depth(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for queue in ["a", "a", "b"] {
        fixture.add(job("mail").queue(queue)).await;
    }
    sample(&fixture).await;
    for (queue, depth) in [("a", 2), ("b", 1), ("empty", 0)] {
        let stats = http.get(&format!("/stats?queue={queue}")).await.expect_status(200).json();
        assert_eq!(stats["series"][0]["waiting"], json!(depth), "{queue}");
    }
}
