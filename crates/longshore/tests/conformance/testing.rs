//! The test queue. The guide about testing shows the one in memory.

use std::time::Duration;

use longshore::testing::Queue;
use longshore::{Client, Context, Failure, Job, NewJob, RetryPolicy, Status, Worker};
use serde::{Deserialize, Serialize};

use crate::fixture::*;

cases! {
    a_job_runs_to_its_end_on_a_stopped_clock,
    a_job_that_cannot_go_on_is_returned,
    a_wrong_step_or_wait_fails_the_test,
}

cases! {
    only on postgres:
    a_test_queue_on_postgres_has_its_own_schema_and_clock,
}

#[derive(Serialize, Deserialize)]
struct Remind {
    user: u32,
}

impl Job for Remind {
    const KIND: &'static str = "remind";
    type State = ();

    async fn run(self, _: Context) -> Result<(), Failure> {
        if self.user == 0 { Err(Failure::permanent("no such user")) } else { Ok(()) }
    }
}

async fn a_test_queue_on_postgres_has_its_own_schema_and_clock(fixture: Fixture) {
    let (one, two) = (Queue::on_postgres(&database_url()).await, Queue::on_postgres(&database_url()).await);
    let names = [&one, &two].map(|queue| queue.schema().expect("schema").to_owned());
    let count =
        format!("select count(*) from pg_namespace where nspname in ('{}', '{}')", names[0], names[1]);
    assert_eq!(fixture.query_number(&count, None).await, 2);
    one.stop_clock().await;
    let worker = |client| Worker::builder(client).register::<Remind>();
    one.enqueue(Remind { user: 7 }).delay(Duration::from_secs(86_400)).await.expect("enqueue");
    one.assert_enqueued(|job: &Remind| job.user == 7).await;
    two.assert_not_enqueued::<Remind>().await;
    assert_eq!(one.drain(worker).await.succeeded, 0);
    one.advance(Duration::from_secs(86_400)).await;
    assert_eq!(one.drain(worker).await.succeeded, 1);
    assert_eq!(two.run(worker, Remind { user: 0 }).await.status, Status::FailedPermanent);
    drop((one, two));
    assert_eq!(fixture.query_number(&count, None).await, 0);
}

async fn queue(fixture: &Fixture) -> Queue {
    let queue = match fixture.engine() {
        Engine::Postgres => Queue::on_postgres(&database_url()).await,
        Engine::Sqlite => Queue::new().await,
    };
    queue.stop_clock().await;
    queue
}

async fn trial(ends: String, ctx: Context) -> Result<(), Failure> {
    ctx.step("start", || async { Ok(17) }).await?;
    ctx.sleep("two days", 2 * DAY).await?;
    ctx.step("mail", || async {
        let fails = ends == "retry" && ctx.attempt() == 1;
        if fails { Err(Failure::retry("the mail server is down")) } else { Ok(()) }
    })
    .await?;
    let answer: Option<String> = ctx.event("answer").within(7 * DAY).await?;
    ctx.set_result(&answer)?;
    if ends == "event" { ctx.event("the end").await } else { Ok(()) }
}

fn worker(client: Client) -> longshore::worker::Builder {
    Worker::builder(client).function("trial", trial)
}

async fn a_job_runs_to_its_end_on_a_stopped_clock(fixture: Fixture) {
    let queue = queue(&fixture).await;
    let began = queue.now().await.expect("now");
    let job = NewJob::new("trial", "retry").retry(RetryPolicy::fixed(HOUR));
    let job = queue.run_to_end(worker, job).await;
    assert_eq!(
        (job.status, job.result.as_ref().map(|result| result.get())),
        (Status::Succeeded, Some("null"))
    );
    assert_eq!(queue.now().await.expect("now"), began + 9 * DAY + HOUR);
    queue.assert_steps(job.id, serde_json::json!({ "start": 17 })).await;
}

async fn a_job_that_cannot_go_on_is_returned(fixture: Fixture) {
    let queue = queue(&fixture).await;
    queue.emit("answer", "yes").await.expect("emit");
    let job = queue.run_to_end(worker, NewJob::new("trial", "event")).await;
    assert_eq!(job.status, Status::Queued);
    queue.assert_waiting(job.id, "the end").await;
    queue.emit("the end", &()).await.expect("emit");
    let job = queue.continue_to_end(worker, job.id).await;
    assert_eq!(
        (job.status, job.result.as_ref().map(|result| result.get())),
        (Status::Succeeded, Some("\"yes\""))
    );
    // No handler.
    let job = queue.run_to_end(worker, NewJob::new("other", &())).await;
    assert_eq!(job.status, Status::Queued);
}

async fn a_wrong_step_or_wait_fails_the_test(fixture: Fixture) {
    let queue = std::sync::Arc::new(queue(&fixture).await);
    let id = queue.run(worker, NewJob::new("trial", "")).await.id;
    queue.assert_waiting(id, "two days").await;
    for (expected, message) in [
        (serde_json::json!({ "start": 18 }), "step `start` is not stored with the value 18"),
        (serde_json::json!({ "two days": null }), "the stored steps are: {\"start\":17}"),
    ] {
        let checked = queue.clone();
        let panicked =
            tokio::spawn(async move { checked.assert_steps(id, expected).await }).await.expect_err("fails");
        let text = panicked.into_panic().downcast::<String>().expect("a message");
        assert!(text.contains(message), "{text}");
    }
    let checked = queue.clone();
    let waits = tokio::spawn(async move { checked.assert_waiting(id, "answer").await });
    let text = waits.await.expect_err("fails").into_panic().downcast::<String>().expect("a message");
    assert!(text.contains("it does not wait for `answer`, but for: [\"two days\"]"), "{text}");
}
