//! The test queue on Postgres. The guide about testing shows the one in memory.

use std::time::Duration;

use longshore::testing::Queue;
use longshore::{Context, Failure, Job, Status, Worker};
use serde::{Deserialize, Serialize};

use crate::fixture::*;

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
    let schemas = async || {
        let count = "select count(*) from pg_namespace where nspname like 'longshore\\_test\\_%'";
        fixture.query_number(count, None).await
    };
    let before = schemas().await;
    let (one, two) = (Queue::on_postgres(&database_url()).await, Queue::on_postgres(&database_url()).await);
    assert_eq!(schemas().await, before + 2);
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
    assert_eq!(schemas().await, before);
}
