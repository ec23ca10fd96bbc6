//! Migrations, schema versions and the engine's clock.

use std::time::Duration;

use chrono::Utc;
use longshore::store::{Beat, KindFilter, KindQueues};
use longshore::{
    Client, FlowStatus, JobId, Migrated, NewJob, NewKind, Retention, SCHEMA_VERSION, Status, Worker, chain,
    task,
};

use crate::fixture::*;
use crate::flows::{put, record};

cases! {
    migrating_again_changes_nothing,
    a_database_without_tables_is_at_version_zero,
    a_database_of_the_first_version_keeps_its_jobs,
    a_database_of_version_six_keeps_its_flows,
    workers_of_version_seven_go_on,
    operations_missing_from_the_first_version_say_to_migrate,
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

/// Removes everything that versions 8 and 9 added.
async fn downgrade_to_version_seven(fixture: &Fixture) {
    if fixture.engine() == Engine::Postgres {
        fixture.sql("drop table failure_notes", None).await;
    }
    const UNDO: &str = "
        drop table queue_kinds;
        drop table flow_parts;
        drop table operations;
        drop table failures;
        drop table measures;
        drop table sessions;
        drop index finished_failures;
        alter table finished drop column failure;
        alter table attempts drop column failure;
        delete from upkeep where name in ('failures', 'measures', 'samples');
        delete from migrations where version > 7";
    fixture.sql(UNDO, None).await;
}

/// Removes everything that later migrations added to version 1.
async fn downgrade_to_version_one(fixture: &Fixture) {
    downgrade_to_version_seven(fixture).await;
    let drop_triggers = match fixture.engine() {
        Engine::Postgres => {
            "drop function refuse_old_worker cascade; drop sequence turn_ids, flow_change_ids cascade"
        }
        Engine::Sqlite => "drop trigger refuse_old_worker; drop trigger refuse_old_heartbeat",
    };
    fixture.sql(drop_triggers, None).await;
    const UNDO: &str = "
        drop table flows;
        drop table flow_changes;
        drop table links;
        drop table groups;
        drop table turns;
        drop index ready_claim;
        drop index ready_suspects;
        drop index ready_groups;
        drop index ready_group_suspects;
        drop index running_groups;
        drop index jobs_flow;
        create index ready_claim on ready (queue, priority desc, run_at, id) where interruptions = 0;
        create index ready_suspects on ready (queue, priority desc, run_at, id) where interruptions > 0;
        alter table workers drop column schema_version;
        alter table jobs drop column grp;
        alter table jobs drop column flow;
        alter table jobs drop column task;
        alter table ready drop column grp;
        alter table ready drop column flow;
        alter table ready drop column held;
        alter table finished drop column flow;
        alter table finished drop column skipped;
        alter table running drop column grp;
        alter table running drop column flow;
        alter table running drop column gate;
        alter table queues drop column rate;
        alter table queues drop column rate_ms;
        alter table queues drop column burst;
        alter table queues drop column tat;
        alter table queues drop column group_max_running;
        alter table queues drop column group_rate;
        alter table queues drop column group_rate_ms;
        alter table queues drop column group_burst;
        drop table steps;
        drop table events;
        drop table waits;
        alter table workers drop column host;
        alter table workers drop column pid;
        alter table workers drop column version;
        alter table attempts drop column omitted;
        drop table finished_ranges;
        alter table upkeep drop column looked_at;
        drop table merged_requests;
        drop index running_cancels;
        drop table tokens;
        drop table kinds;
        delete from migrations where version > 1";
    fixture.sql(UNDO, None).await;
    assert_eq!(fixture.store().schema_version().await.expect("version"), 1);
}

async fn a_database_of_the_first_version_keeps_its_jobs(fixture: Fixture) {
    let old = fixture.second_client().await;
    let waiting = old.enqueue(job("mail").queue("letters")).await.expect("enqueue").id;
    let running = fixture.running(job("sms").priority(3)).await;
    let before = [snapshot(&fixture.job(waiting).await), snapshot(&fixture.job(running.lease().id).await)];
    downgrade_to_version_one(&fixture).await;
    // A worker of the first version would ignore the limits of groups.
    let refused = old.migrate().await.expect_err("a worker is alive");
    assert!(refused.is_schema(), "{refused:?}");
    assert!(refused.to_string().contains("stop them before you migrate"), "{refused}");
    assert_eq!(fixture.store().schema_version().await.expect("version"), 1);
    fixture.sql("update workers set stale_after_ms = 1, heartbeat_at = started_at", None).await;
    fixture.advance(Duration::from_secs(1)).await;
    assert_eq!(old.migrate().await.expect("migrate"), Migrated { from: 1, to: SCHEMA_VERSION });
    assert_eq!(
        fixture.migrate().await.expect("migrate"),
        Migrated { from: SCHEMA_VERSION, to: SCHEMA_VERSION }
    );
    let after = [snapshot(&fixture.job(waiting).await), snapshot(&fixture.job(running.lease().id).await)];
    assert_eq!(after, before);
    // The worker can end what it runs, but claims nothing any more.
    let beat = fixture.store().beat(running.lease().worker, &[]).await.expect("beat");
    assert_eq!(beat, Beat::Dead);
    let old_register = "insert into workers
            (id, name, queues, concurrency, stale_after_ms, started_at, heartbeat_at)
        select {id}, 'old', queues, 1, 1000, started_at, started_at from workers";
    let refused =
        fixture.try_sql(old_register, Some(JobId::new())).await.expect_err("an old worker registers");
    assert!(refused.contains("older than the database"), "{refused}");
    fixture.must_finish(&running, done()).await;
    fixture.put_kinds(&[NewKind::new("mail")]).await.expect("put");
}

async fn workers_of_version_seven_go_on(fixture: Fixture) {
    let running = fixture.running(job("mail")).await;
    let dead = fixture.ended(job("sms"), longshore::Outcome::FailedPermanent).await;
    downgrade_to_version_seven(&fixture).await;
    fixture.sql("update workers set schema_version = 7", None).await;
    let client = fixture.second_client().await;
    assert_eq!(client.migrate().await.expect("migrate"), Migrated { from: 7, to: SCHEMA_VERSION });
    fixture.must_finish(&running, failed_permanently()).await;
    let groups = fixture.failures(&longshore::FailureFilter::default()).await.expect("failures");
    assert_eq!(groups.len(), 1, "an earlier failure has no group");
    assert_eq!(groups[0].job, running.lease().id);
    assert_eq!(fixture.status(dead).await, Status::FailedPermanent);
}

async fn a_database_of_version_six_keeps_its_flows(fixture: Fixture) {
    let flow = put(&fixture, chain![task("a", job("mail")), task("b", job("mail")), task("c", job("mail"))])
        .await
        .id;
    downgrade_to_version_seven(&fixture).await;
    const UNDO: &str = "
        drop index flow_changes_returns;
        alter table flows drop column links;
        alter table flow_changes drop column counted;
        delete from migrations where version > 6";
    fixture.sql(UNDO, None).await;
    let client = fixture.second_client().await;
    assert_eq!(client.migrate().await.expect("migrate"), Migrated { from: 6, to: SCHEMA_VERSION });
    assert_eq!(fixture.query_number("select max(links) from flows", None).await, 2);
    crate::worker::drain(Worker::builder(client).function("mail", crate::worker::nothing)).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
    fixture.worker().await;
    let old_register = "insert into workers
            (id, name, queues, concurrency, stale_after_ms, started_at, heartbeat_at, schema_version)
        select {id}, 'old', queues, 1, 1000, started_at, started_at, 6 from workers";
    let refused =
        fixture.try_sql(old_register, Some(JobId::new())).await.expect_err("an old worker registers");
    assert!(refused.contains("older than the database"), "{refused}");
}

async fn operations_missing_from_the_first_version_say_to_migrate(fixture: Fixture) {
    downgrade_to_version_one(&fixture).await;
    let store = fixture.store();
    let errors = [
        store.put_kinds(&[NewKind::new("mail")], &KindQueues::All).await.expect_err("put_kinds"),
        store.kinds(&KindFilter::default()).await.expect_err("kinds"),
        store.tokens().await.expect_err("tokens"),
        store.tokens_by_hash(&[[7; 32]]).await.expect_err("tokens_by_hash"),
        store.check().await.expect_err("check"),
    ];
    fixture.skip_final_check();
    for error in errors {
        assert!(error.is_schema(), "{error:?}");
        assert!(error.to_string().contains("longshore migrate"), "{error}");
    }
    fixture.migrate().await.expect("migrate");
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
    assert_eq!(client.check().await.expect("check").problems, Vec::<String>::new());
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
