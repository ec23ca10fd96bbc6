//! Wake-ups are hints; these cases wait for them with a generous end.

use std::time::Duration;

use longshore::store::Wakeups;
use longshore::{Client, NewJob};
use tokio::sync::mpsc;

use crate::fixture::*;

cases! {
    a_subscriber_hears_a_wake_of_its_own_handle,
    every_subscriber_hears_every_wake,
    a_wake_among_many_at_once_is_heard,
    a_subscriber_hears_an_enqueue_of_another_handle,
    an_enqueue_through_the_client_wakes,
    a_keyed_enqueue_wakes,
    a_retry_and_a_resume_wake,
    a_follow_up_wakes,
    a_wake_carries_any_name,
}

/// Waits until a wake-up says to look at `queue`: by its name, or by saying
/// that any queue may have work.
async fn heard(wakeups: &mut Wakeups, queue: &str) {
    let wait = async {
        loop {
            match wakeups.next().await {
                None => return,
                Some(name) if name == queue => return,
                Some(_) => {}
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("no wake-up came");
}

/// Notifies this process and others, as the client does.
async fn notify(client: &Client, queues: &[String]) {
    client.store().notify_local(queues);
    client.store().notify_others(queues).await.expect("notify");
}

async fn wake(client: &Client, queue: &str) {
    notify(client, &[queue.to_owned()]).await;
}

async fn a_subscriber_hears_a_wake_of_its_own_handle(fixture: Fixture) {
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    wake(&fixture, "letters").await;
    heard(&mut wakeups, "letters").await;
}

async fn every_subscriber_hears_every_wake(fixture: Fixture) {
    let mut first = fixture.store().subscribe().await.expect("subscribe");
    let mut second = fixture.store().subscribe().await.expect("subscribe");
    fixture.store().wake(&["letters".into(), "phones".into()]).await.expect("wake");
    for wakeups in [&mut first, &mut second] {
        heard(wakeups, "letters").await;
        heard(wakeups, "phones").await;
    }
}

/// Announcers of one process must not get in each other's way.
async fn a_wake_among_many_at_once_is_heard(fixture: Fixture) {
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    let (hear, mut ear) = mpsc::unbounded_channel();
    // Reads all the time, so that none are missed for being too many.
    let reader = tokio::spawn(async move {
        loop {
            heard(&mut wakeups, "letters").await;
            let _ = hear.send(());
        }
    });
    let announcer = fixture.client();
    let others = tokio::spawn(async move {
        let noise: Vec<_> = (0..20).map(|n| format!("noise {n}")).collect();
        loop {
            let notify = || notify(&announcer, &noise);
            tokio::join!(notify(), notify(), notify());
            tokio::task::yield_now().await;
        }
    });
    for round in 0..400 {
        while ear.try_recv().is_ok() {}
        wake(&fixture, "letters").await;
        let heard = tokio::time::timeout(Duration::from_secs(5), ear.recv()).await;
        assert_eq!(heard, Ok(Some(())), "round {round}: nobody heard the wake-up");
    }
    others.abort();
    reader.abort();
}

/// Another process may know only that something was written; so it writes.
async fn a_subscriber_hears_an_enqueue_of_another_handle(fixture: Fixture) {
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    let other = fixture.second_client().await;
    other.enqueue(job("mail").queue("letters")).await.expect("enqueue");
    heard(&mut wakeups, "letters").await;
}

async fn an_enqueue_through_the_client_wakes(fixture: Fixture) {
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    fixture.add(job("mail").queue("letters")).await;
    heard(&mut wakeups, "letters").await;
    fixture.enqueue_many([job("mail").queue("phones")]).await.expect("enqueue_many");
    heard(&mut wakeups, "phones").await;
}

async fn a_keyed_enqueue_wakes(fixture: Fixture) {
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    fixture.add(job("mail").queue("letters").unique_key("k", Default::default())).await;
    heard(&mut wakeups, "letters").await;
}

async fn a_retry_and_a_resume_wake(fixture: Fixture) {
    let id = fixture.add(job("mail").queue("letters").delay(DAY)).await;
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    fixture.retry(id).await.expect("retry");
    heard(&mut wakeups, "letters").await;
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    fixture.resume("phones").await.expect("resume");
    heard(&mut wakeups, "phones").await;
}

async fn a_follow_up_wakes(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    let follow_ups = vec![NewJob::new("next", &1).queue("letters").validate().expect("valid")];
    let report = longshore::Report { claimed: &claimed, ending: done(), follow_ups };
    fixture.settle(vec![report]).await.expect("settle");
    heard(&mut wakeups, "letters").await;
}

/// A queue's name is anybody's text.
async fn a_wake_carries_any_name(fixture: Fixture) {
    let name = "q'uo\"te; --\\ ü".to_owned() + &"x".repeat(100);
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    wake(&fixture, &name).await;
    heard(&mut wakeups, &name).await;
}
