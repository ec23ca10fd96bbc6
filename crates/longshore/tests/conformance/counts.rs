//! Counts per status, queue and kind, and tallies of finished jobs over time. Both
//! are kept without counting rows.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use longshore::store::{ClaimRequest, HistoryFilter};
use longshore::{Count, Ending, NewJob, Outcome, Status, Tallied};

use crate::fixture::*;

cases! {
    an_empty_queue_counts_nothing,
    large_numbers_of_waiting_jobs_are_estimated_and_small_ones_exact,
    jobs_are_counted_by_status_queue_and_kind,
    counts_are_ordered_by_queue_kind_and_status,
    the_age_of_the_oldest_due_job_of_each_queue_ignores_priority,
    a_retried_job_is_no_longer_counted_under_its_outcome,
    counts_agree_with_the_list_after_random_operations,
    folding_tallies_keeps_the_counts,
    folding_tallies_terminates_and_leaves_few_rows,
    one_turn_folds_fifty_thousand_tallies,
    ends_of_the_current_minute_are_folded_too,
    an_hour_has_one_row_although_its_minutes_are_folded_one_by_one,
    a_job_replaced_into_another_queue_is_counted_there,
    ends_are_tallied_by_minute_queue_kind_and_outcome,
    tallies_contain_the_durations_of_attempts,
    an_end_stays_tallied_after_the_job_is_retried_or_deleted,
    folded_minutes_are_returned_per_hour,
    minutes_of_the_current_hour_are_returned_separately,
}

/// The counts above zero, as a map.
async fn counts(fixture: &Fixture) -> BTreeMap<(Status, String, String), u64> {
    let counts = fixture.counts().await.expect("counts");
    let mut map = BTreeMap::new();
    for Count { status, queue, kind, jobs, estimated, .. } in counts {
        assert!(!estimated, "a small number of jobs must be counted exactly");
        if jobs > 0 {
            assert_eq!(map.insert((status, queue, kind), jobs), None, "counted twice");
        }
    }
    map
}

fn key(status: Status, queue: &str, kind: &str) -> (Status, String, String) {
    (status, queue.into(), kind.into())
}

async fn an_empty_queue_counts_nothing(fixture: Fixture) {
    assert_eq!(counts(&fixture).await, BTreeMap::new());
}

/// Two queues whose jobs alternate, one whose jobs came together, and two small ones.
async fn large_numbers_of_waiting_jobs_are_estimated_and_small_ones_exact(fixture: Fixture) {
    let queue = "case when n = 45000 then 'one' when n % 100 = 50 and n <= 90000 then 'small'
                      when n > 90901 then 'late' when n % 3 = 0 then 'mail' else 'bulk' end";
    // The numbers that the expression yields.
    let mut exact = BTreeMap::<&str, u64>::new();
    for n in 1..=110_901 {
        let name = match n {
            45_000 => "one",
            n if n % 100 == 50 && n <= 90_000 => "small",
            n if n > 90_901 => "late",
            n if n % 3 == 0 => "mail",
            _ => "bulk",
        };
        *exact.entry(name).or_default() += 1;
    }
    assert_eq!(exact["small"], 900);
    let (numbers, id, now, payload) = match fixture.engine() {
        Engine::Postgres => {
            ("generate_series(1, 110901) as n", "lpad(to_hex(n), 32, '0')::uuid", "now()", "'1'::json")
        }
        Engine::Sqlite => (
            "(with recursive numbers (n) as (select 1 union all select n + 1 from numbers where n < 110901)
              select n from numbers)",
            "cast(printf('%016d', n) as blob)",
            "0",
            "'1'",
        ),
    };
    fixture.skip_final_check();
    let jobs = format!(
        "insert into jobs (id, created_at, run_at, priority, max_attempts, kind, queue, payload)
         select {id}, {now}, {now}, 0, 3, 'mail', {queue}, {payload}
           from {numbers}"
    );
    fixture.sql(&jobs, None).await;
    let ready = format!(
        "insert into ready (id, run_at, since, lease_no, priority, attempt, max_attempts, interruptions, keyed, kind,
                            queue)
         select {id}, {now}, {now}, 0, 0, 0, 3, 0, 1 = 2, 'mail', {queue}
           from {numbers}"
    );
    fixture.sql(&ready, None).await;
    let check = |queue: &str, jobs: u64, estimated: bool| {
        let real = exact[queue];
        let error = jobs.abs_diff(real) as f64 / real as f64;
        assert!(if estimated { error < 0.2 } else { jobs == real }, "{queue}: {jobs} instead of {real}");
        assert!(!estimated || real > 10_000, "{queue}: a small number is exact");
    };
    let queues = fixture.queues().await.expect("queues");
    assert_eq!(
        queues.iter().map(|queue| queue.name.as_str()).collect::<Vec<_>>(),
        exact.keys().copied().collect::<Vec<_>>()
    );
    for queue in queues {
        check(&queue.name, queue.waiting, queue.waiting_estimated);
    }
    let counts = fixture.counts().await.expect("counts");
    assert_eq!(counts.len(), exact.len(), "{counts:?}");
    for Count { status, queue, kind, jobs, estimated, .. } in counts {
        assert_eq!((status, kind.as_str()), (Status::Queued, "mail"));
        check(&queue, jobs, estimated);
    }
}

async fn jobs_are_counted_by_status_queue_and_kind(fixture: Fixture) {
    fixture.ended(job("mail"), Outcome::Succeeded).await;
    fixture.ended(job("mail"), Outcome::Succeeded).await;
    fixture.ended(job("sms"), Outcome::Succeeded).await;
    fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    fixture.ended(job("mail"), Outcome::Cancelled).await;
    fixture.suspect(job("mail")).await;
    fixture.add(job("fax").priority(9)).await;
    let worker = fixture.worker().await;
    assert_eq!(kinds(&fixture.claim(worker, 1).await), ["fax"]);
    fixture.add(job("mail").queue("letters")).await;
    fixture.add(job("mail").queue("letters").delay(DAY)).await;
    let expected = BTreeMap::from([
        (key(Status::Succeeded, "default", "mail"), 2),
        (key(Status::Succeeded, "default", "sms"), 1),
        (key(Status::FailedPermanent, "default", "mail"), 1),
        (key(Status::Cancelled, "default", "mail"), 1),
        (key(Status::Retrying, "default", "mail"), 1),
        (key(Status::Running, "default", "fax"), 1),
        (key(Status::Queued, "letters", "mail"), 2),
    ]);
    assert_eq!(counts(&fixture).await, expected);
}

async fn counts_are_ordered_by_queue_kind_and_status(fixture: Fixture) {
    fixture.running(job("sms")).await;
    for (queue, kind) in [("b", "mail"), ("a", "sms"), ("a", "mail")] {
        fixture.add(job(kind).queue(queue)).await;
        let cancelled = fixture.add(job(kind).queue(queue)).await;
        fixture.cancel(cancelled).await.expect("cancel");
    }
    let counts = fixture.counts().await.expect("counts");
    let found: Vec<_> = counts.iter().map(|count| (&*count.queue, &*count.kind, count.status)).collect();
    let mut expected = vec![("default", "sms", Status::Running)];
    for (queue, kind) in [("a", "mail"), ("a", "sms"), ("b", "mail")] {
        expected.extend([(queue, kind, Status::Queued), (queue, kind, Status::Cancelled)]);
    }
    expected.sort_by_key(|(queue, ..)| *queue);
    assert_eq!(found, expected);
}

async fn the_age_of_the_oldest_due_job_of_each_queue_ignores_priority(fixture: Fixture) {
    assert_eq!(fixture.overdue().await.expect("overdue"), []);
    fixture.add(job("fax").priority(-3)).await;
    fixture.advance(Duration::from_secs(40)).await;
    fixture.add(job("mail").priority(9)).await;
    fixture.add(job("mail")).await;
    fixture.add(job("mail").queue("letters").delay(Duration::from_secs(2))).await;
    fixture.add(job("mail").queue("later").delay(DAY)).await;
    fixture.advance(Duration::from_secs(7)).await;
    let expected =
        [("default".to_owned(), Duration::from_secs(47)), ("letters".to_owned(), Duration::from_secs(5))];
    assert_eq!(fixture.overdue().await.expect("overdue"), expected);
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 3);
    assert_eq!(fixture.overdue().await.expect("overdue"), expected[1..], "a running job is not due");
}

async fn a_retried_job_is_no_longer_counted_under_its_outcome(fixture: Fixture) {
    for outcome in Outcome::ALL {
        let id = fixture.ended(job("mail"), outcome).await;
        fixture.retry(id).await.expect("retry");
        assert_eq!(counts(&fixture).await, BTreeMap::from([(key(Status::Queued, "default", "mail"), 1)]));
        fixture.cancel(id).await.expect("cancel");
        fixture.delete(id).await.expect("delete");
        assert_eq!(counts(&fixture).await, BTreeMap::new());
    }
}

/// Runs operations drawn from a fixed seed and compares the counts with the list.
async fn counts_agree_with_the_list_after_random_operations(fixture: Fixture) {
    let worker = fixture.worker_with(400 * DAY).await;
    let mut seed = 0x5eed_u64;
    let mut draw = |below: u64| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) % below
    };
    for step in 0..120 {
        let queue = ["red", "blue"][draw(2) as usize];
        match draw(7) {
            0..=2 => {
                fixture.add(NewJob::new(["mail", "sms"][draw(2) as usize], &step).queue(queue)).await;
            }
            3..=4 => {
                let queues = vec!["red".into(), "blue".into()];
                for claimed in
                    fixture.claim_with(&ClaimRequest { queues, ..ClaimRequest::new(worker, 3) }).await
                {
                    let ending = endings()[draw(7) as usize].clone();
                    if draw(5) > 0 {
                        fixture.must_finish(&claimed, ending).await;
                    }
                }
            }
            5 => {
                let page = fixture.list(&Default::default()).await.expect("list");
                if let Some(job) = page.jobs.get(draw(20) as usize) {
                    match draw(3) {
                        0 => drop(fixture.cancel(job.id).await),
                        1 => drop(fixture.retry(job.id).await),
                        _ => drop(fixture.delete(job.id).await),
                    }
                }
            }
            _ => fixture.advance(15 * SECOND).await,
        }
        if step % 20 == 0 {
            fixture.store().fold_tallies(100).await.expect("fold");
        }
    }
    let mut listed = BTreeMap::new();
    let mut filter = longshore::ListFilter { limit: 200, ..Default::default() };
    loop {
        let page = fixture.list(&filter).await.expect("list");
        for job in page.jobs {
            *listed.entry((job.status, job.queue, job.kind)).or_insert(0) += 1;
        }
        match page.next {
            Some(next) => filter.cursor = Some(next),
            None => break,
        }
    }
    assert_eq!(counts(&fixture).await, listed);
}

async fn folding_tallies_keeps_the_counts(fixture: Fixture) {
    for outcome in Outcome::ALL {
        for _ in 0..3 {
            fixture.ended(job("mail"), outcome).await;
            fixture.advance(MINUTE).await;
        }
    }
    let before = counts(&fixture).await;
    for age in [HOUR, 3 * HOUR, 2 * DAY, 30 * DAY] {
        fixture.advance(age).await;
        // Steps of two rows, so that a fold stops in the middle.
        while fixture.store().fold_tallies(2).await.expect("fold") > 0 {
            assert_eq!(counts(&fixture).await, before, "after {age:?}");
        }
        assert_eq!(counts(&fixture).await, before, "after {age:?}");
        assert_eq!(fixture.check().await.expect("check").problems, []);
    }
}

async fn folding_tallies_terminates_and_leaves_few_rows(fixture: Fixture) {
    for _ in 0..30 {
        let claimed = fixture.running(job("mail")).await;
        fixture.advance(7 * SECOND).await;
        fixture.must_finish(&claimed, done()).await;
    }
    fixture.advance(30 * DAY).await;
    for round in 0.. {
        if fixture.store().fold_tallies(1000).await.expect("fold") == 0 {
            break;
        }
        assert!(round < 50, "folding does not terminate");
    }
    let rows = fixture.query_number("select count(*) from tallies", None).await;
    assert!(rows <= 5, "{rows} rows remain");
    assert_eq!(fixture.count(Status::Succeeded).await, 30);
}

async fn fold(fixture: &Fixture) -> u64 {
    fixture.fold_tallies(|_| async { true }).await.expect("fold")
}

async fn tally_rows(fixture: &Fixture) -> i64 {
    fixture.query_number("select count(*) from tallies", None).await
}

async fn one_turn_folds_fifty_thousand_tallies(fixture: Fixture) {
    // One per minute and kind, 50 kinds, from 3 to almost 20 hours ago.
    let now = start();
    let text = match fixture.engine() {
        Engine::Postgres => format!(
            "insert into tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
             select date_trunc('minute', '{now}'::timestamptz) - interval '3 hours' - n / 50 * interval '1 minute',
                    1, 0, 'succeeded', 0, 'default', 'kind' || (n % 50)
               from generate_series(0, 49999) as n"
        ),
        Engine::Sqlite => {
            let minute = (now - 3 * HOUR - 9 * SECOND).timestamp_micros();
            format!(
                "insert into tallies (minute, queue, kind, outcome, run_bucket, ended, kept)
                 with recursive numbers (n) as (select 0 union all select n + 1 from numbers where n < 49999)
                 select {minute} - n / 50 * 60000000, 'default', 'kind' || (n % 50), 'succeeded', 0, 1, 0
                   from numbers"
            )
        }
    };
    fixture.sql(&text, None).await;
    assert_eq!(tally_rows(&fixture).await, 50_000);
    fold(&fixture).await;
    assert!(tally_rows(&fixture).await <= 18 * 50, "{} rows remain", tally_rows(&fixture).await);
    let tallied = fixture.store().tallied(&HistoryFilter::since(start() - DAY)).await.expect("tallied");
    assert_eq!(tallied.iter().map(|tallied| tallied.jobs).sum::<u64>(), 50_000);
}

/// A busy queue writes thousands of rows per minute.
async fn ends_of_the_current_minute_are_folded_too(fixture: Fixture) {
    let expected = async |rows: i64, jobs: u64| {
        assert_eq!(tally_rows(&fixture).await, rows);
        let tallied = tallied(&fixture, start()).await;
        assert_eq!(tallied.len(), 1);
        assert_eq!(tallied[0].4, jobs);
        assert_eq!(fixture.count(Status::Succeeded).await, jobs);
    };
    for round in 1..=3 {
        for _ in 0..4 {
            fixture.ended(job("mail"), Outcome::Succeeded).await;
        }
        fold(&fixture).await;
        expected(1, round * 4).await;
    }
}

async fn an_hour_has_one_row_although_its_minutes_are_folded_one_by_one(fixture: Fixture) {
    for _ in 0..24 {
        fixture.ended(job("mail"), Outcome::Succeeded).await;
        fixture.advance(10 * MINUTE).await;
        fold(&fixture).await;
    }
    // It is 11:08: the ends from 7:08 to 8:58 are folded into two hours, and 12 minutes remain.
    assert_eq!(tally_rows(&fixture).await, 2 + 12);
    assert_eq!(fixture.count(Status::Succeeded).await, 24);
}

async fn a_job_replaced_into_another_queue_is_counted_there(fixture: Fixture) {
    let keyed = |queue: &str| job("mail").queue(queue).unique_key("k", longshore::UniqueMode::Replace);
    fixture.add(keyed("red")).await;
    fixture.enqueue(keyed("blue")).await.expect("enqueue");
    assert_eq!(counts(&fixture).await, BTreeMap::from([(key(Status::Queued, "blue", "mail"), 1)]));
    let worker = fixture.worker().await;
    let claimed = fixture.claim_from("blue", worker, 1).await;
    fixture.must_finish(&claimed[0], Ending::Succeeded { result: None }).await;
    assert_eq!(counts(&fixture).await, BTreeMap::from([(key(Status::Succeeded, "blue", "mail"), 1)]));
}

// ---- tallies -----------------------------------------------------------------

/// The tallies since then, without durations.
async fn tallied(
    fixture: &Fixture,
    since: DateTime<Utc>,
) -> Vec<(DateTime<Utc>, String, String, Outcome, u64)> {
    let tallied = fixture.store().tallied(&HistoryFilter::since(since)).await.expect("tallied");
    let each = |t: Tallied| {
        assert_eq!(t.run_ms.iter().map(|(_, jobs)| jobs).sum::<u64>(), t.jobs);
        assert!(t.run_ms.is_sorted_by(|a, b| a.0 < b.0), "{:?}", t.run_ms);
        (t.minute, t.queue, t.kind, t.outcome, t.jobs)
    };
    tallied.into_iter().map(each).collect()
}

/// The start of the minute of [`start`].
fn first_minute() -> DateTime<Utc> {
    start() - 9 * SECOND
}

async fn ends_are_tallied_by_minute_queue_kind_and_outcome(fixture: Fixture) {
    let (mail, sms) = ("mail".to_owned(), "sms".to_owned());
    let (default, letters) = ("default".to_owned(), "letters".to_owned());
    assert_eq!(tallied(&fixture, start()).await, []);
    for outcome in Outcome::ALL {
        fixture.ended(job("mail"), outcome).await;
    }
    fixture.ended(job("mail"), Outcome::Succeeded).await;
    fixture.ended(job("sms"), Outcome::Succeeded).await;
    fixture.advance(MINUTE).await;
    let waiting = fixture.add(job("mail").queue("letters")).await;
    fixture.cancel(waiting).await.expect("cancel");
    // A snooze is not an end.
    let snoozing = fixture.running(job("mail")).await;
    fixture.must_finish(&snoozing, snoozed()).await;
    let (first, second) = (first_minute(), first_minute() + MINUTE);
    let expected = vec![
        (first, default.clone(), mail.clone(), Outcome::Succeeded, 2),
        (first, default.clone(), mail.clone(), Outcome::FailedPermanent, 1),
        (first, default.clone(), mail.clone(), Outcome::Cancelled, 1),
        (first, default, sms, Outcome::Succeeded, 1),
        (second, letters, mail, Outcome::Cancelled, 1),
    ];
    assert_eq!(tallied(&fixture, start()).await, expected);
    assert_eq!(tallied(&fixture, DateTime::<Utc>::MIN_UTC).await, expected);
    assert_eq!(tallied(&fixture, second).await, expected[4..]);
    assert_eq!(tallied(&fixture, second + MINUTE).await, []);
    assert_eq!(tallied(&fixture, DateTime::<Utc>::MAX_UTC).await, []);
}

async fn tallies_contain_the_durations_of_attempts(fixture: Fixture) {
    let took = [Duration::ZERO, Duration::from_millis(6), 3 * SECOND, 3 * SECOND, 40 * MINUTE];
    let worker = fixture.worker_with(DAY).await;
    for took in took {
        fixture.enqueue_kind("mail").await;
        let claimed = fixture.claim_one(worker).await;
        fixture.advance(took).await;
        fixture.must_finish(&claimed, done()).await;
    }
    let mut found = BTreeMap::<u64, u64>::new();
    for tallied in fixture.store().tallied(&HistoryFilter::since(start())).await.expect("tallied") {
        for (bound, jobs) in tallied.run_ms {
            *found.entry(bound.ceil() as u64).or_default() += jobs;
        }
    }
    // Each bound is at most a fifth above the real duration.
    let expected = BTreeMap::from([(1, 1), (7, 1), (3444, 2), (2_493_948, 1)]);
    assert_eq!(found, expected);
}

async fn an_end_stays_tallied_after_the_job_is_retried_or_deleted(fixture: Fixture) {
    let id = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    fixture.retry(id).await.expect("retry");
    fixture.cancel(id).await.expect("cancel");
    fixture.delete(id).await.expect("delete");
    let tally = |outcome| (first_minute(), "default".to_owned(), "mail".to_owned(), outcome, 1);
    let expected = [tally(Outcome::FailedPermanent), tally(Outcome::Cancelled)];
    assert_eq!(tallied(&fixture, start()).await, expected);
}

async fn folded_minutes_are_returned_per_hour(fixture: Fixture) {
    // 07:08:09, 07:28:09, 07:48:09, 08:08:09, 08:28:09.
    for _ in 0..5 {
        fixture.ended(job("mail"), Outcome::Succeeded).await;
        fixture.advance(20 * MINUTE).await;
    }
    let whole = fixture.store().tallied(&HistoryFilter::since(start())).await.expect("tallied");
    assert_eq!(whole.len(), 5);
    fixture.advance(DAY).await;
    while fixture.store().fold_tallies(2).await.expect("fold") > 0 {}
    let seven = first_minute() - 8 * MINUTE;
    let hour = |at, jobs| (at, "default".to_owned(), "mail".to_owned(), Outcome::Succeeded, jobs);
    let hours = [hour(seven, 3), hour(seven + HOUR, 2)];
    assert_eq!(tallied(&fixture, seven).await, hours);
    // Whole hours: minutes are no longer stored.
    assert_eq!(tallied(&fixture, start() + 30 * MINUTE).await, hours);
    assert_eq!(tallied(&fixture, seven + HOUR).await, hours[1..]);
    assert_eq!(tallied(&fixture, seven + 2 * HOUR).await, []);
    fixture.advance(30 * DAY).await;
    while fixture.store().fold_tallies(100).await.expect("fold") > 0 {}
    assert_eq!(tallied(&fixture, seven).await, [], "tallies by hour are dropped after a week");
}

async fn minutes_of_the_current_hour_are_returned_separately(fixture: Fixture) {
    fixture.advance(52 * MINUTE).await;
    fixture.ended(job("mail"), Outcome::Succeeded).await;
    fixture.advance(10 * MINUTE).await;
    fixture.ended(job("mail"), Outcome::Succeeded).await;
    let ten_past = first_minute() + 62 * MINUTE;
    let expected = [(ten_past, "default".to_owned(), "mail".to_owned(), Outcome::Succeeded, 1)];
    // 08:00 must mean one minute here, not the whole hour.
    assert_eq!(tallied(&fixture, ten_past - MINUTE).await, expected);
}
