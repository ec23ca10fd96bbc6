//! Wake-ups. They are hints, so these cases wait for them with a generous timeout.

use longshore::store::{Notice, Wakeups};
use longshore::{Client, NewJob};
use tokio::sync::mpsc;

use crate::fixture::*;

cases! {
    a_subscriber_receives_a_wake_up_of_its_own_client,
    every_subscriber_receives_every_wake_up,
    a_wake_up_among_many_concurrent_ones_is_received,
    a_subscriber_is_notified_of_an_enqueue_by_another_client,
    an_enqueue_notifies_subscribers,
    an_enqueue_with_a_key_notifies_subscribers,
    a_retry_and_a_resume_notify_subscribers,
    a_follow_up_notifies_subscribers,
    a_wake_up_can_name_any_queue,
}

/// Waits for a wake-up that names `queue` or says that any queue may have work.
async fn expect_wake_up(wakeups: &mut Wakeups, queue: &str) {
    let wait = async {
        loop {
            match wakeups.next().await {
                None => return,
                Some(name) if name == queue => return,
                Some(_) => {}
            }
        }
    };
    tokio::time::timeout(MAX_WAIT, wait).await.expect("no wake-up");
}

/// Notifies this process and others, as the client does.
async fn notify(client: &Client, queues: &[String]) {
    let notices: Vec<_> = queues.iter().cloned().map(Notice::Due).collect();
    client.store().notify_local(&notices);
    client.store().notify_others(&notices).await.expect("notify");
}

async fn wake(client: &Client, queue: &str) {
    notify(client, &[queue.to_owned()]).await;
}

async fn a_subscriber_receives_a_wake_up_of_its_own_client(fixture: Fixture) {
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    wake(&fixture, "letters").await;
    expect_wake_up(&mut wakeups, "letters").await;
}

async fn every_subscriber_receives_every_wake_up(fixture: Fixture) {
    let mut first = fixture.store().subscribe().await.expect("subscribe");
    let mut second = fixture.store().subscribe().await.expect("subscribe");
    notify(&fixture, &["letters".into(), "phones".into()]).await;
    for wakeups in [&mut first, &mut second] {
        expect_wake_up(wakeups, "letters").await;
        expect_wake_up(wakeups, "phones").await;
    }
}

/// Concurrent notifications of one process must not interfere with each other.
async fn a_wake_up_among_many_concurrent_ones_is_received(fixture: Fixture) {
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    let (sender, mut received) = mpsc::unbounded_channel();
    // Reads continuously, so that none are dropped because of a full buffer.
    let reader = tokio::spawn(async move {
        loop {
            expect_wake_up(&mut wakeups, "letters").await;
            let _ = sender.send(());
        }
    });
    let notifier = fixture.client();
    let others = tokio::spawn(async move {
        let noise: Vec<_> = (0..20).map(|n| format!("noise {n}")).collect();
        loop {
            let notify = || notify(&notifier, &noise);
            tokio::join!(notify(), notify(), notify());
            tokio::task::yield_now().await;
        }
    });
    for round in 0..400 {
        while received.try_recv().is_ok() {}
        wake(&fixture, "letters").await;
        let wake_up = tokio::time::timeout(MAX_WAIT, received.recv()).await;
        assert_eq!(wake_up, Ok(Some(())), "round {round}: no wake-up");
    }
    others.abort();
    reader.abort();
}

/// An engine may notice only that another process wrote something, so the other client
/// really enqueues.
async fn a_subscriber_is_notified_of_an_enqueue_by_another_client(fixture: Fixture) {
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    let other = fixture.second_client().await;
    other.enqueue(job("mail").queue("letters")).await.expect("enqueue");
    expect_wake_up(&mut wakeups, "letters").await;
}

async fn an_enqueue_notifies_subscribers(fixture: Fixture) {
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    fixture.add(job("mail").queue("letters")).await;
    expect_wake_up(&mut wakeups, "letters").await;
    fixture.enqueue_many([job("mail").queue("phones")]).await.expect("enqueue_many");
    expect_wake_up(&mut wakeups, "phones").await;
}

async fn an_enqueue_with_a_key_notifies_subscribers(fixture: Fixture) {
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    fixture.add(job("mail").queue("letters").unique_key("k", Default::default())).await;
    expect_wake_up(&mut wakeups, "letters").await;
}

async fn a_retry_and_a_resume_notify_subscribers(fixture: Fixture) {
    let id = fixture.add(job("mail").queue("letters").delay(DAY)).await;
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    fixture.retry(id).await.expect("retry");
    expect_wake_up(&mut wakeups, "letters").await;
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    fixture.resume("phones").await.expect("resume");
    expect_wake_up(&mut wakeups, "phones").await;
}

async fn a_follow_up_notifies_subscribers(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    let follow_ups = vec![NewJob::new("next", &1).queue("letters").validate().expect("valid")];
    let report = longshore::Report { claimed: &claimed, ending: done(), follow_ups, has_progressed: false };
    fixture.settle(vec![report]).await.expect("settle");
    expect_wake_up(&mut wakeups, "letters").await;
}

/// A queue name can contain any characters.
async fn a_wake_up_can_name_any_queue(fixture: Fixture) {
    let name = "q'uo\"te; --\\ ü".to_owned() + &"x".repeat(100);
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    wake(&fixture, &name).await;
    expect_wake_up(&mut wakeups, &name).await;
}
