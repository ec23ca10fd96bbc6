//! Migrations, schema versions and the engine's clock.

use std::time::Duration;

use chrono::Utc;
use longshore::store::{Beat, KindFilter, KindQueues, Migration};
use longshore::{
    Client, FlowStatus, JobId, Migrated, NewJob, NewKind, Retention, SCHEMA_VERSION, Status, Worker, chain,
    task,
};

use crate::fixture::*;
use crate::flows::{put, record};

cases! {
    migrating_again_changes_nothing,
    a_database_without_tables_is_at_version_zero,
    the_next_migration_runs_once_and_keeps_jobs,
    a_migration_that_excludes_workers_waits_until_they_have_stopped,
    a_migration_that_fails_changes_nothing,
    tables_of_another_revision_are_refused,
    operations_on_missing_tables_say_to_migrate,
    concurrent_migrations_all_succeed,
    operations_without_tables_say_to_migrate,
    a_schema_newer_than_this_build_is_refused,
    a_schema_newer_than_this_build_is_refused_at_connect,
    a_pinned_clock_is_pinned_for_every_process,
    an_unpinned_clock_shows_the_real_time,
    the_clock_keeps_microseconds,
}

cases! {
    only on postgres:
    every_table_can_be_published,
    a_publication_of_all_tables_stops_nothing,
}

/// Rows of a published table can be deleted only if the table has a primary key or another replica identity.
async fn every_table_can_be_published(fixture: Fixture) {
    const WITHOUT_IDENTITY: &str = "
        select coalesce(string_agg(c.relname, ', '), '')
          from pg_class c
         where c.relnamespace = current_schema()::regnamespace
           and c.relkind in ('r', 'p')
           and c.relreplident <> 'f'
           and not exists (
                 select
                   from pg_index i
                  where i.indrelid = c.oid
                    and (i.indisreplident or (c.relreplident = 'd' and i.indisprimary)))";
    let mut connection = fixture.postgres().await;
    let tables: String =
        sqlx::query_scalar(WITHOUT_IDENTITY).fetch_one(&mut connection).await.expect("query");
    assert_eq!(tables, "", "tables without a primary key or a replica identity");
}

/// As upgrades by logical replication, and programs that capture changes, make it.
async fn a_publication_of_all_tables_stops_nothing(fixture: Fixture) {
    const PUBLISH: &str = "
        do $$
        begin
          execute (select format('create publication %I for table %s', current_schema(), string_agg(relname, ', '))
                     from pg_class
                    where relnamespace = current_schema()::regnamespace
                      and relkind = 'r');
        end $$";
    const UNPUBLISH: &str = "do $$ begin execute format('drop publication %I', current_schema()); end $$";
    fixture.sql(PUBLISH, None).await;
    fixture.group_defaults("default", Some(1), None).await.expect("group_defaults");
    for _ in 0..3 {
        fixture.add(job("mail").group("customer")).await;
        fixture.add(job("mail")).await;
    }
    let flow =
        put(&fixture, chain![task("a", job("mail")), task("b", job("mail"))].on_end(job("mail"))).await.id;
    let worker = Worker::builder(fixture.client()).function("mail", crate::worker::nothing);
    let ran = tokio::time::timeout(MAX_WAIT, crate::worker::drain(worker)).await;
    ran.expect("the worker runs all jobs");
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
    assert_eq!(fixture.count(Status::Succeeded).await, 9);
    fixture.advance(8 * DAY).await;
    fixture.retain(&Retention::default(), |_| async { true }).await.expect("retain");
    fixture.remove_old_flows(&Retention::default()).await.expect("remove_old_flows");
    while fixture.store().fold_tallies(100).await.expect("fold") > 0 {}
    fixture.fold_history(|_| async { true }).await.expect("fold_history");
    assert_eq!(fixture.query_number("select count(*) from jobs", None).await, 0);
    assert_eq!(fixture.query_number("select count(*) from flows", None).await, 0);
    fixture.sql(UNPUBLISH, None).await;
}

async fn migrating_again_changes_nothing(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    assert_eq!(
        fixture.migrate().await.expect("migrate"),
        Migrated { from: SCHEMA_VERSION, to: SCHEMA_VERSION }
    );
    assert_eq!(fixture.status(id).await, Status::Queued);
}

async fn a_database_without_tables_is_at_version_zero(fixture: Fixture) {
    let bare = Client::connect(&fixture.bare_url()).await.expect("open");
    assert_eq!(bare.store().schema_version().await.expect("version"), 0);
    assert_eq!(bare.migrate().await.expect("migrate"), Migrated { from: 0, to: SCHEMA_VERSION });
    assert_eq!(bare.store().schema_version().await.expect("version"), SCHEMA_VERSION);
}

/// The migrations of this build, and one more.
fn with_next(fixture: &Fixture, script: &'static str, oldest_worker: i64) -> &'static [Migration] {
    let mut migrations = fixture.store().migrations().to_vec();
    migrations.push(Migration { version: NEXT, script, oldest_worker });
    migrations.leak()
}

const NEXT: i64 = SCHEMA_VERSION + 1;

/// A script that adds the column `note` to `jobs`.
fn add_note(fixture: &Fixture) -> &'static str {
    match fixture.engine() {
        Engine::Postgres => "alter table longshore.jobs add column note text default 'none'",
        Engine::Sqlite => "alter table jobs add column note text default 'none'",
    }
}

async fn the_next_migration_runs_once_and_keeps_jobs(fixture: Fixture) {
    let waiting = fixture.add(job("mail").queue("letters")).await;
    let running = fixture.running(job("sms").priority(3)).await;
    let ids = [waiting, running.lease().id];
    let before = [snapshot(&fixture.job(ids[0]).await), snapshot(&fixture.job(ids[1]).await)];
    // Workers of this version may go on.
    let migrations = with_next(&fixture, add_note(&fixture), SCHEMA_VERSION);
    let old = fixture.second_client().await;
    let store = fixture.store();
    assert_eq!(
        store.migrate(migrations).await.expect("migrate"),
        Migrated { from: SCHEMA_VERSION, to: NEXT }
    );
    assert_eq!(store.migrate(migrations).await.expect("migrate"), Migrated { from: NEXT, to: NEXT });
    assert_eq!(store.schema_version().await.expect("version"), NEXT);
    assert_eq!(fixture.query_number("select count(*) from jobs where note = 'none'", None).await, 2);
    assert_eq!(fixture.query_number("select count(*) from migrations", None).await, 2);
    let after = [snapshot(&fixture.job(ids[0]).await), snapshot(&fixture.job(ids[1]).await)];
    assert_eq!(after, before);
    assert_ne!(old.store().beat(running.lease().worker, &[]).await.expect("beat"), Beat::Dead);
    fixture.must_finish(&running, done()).await;
    fixture.worker().await;
}

async fn a_migration_that_excludes_workers_waits_until_they_have_stopped(fixture: Fixture) {
    let running = fixture.running(job("sms")).await;
    let worker = running.lease().worker;
    let migrations = with_next(&fixture, add_note(&fixture), NEXT);
    let store = fixture.store();
    let refused = store.migrate(migrations).await.expect_err("a worker is alive");
    assert!(refused.is_schema(), "{refused:?}");
    assert!(refused.to_string().contains("stop them before you migrate"), "{refused}");
    assert_eq!(store.schema_version().await.expect("version"), SCHEMA_VERSION);
    fixture.sql("update workers set stale_after_ms = 1", None).await;
    fixture.advance(Duration::from_secs(1)).await;
    assert_eq!(
        store.migrate(migrations).await.expect("migrate"),
        Migrated { from: SCHEMA_VERSION, to: NEXT }
    );
    // The worker can end its jobs, but claims nothing any more.
    assert_eq!(store.beat(worker, &[]).await.expect("beat"), Beat::Dead);
    fixture.must_finish(&running, done()).await;
    let refused = fixture
        .try_sql(
            "insert into workers
                    (id, name, queues, concurrency, stale_after_ms, started_at, heartbeat_at, schema_version)
             select {id}, 'old', queues, 1, 1000, started_at, started_at, schema_version from workers",
            Some(JobId::new()),
        )
        .await
        .expect_err("an old worker registers");
    assert!(refused.contains("built for"), "{refused}");
    let refused = fixture
        .try_sql("update workers set dead_at = null, heartbeat_at = started_at", None)
        .await
        .expect_err("an old worker sends a heartbeat");
    assert!(refused.contains("built for"), "{refused}");
}

async fn a_migration_that_fails_changes_nothing(fixture: Fixture) {
    let script = format!("{}; create table jobs_of (", add_note(&fixture)).leak();
    let store = fixture.store();
    store.migrate(with_next(&fixture, script, NEXT)).await.expect_err("the script is wrong");
    assert_eq!(store.schema_version().await.expect("version"), SCHEMA_VERSION);
    fixture.try_sql("update jobs set note = ''", None).await.expect_err("the column is not there");
    let again = with_next(&fixture, add_note(&fixture), NEXT);
    assert_eq!(store.migrate(again).await.expect("migrate"), Migrated { from: SCHEMA_VERSION, to: NEXT });
}

/// Until the first release, the initial migration is edited in place.
async fn tables_of_another_revision_are_refused(fixture: Fixture) {
    fixture.skip_final_check();
    fixture.enqueue_kind("mail").await;
    for change in ["update migrations set revision = 'other'", "alter table migrations drop column revision"]
    {
        fixture.sql(change, None).await;
        let errors = [
            fixture.migrate().await.expect_err("migrate"),
            Client::connect(&fixture.url()).await.expect_err("connect"),
        ];
        for error in errors {
            assert!(error.is_schema(), "{error:?}");
            let message = error.to_string();
            assert!(message.contains("another revision") && message.contains("drop the schema"), "{message}");
        }
    }
    assert_eq!(fixture.query_number("select count(*) from jobs", None).await, 1);
}

async fn operations_on_missing_tables_say_to_migrate(fixture: Fixture) {
    fixture.skip_final_check();
    for table in ["tokens", "kinds", "links"] {
        fixture.sql(&format!("drop table {table}"), None).await;
    }
    let store = fixture.store();
    let errors = [
        store.put_kinds(&[NewKind::new("mail")], &KindQueues::All).await.expect_err("put_kinds"),
        store.kinds(&KindFilter::default()).await.expect_err("kinds"),
        store.tokens().await.expect_err("tokens"),
        store.tokens_by_hash(&[[7; 32]]).await.expect_err("tokens_by_hash"),
        store.check().await.expect_err("check"),
    ];
    for error in errors {
        assert!(error.is_schema(), "{error:?}");
        assert!(error.to_string().contains("longshore migrate"), "{error}");
    }
}

async fn concurrent_migrations_all_succeed(fixture: Fixture) {
    let url = fixture.bare_url();
    let migrations: Vec<_> = (0..4)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move { Client::connect(&url).await?.migrate().await })
        })
        .collect();
    let mut created = 0;
    for migration in migrations {
        let migrated = migration.await.expect("task").expect("migrate");
        created += i64::from(migrated.from == 0);
    }
    assert!(created >= 1, "no process created the tables");
    let client = Client::connect(&url).await.expect("open");
    client.enqueue(job("mail")).await.expect("enqueue");
    assert_eq!(client.check().await.expect("check").problems, []);
}

async fn operations_without_tables_say_to_migrate(fixture: Fixture) {
    let bare = Client::connect(&fixture.bare_url()).await.expect("open");
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

fn change_version(from: i64, to: i64) -> String {
    format!("update migrations set version = {to} where version = {from}")
}

async fn a_schema_newer_than_this_build_is_refused(fixture: Fixture) {
    fixture.sql(&change_version(SCHEMA_VERSION, 99), None).await;
    let error = fixture.migrate().await.expect_err("a newer schema");
    assert!(error.is_schema(), "{error:?}");
    assert!(error.to_string().contains("99") && error.to_string().contains("upgrade"), "{error}");
}

async fn a_schema_newer_than_this_build_is_refused_at_connect(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    fixture.sql(&change_version(SCHEMA_VERSION, 99), None).await;
    let error = Client::connect(&fixture.url()).await.expect_err("a newer schema");
    assert!(error.is_schema(), "{error:?}");
    assert!(error.to_string().contains("99") && error.to_string().contains("upgrade"), "{error}");
    assert_eq!(fixture.query_number("select max(version) from migrations", None).await, 99);
    assert_eq!(fixture.query_number("select count(*) from jobs", None).await, 1);
    fixture.sql(&change_version(99, SCHEMA_VERSION), None).await;
    fixture.second_client().await;
}

async fn a_pinned_clock_is_pinned_for_every_process(fixture: Fixture) {
    let second = fixture.second_client().await;
    assert_eq!(fixture.now().await, start());
    assert_eq!(second.store().now().await.expect("now"), start());
    fixture.advance(HOUR).await;
    assert_eq!(second.store().now().await.expect("now"), start() + HOUR);
}

async fn an_unpinned_clock_shows_the_real_time(fixture: Fixture) {
    fixture.store().pin_clock(None).await.expect("unpin");
    let off = (fixture.now().await - Utc::now()).num_seconds().abs();
    assert!(off < 60, "the clock is off by {off} s");
}

async fn the_clock_keeps_microseconds(fixture: Fixture) {
    let at = start() + std::time::Duration::from_micros(123_456);
    fixture.store().pin_clock(Some(at)).await.expect("pin");
    let id = fixture.add(NewJob::new("mail", &1)).await;
    assert_eq!(fixture.job(id).await.created_at, at);
}
