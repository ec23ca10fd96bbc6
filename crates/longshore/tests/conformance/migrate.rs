//! The ground: tables, versions, the clock.

use chrono::Utc;
use longshore::store::Migrated;
use longshore::{Client, NewJob, Status};

use crate::bench::*;

pub(crate) async fn migrating_again_changes_nothing(bench: Bench) {
    let id = bench.enqueue_kind("mail").await;
    assert_eq!(bench.migrate().await.expect("migrate"), Migrated { from: 1, to: 1 });
    assert_eq!(bench.status(id).await, Status::Queued);
}

pub(crate) async fn a_database_without_tables_is_at_version_zero(bench: Bench) {
    let bare = Client::connect(&bench.bare_url()).await.expect("open");
    assert_eq!(bare.store().schema_version().await.expect("version"), 0);
    assert_eq!(bare.migrate().await.expect("migrate"), Migrated { from: 0, to: 1 });
    assert_eq!(bare.store().schema_version().await.expect("version"), 1);
}

pub(crate) async fn processes_that_migrate_at_once_all_succeed(bench: Bench) {
    let url = bench.bare_url();
    let migrations: Vec<_> = (0..4)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move { Client::connect(&url).await?.migrate().await })
        })
        .collect();
    let mut made = 0;
    for migration in migrations {
        let migrated = migration.await.expect("task").expect("migrate");
        made += i64::from(migrated.from == 0);
    }
    assert!(made >= 1, "somebody must have made the tables");
    let client = Client::connect(&url).await.expect("open");
    client.enqueue(job("mail")).await.expect("the tables work");
    assert_eq!(client.check().await.expect("check").problems, Vec::<String>::new());
}

pub(crate) async fn without_tables_a_verb_says_to_migrate(bench: Bench) {
    let bare = Client::connect(&bench.bare_url()).await.expect("open");
    let errors = [
        bare.enqueue(job("mail")).await.expect_err("enqueue"),
        bare.get(longshore::JobId::new()).await.expect_err("get"),
        bare.queues().await.expect_err("queues"),
    ];
    for error in errors {
        assert!(error.is_schema(), "{error:?}");
        assert!(error.to_string().contains("longshore migrate"), "{error}");
    }
}

pub(crate) async fn a_schema_newer_than_this_build_is_refused(bench: Bench) {
    bench.sql("update migrations set version = 99", None).await;
    let error = bench.migrate().await.expect_err("a newer schema");
    assert!(error.is_schema(), "{error:?}");
    assert!(error.to_string().contains("99") && error.to_string().contains("upgrade"), "{error}");
}

pub(crate) async fn a_schema_newer_than_this_build_is_refused_at_connect(bench: Bench) {
    bench.enqueue_kind("mail").await;
    bench.sql("update migrations set version = 99", None).await;
    let error = Client::connect(&bench.url()).await.expect_err("a newer schema");
    assert!(error.is_schema(), "{error:?}");
    assert!(error.to_string().contains("99") && error.to_string().contains("upgrade"), "{error}");
    assert_eq!(bench.ask("select max(version) from migrations", None).await, 99);
    assert_eq!(bench.ask("select count(*) from jobs", None).await, 1);
    bench.sql("update migrations set version = 1", None).await;
    bench.second().await;
}

pub(crate) async fn a_pinned_clock_stands_still_for_every_process(bench: Bench) {
    let second = bench.second().await;
    assert_eq!(bench.now().await, start());
    assert_eq!(second.store().now().await.expect("now"), start());
    bench.advance(HOUR).await;
    assert_eq!(second.store().now().await.expect("now"), start() + HOUR);
}

pub(crate) async fn an_unpinned_clock_is_the_real_one(bench: Bench) {
    bench.store().pin_clock(None).await.expect("unpin");
    let off = (bench.now().await - Utc::now()).num_seconds().abs();
    assert!(off < 60, "off by {off} s");
}

pub(crate) async fn the_clock_keeps_microseconds(bench: Bench) {
    let at = start() + std::time::Duration::from_micros(123_456);
    bench.store().pin_clock(Some(at)).await.expect("pin");
    let id = bench.add(NewJob::new("mail", &1)).await;
    assert_eq!(bench.job(id).await.created_at, at);
}
