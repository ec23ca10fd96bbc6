//! A standby becomes the primary while callers enqueue. The clients find it through the
//! hosts in their URL or through a proxy, and no acknowledged job is lost. The old primary
//! never comes back. `--nocapture` prints how long callers had to wait.

use std::time::Instant;

use longshore::Client;

use crate::missing::skip;
use crate::postgres_server::PostgresServer;
use crate::producer::{Producer, run};
use crate::proxy::Proxy;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// The primary stops like after a crash: connections are closed or refused.
    Stop,
    /// The primary freezes: connections stay open and get no reply.
    Freeze,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    /// The URL names both servers.
    Hosts,
    /// The URL names a proxy, which is switched to the standby.
    Proxy,
}

#[test]
fn hosts_in_the_url_survive_a_stopped_primary() {
    fail_over(Failure::Stop, Route::Hosts);
}

#[test]
fn hosts_in_the_url_survive_a_frozen_primary() {
    fail_over(Failure::Freeze, Route::Hosts);
}

#[test]
fn a_switched_proxy_survives_a_frozen_primary() {
    fail_over(Failure::Freeze, Route::Proxy);
}

#[test]
fn an_error_names_every_host_and_no_password() {
    run(async {
        let error = Client::connect("postgres://ada:s3cret@127.0.0.1:1,127.0.0.1:2/jobs").await.unwrap_err();
        assert!(error.is_unavailable(), "{error:?}");
        let message = format!("{error:?}");
        assert!(message.contains("127.0.0.1:1: ") && message.contains("127.0.0.1:2: "), "{message}");
        assert!(!message.contains("s3cret"), "{message}");
    });
}

fn fail_over(failure: Failure, route: Route) {
    let Some(primary) = PostgresServer::create() else {
        return skip("no Postgres server programs (initdb, pg_ctl, postgres) are installed");
    };
    run(async {
        let standby = primary.create_synchronous_standby().await;
        let proxy = Proxy::start(&primary.url()).await;
        let url = match route {
            // The standby comes first, so that it has to be skipped.
            Route::Hosts => {
                let hosts = format!("127.0.0.1:{},127.0.0.1:{}", standby.port(), primary.port());
                format!("postgres://postgres@{hosts}/postgres?target_session_attrs=read-write")
            }
            Route::Proxy => proxy.url.clone(),
        };
        let client = Client::connect(&url).await.unwrap();
        client.migrate().await.unwrap();
        let [singles, keyed, batches] = Producer::start_all(&client);
        let producers = [&singles, &keyed, &batches];
        for producer in producers {
            producer.wait_for_jobs_started_after(Instant::now()).await;
        }
        match failure {
            Failure::Stop => primary.stop(),
            Failure::Freeze => primary.freeze(),
        }
        standby.promote();
        proxy.switch_to(standby.port());
        let promoted = Instant::now();
        for (what, producer) in ["single jobs", "jobs with a key", "batches"].into_iter().zip(producers) {
            producer.wait_for_jobs_started_after(promoted).await;
            let took = promoted.elapsed();
            eprintln!("{failure:?}, {route:?}: {what} are stored again {took:?} after the promotion");
        }
        // The standby's own host, so that only what it holds counts.
        let survivor = Client::connect(&standby.url()).await.unwrap();
        for id in producers.iter().flat_map(|producer| producer.acknowledged()) {
            assert!(survivor.store().get(id).await.unwrap().is_some(), "acknowledged job {id} is lost");
        }
        assert_eq!(survivor.check().await.unwrap().problems, []);
    });
}
