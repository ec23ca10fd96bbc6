//! How many jobs are where, without counting rows.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use longshore::store::{ClaimRequest, Count, Tallied};
use longshore::{Ending, NewJob, Outcome, Status};

use crate::fixture::*;

cases! {
    an_empty_queue_counts_nothing,
    jobs_are_counted_by_status_queue_and_kind,
    the_oldest_due_job_of_each_queue_is_found_whatever_its_priority,
    a_retry_takes_the_job_out_of_its_outcome,
    counts_agree_with_the_list_after_a_walk,
    folding_keeps_the_sums,
    folding_ends_and_leaves_few_rows,
    a_job_moved_to_another_queue_by_its_key_is_counted_there,
    ends_are_tallied_by_minute_queue_kind_and_outcome,
    tallies_tell_how_long_the_attempts_took,
    an_end_stays_tallied_whatever_becomes_of_the_job,
    minutes_that_were_added_up_are_told_by_the_hour,
    minutes_of_the_present_hour_are_told_apart,
}

/// Counts as a map, by what they count.
async fn counts(fixture: &Fixture) -> BTreeMap<(Status, String, String), u64> {
    let counts = fixture.counts().await.expect("counts");
    let mut map = BTreeMap::new();
    for Count { status, queue, kind, jobs, estimated } in counts {
        assert!(!estimated, "so few jobs are counted exactly");
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

async fn the_oldest_due_job_of_each_queue_is_found_whatever_its_priority(fixture: Fixture) {
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
    assert_eq!(fixture.overdue().await.expect("overdue"), expected[1..], "what runs does not wait");
}

async fn a_retry_takes_the_job_out_of_its_outcome(fixture: Fixture) {
    for outcome in Outcome::ALL {
        let id = fixture.ended(job("mail"), outcome).await;
        fixture.retry(id).await.expect("retry");
        assert_eq!(counts(&fixture).await, BTreeMap::from([(key(Status::Queued, "default", "mail"), 1)]));
        fixture.cancel(id).await.expect("cancel");
        fixture.delete(id).await.expect("delete");
        assert_eq!(counts(&fixture).await, BTreeMap::new());
    }
}

/// Every way a job can move, with numbers drawn from a fixed seed: the counts
/// must be those of the list.
async fn counts_agree_with_the_list_after_a_walk(fixture: Fixture) {
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
                    fixture.claim_as(&ClaimRequest { queues, ..ClaimRequest::new(worker, 3) }).await
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
    let mut filter = longshore::store::ListFilter { limit: 200, ..Default::default() };
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

async fn folding_keeps_the_sums(fixture: Fixture) {
    for outcome in Outcome::ALL {
        for _ in 0..3 {
            fixture.ended(job("mail"), outcome).await;
            fixture.advance(MINUTE).await;
        }
    }
    let before = counts(&fixture).await;
    for age in [HOUR, 3 * HOUR, 2 * DAY, 30 * DAY] {
        fixture.advance(age).await;
        // Steps of two, so that a fold is cut in the middle.
        while fixture.store().fold_tallies(2).await.expect("fold") > 0 {
            assert_eq!(counts(&fixture).await, before, "after {age:?}");
        }
        assert_eq!(counts(&fixture).await, before, "after {age:?}");
        assert_eq!(fixture.check().await.expect("check").problems, Vec::<String>::new());
    }
}

async fn folding_ends_and_leaves_few_rows(fixture: Fixture) {
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
        assert!(round < 50, "folding never ends");
    }
    let rows = fixture.ask("select count(*) from tallies", None).await;
    assert!(rows <= 5, "{rows} rows are left");
    assert_eq!(fixture.counted(Status::Succeeded).await, 30);
}

async fn a_job_moved_to_another_queue_by_its_key_is_counted_there(fixture: Fixture) {
    let keyed = |queue: &str| job("mail").queue(queue).unique_key("k", longshore::UniqueMode::Replace);
    fixture.add(keyed("red")).await;
    fixture.enqueue(keyed("blue")).await.expect("enqueue");
    assert_eq!(counts(&fixture).await, BTreeMap::from([(key(Status::Queued, "blue", "mail"), 1)]));
    let worker = fixture.worker().await;
    let claimed = fixture.claim_from("blue", worker, 1).await;
    fixture.must_finish(&claimed[0], Ending::Succeeded { result: None }).await;
    assert_eq!(counts(&fixture).await, BTreeMap::from([(key(Status::Succeeded, "blue", "mail"), 1)]));
}

// ---- what ended when ---------------------------------------------------------

/// What ended since then, without how long it took.
async fn tallied(
    fixture: &Fixture,
    since: DateTime<Utc>,
) -> Vec<(DateTime<Utc>, String, String, Outcome, u64)> {
    let tallied = fixture.store().tallied(since).await.expect("tallied");
    let each = |t: Tallied| {
        assert_eq!(t.run_ms.iter().map(|(_, jobs)| jobs).sum::<u64>(), t.jobs);
        assert!(t.run_ms.is_sorted_by(|a, b| a.0 < b.0), "{:?}", t.run_ms);
        (t.minute, t.queue, t.kind, t.outcome, t.jobs)
    };
    tallied.into_iter().map(each).collect()
}

/// The start of the minute that every case begins in.
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
    // Neither is an end.
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

async fn tallies_tell_how_long_the_attempts_took(fixture: Fixture) {
    let took = [Duration::ZERO, Duration::from_millis(6), 3 * SECOND, 3 * SECOND, 40 * MINUTE];
    let worker = fixture.worker_with(DAY).await;
    for took in took {
        fixture.enqueue_kind("mail").await;
        let claimed = fixture.claim_one(worker).await;
        fixture.advance(took).await;
        fixture.must_finish(&claimed, done()).await;
    }
    let mut found = BTreeMap::<u64, u64>::new();
    for tallied in fixture.store().tallied(start()).await.expect("tallied") {
        for (bound, jobs) in tallied.run_ms {
            *found.entry(bound.ceil() as u64).or_default() += jobs;
        }
    }
    // Bounds are above the truth, by a fifth at most.
    let expected = BTreeMap::from([(1, 1), (7, 1), (3444, 2), (2_493_948, 1)]);
    assert_eq!(found, expected);
}

async fn an_end_stays_tallied_whatever_becomes_of_the_job(fixture: Fixture) {
    let id = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    fixture.retry(id).await.expect("retry");
    fixture.cancel(id).await.expect("cancel");
    fixture.delete(id).await.expect("delete");
    let of = |outcome| (first_minute(), "default".to_owned(), "mail".to_owned(), outcome, 1);
    let expected = [of(Outcome::FailedPermanent), of(Outcome::Cancelled)];
    assert_eq!(tallied(&fixture, start()).await, expected);
}

async fn minutes_that_were_added_up_are_told_by_the_hour(fixture: Fixture) {
    // 07:08:09, 07:28:09, 07:48:09, 08:08:09, 08:28:09.
    for _ in 0..5 {
        fixture.ended(job("mail"), Outcome::Succeeded).await;
        fixture.advance(20 * MINUTE).await;
    }
    let whole = fixture.store().tallied(start()).await.expect("tallied");
    assert_eq!(whole.len(), 5);
    fixture.advance(DAY).await;
    while fixture.store().fold_tallies(2).await.expect("fold") > 0 {}
    let seven = first_minute() - 8 * MINUTE;
    let hour = |at, jobs| (at, "default".to_owned(), "mail".to_owned(), Outcome::Succeeded, jobs);
    let hours = [hour(seven, 3), hour(seven + HOUR, 2)];
    assert_eq!(tallied(&fixture, seven).await, hours);
    // Whole hours, as nothing finer is kept.
    assert_eq!(tallied(&fixture, start() + 30 * MINUTE).await, hours);
    assert_eq!(tallied(&fixture, seven + HOUR).await, hours[1..]);
    assert_eq!(tallied(&fixture, seven + 2 * HOUR).await, []);
    fixture.advance(30 * DAY).await;
    while fixture.store().fold_tallies(100).await.expect("fold") > 0 {}
    assert_eq!(tallied(&fixture, seven).await, [], "after a week only what is kept is counted");
}

async fn minutes_of_the_present_hour_are_told_apart(fixture: Fixture) {
    fixture.advance(52 * MINUTE).await;
    fixture.ended(job("mail"), Outcome::Succeeded).await;
    fixture.advance(10 * MINUTE).await;
    fixture.ended(job("mail"), Outcome::Succeeded).await;
    let ten_past = first_minute() + 62 * MINUTE;
    let expected = [(ten_past, "default".to_owned(), "mail".to_owned(), Outcome::Succeeded, 1)];
    // 08:00 is the first minute of an hour, and not all of it.
    assert_eq!(tallied(&fixture, ten_past - MINUTE).await, expected);
}
