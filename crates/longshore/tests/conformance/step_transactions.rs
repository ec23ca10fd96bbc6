//! Steps in a transaction of the user's.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use longshore::worker::Builder;
use longshore::{Context, Failure, NewJob, Status, Worker};

use crate::fixture::*;
use crate::steps::{Calls, journal, settings, worker};
use crate::worker::{drain, until_status};

cases! {
    only on postgres:
    a_step_in_a_transaction_commits_with_the_users_rows,
    a_step_in_a_transaction_that_fails_rolls_everything_back,
    a_step_in_a_transaction_under_a_lost_lease_rolls_everything_back,
    no_other_worker_gets_the_job_while_a_step_in_a_transaction_runs,
    a_step_in_a_transaction_keeps_the_limits_of_steps,
}

cases! {
    only on sqlite:
    a_step_in_a_transaction_needs_postgres,
}

/// Inserts `n` into the user's table.
async fn book(tx: &mut sqlx::PgConnection, n: i64) -> Result<(), sqlx::Error> {
    sqlx::query("insert into bookings values ($1)").bind(n).execute(tx).await.map(drop)
}

/// Creates the user's table where every connection finds it. Returns a worker that has it in its
/// search path.
async fn with_bookings(fixture: &Fixture) -> Builder {
    fixture.sql("create table bookings (n bigint)", None).await;
    let schema = fixture.url().rsplit_once("schema=").expect("a schema").1.to_owned();
    let url = with_parameter(&fixture.url(), &format!("options=-csearch_path%3D{schema}"));
    let client = longshore::Client::connect(&url).await.expect("connect");
    Worker::builder(client).settings(settings())
}

async fn bookings(fixture: &Fixture) -> i64 {
    fixture.query_number("select count(*) from bookings", None).await
}

async fn a_step_in_a_transaction_commits_with_the_users_rows(fixture: Fixture) {
    let runs = Calls::default();
    let counted = runs.clone();
    let order = move |(): (), ctx: Context| {
        let runs = counted.clone();
        async move {
            let n: u32 = ctx
                .step_in("book", async |tx| {
                    book(&mut *tx, 7).await?;
                    // A job can be part of the transaction too.
                    ctx.client().enqueue(NewJob::new("later", &()).delay(DAY)).in_tx(&mut *tx).await?;
                    Ok(runs.count() * 100)
                })
                .await?;
            if ctx.job().lease().lease_no == 1 {
                return Err(Failure::retry_after(Duration::ZERO, "after the step"));
            }
            ctx.set_result(&n)?;
            Ok(())
        }
    };
    let worker = with_bookings(&fixture).await;
    let id = fixture.add(NewJob::new("order", &())).await;
    drain(worker.function("order", order)).await;
    let job = fixture.get(id).await.expect("get");
    assert_eq!((job.status, job.lease_no), (Status::Succeeded, 2));
    assert_eq!(job.result.expect("result").get(), "100");
    assert_eq!((bookings(&fixture).await, runs.so_far(), fixture.count(Status::Queued).await), (1, 1, 1));
    assert_eq!(journal(&fixture, id).await.0, ["book"]);
}

async fn a_step_in_a_transaction_that_fails_rolls_everything_back(fixture: Fixture) {
    let order = |how: String, ctx: Context| async move {
        ctx.step_in("book", async |tx| {
            book(&mut *tx, 7).await?;
            match how.as_str() {
                "failure" => return Err(Failure::permanent("declined")),
                "statement" => {
                    // The work ignores that a statement failed.
                    let _ = sqlx::query("select 1 / 0").execute(&mut *tx).await;
                }
                _ => panic!("on purpose"),
            }
            Ok(())
        })
        .await
    };
    let worker = with_bookings(&fixture).await;
    let mut ids = Vec::new();
    for how in ["failure", "statement", "panic"] {
        ids.push(fixture.add(NewJob::new("order", how).max_attempts(1)).await);
    }
    drain(worker.function("order", order)).await;
    assert_eq!(bookings(&fixture).await, 0);
    for id in ids {
        assert_eq!(fixture.status(id).await, Status::FailedPermanent);
        assert_eq!(journal(&fixture, id).await, (vec![], vec![]));
    }
}

/// The lease is lost before the step begins. Afterwards it cannot be lost.
async fn a_step_in_a_transaction_under_a_lost_lease_rolls_everything_back(fixture: Fixture) {
    let (runs, other) = (Calls::default(), fixture.client());
    let counted = runs.clone();
    let order = move |(): (), ctx: Context| {
        let (runs, other) = (counted.clone(), other.clone());
        async move {
            let lease = ctx.job().lease();
            if lease.lease_no == 1 {
                // Another worker takes the job meanwhile.
                other.release(&[lease]).await?;
            }
            ctx.step_in("book", async |tx| {
                runs.count();
                Ok(book(tx, 7).await?)
            })
            .await
        }
    };
    let worker = with_bookings(&fixture).await;
    let id = fixture.add(NewJob::new("order", &())).await;
    drain(worker.function("order", order)).await;
    until_status(&fixture, id, Status::Succeeded).await;
    assert_eq!((bookings(&fixture).await, runs.so_far()), (1, 1));
    assert_eq!(fixture.steps(id).await.expect("steps")[0].lease_no, 2);
}

async fn no_other_worker_gets_the_job_while_a_step_in_a_transaction_runs(fixture: Fixture) {
    let swept = Arc::new(Mutex::new(None));
    let (noted, sweeper) = (swept.clone(), fixture.clone());
    let order = move |(): (), ctx: Context| {
        let (noted, sweeper) = (noted.clone(), sweeper.clone());
        async move {
            ctx.step_in("book", async |tx| {
                book(tx, 7).await?;
                // This worker counts as dead, but its lease is locked.
                let report = sweeper.crash_all_workers().await;
                *noted.lock().expect("noted") = Some(report.recovered);
                Ok(())
            })
            .await
        }
    };
    let worker = with_bookings(&fixture).await;
    let id = fixture.add(NewJob::new("order", &())).await;
    drain(worker.function("order", order)).await;
    assert_eq!(*swept.lock().expect("swept"), Some(0));
    assert_eq!((bookings(&fixture).await, journal(&fixture, id).await.0.len()), (1, 1));
}

async fn a_step_in_a_transaction_keeps_the_limits_of_steps(fixture: Fixture) {
    let order = |case: String, ctx: Context| async move {
        match case.as_str() {
            "twice" => {
                ctx.step("a", || async { Ok(()) }).await?;
                ctx.step_in("a", async |tx| Ok(book(tx, 7).await?)).await
            }
            _ => {
                let large = ctx.step_in("large", async |tx| {
                    book(tx, 7).await?;
                    Ok("x".repeat(1024 * 1024))
                });
                large.await.map(drop)
            }
        }
    };
    let worker = with_bookings(&fixture).await;
    let twice = fixture.add(NewJob::new("order", "twice")).await;
    let large = fixture.add(NewJob::new("order", "large")).await;
    drain(worker.function("order", order)).await;
    for (id, message) in [(twice, "used twice"), (large, "step `large`: value:")] {
        let job = fixture.get(id).await.expect("get");
        assert_eq!(job.status, Status::FailedPermanent);
        let error = job.last_error.expect("error");
        assert!(error.contains(message), "{error}");
    }
    assert_eq!(bookings(&fixture).await, 0);
}

async fn a_step_in_a_transaction_needs_postgres(fixture: Fixture) {
    let id = fixture.add(NewJob::new("order", &())).await;
    let order = |(): (), ctx: Context| async move { ctx.step_in("book", async |_| Ok(())).await };
    drain(worker(&fixture).function("order", order)).await;
    let job = fixture.get(id).await.expect("get");
    assert_eq!(job.status, Status::FailedPermanent);
    assert!(job.last_error.expect("error").contains("`step_in` needs a Postgres database"));
}
