//! The Postgres engine: any number of processes on any number of hosts against
//! one database, version 14 and up.
//!
//! Owns the schema name, the migrations and the way from each verb to its body;
//! `run` has how database work is run and its faults are told. The verbs are in
//! `enqueue`, `claim`, `flow` (progress, heartbeat),
//! `settle`, `operate` (an operator's moves), `upkeep` (recovery, schedules,
//! retention), `inspect` (get, list, count) and `access` (tokens, kinds).
//!
//! No session state is relied on: no session locks, no temporary tables, no
//! `search_path`, and `LISTEN` only as a hint. But the driver names the
//! statements that it prepares, whatever its cache is told, so a PgBouncer in
//! transaction mode must track them (`max_prepared_statements`, 1.21 or newer).

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, SqlSafeStr, SqlStr};

use super::*;
use crate::enqueue::{MAX_PAYLOAD, check_json};
use run::{DEADLINE, Doing, Done, Fault, QUICK, Query, Work, translate, within};

mod access;
mod claim;
mod enqueue;
mod flow;
mod glance;
mod inspect;
mod listen;
mod operate;
mod pool;
mod run;
mod settle;
mod upkeep;

const MIGRATIONS: &[(i64, &str)] = &[
    (1, include_str!("../../../migrations/postgres/0001_queue.sql")),
    (2, include_str!("../../../migrations/postgres/0002_server.sql")),
];

const DEFAULT_SCHEMA: &str = "longshore";
/// The queue in a Postgres database.
#[derive(Clone, Debug)]
pub struct PostgresStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    pool: Arc<pool::Pool>,
    schema: Schema,
    listener: listen::Listener,
    notify: bool,
}

/// How to reach the tables.
#[derive(Clone, Debug)]
pub struct PostgresOptions {
    /// The schema that holds the tables; `longshore` by default.
    pub schema: String,
    /// How many connections the pool may open; 10 by default.
    pub max_connections: u32,
    /// How long to wait for a connection; 10 s by default.
    pub acquire_timeout: Duration,
    /// Whether new work is announced by `NOTIFY`; on by default. Where it is
    /// off, or cannot pass (PgBouncer in transaction mode), polling finds it.
    pub notify: bool,
}

impl Default for PostgresOptions {
    fn default() -> Self {
        PostgresOptions {
            schema: DEFAULT_SCHEMA.into(),
            max_connections: 10,
            acquire_timeout: Duration::from_secs(10),
            notify: true,
        }
    }
}

impl PostgresStore {
    /// Connects to `postgres://user@host/database`. The parameters `schema`,
    /// `max_connections` and `notify` (`on` or `off`) of the URL are ours; the
    /// rest are Postgres's.
    pub async fn open(url: &str) -> Result<Self> {
        let mut options = PostgresOptions::default();
        let url = take_parameter(url, "schema", |value| {
            options.schema = value.into();
            Ok(())
        })?;
        let url = take_parameter(&url, "max_connections", |value| {
            options.max_connections = value.parse().ok().filter(|n| *n >= 2).ok_or_else(|| {
                Error::invalid("max_connections", "database URL: max_connections must be a number from 2 up")
            })?;
            Ok(())
        })?;
        let url = take_parameter(&url, "notify", |value| {
            options.notify = match value {
                "on" => true,
                "off" => false,
                _ => return Err(Error::invalid("notify", "database URL: notify is `on` or `off`")),
            };
            Ok(())
        })?;
        PostgresStore::open_with(&url, options).await
    }

    /// Connects with settings that a URL does not carry.
    pub async fn open_with(url: &str, options: PostgresOptions) -> Result<Self> {
        let schema = Schema::new(&options.schema)?;
        // The parse error repeats the URL, password included: leave it out.
        let connect: PgConnectOptions = url.parse().map_err(|_| {
            Error::invalid(
                "url",
                "database URL: not understood; use postgres://user:password@host:5432/database",
            )
        })?;
        // A wrong host or password should be told here, in its own words, and
        // not by the first job when the pool has timed out.
        let target = format!("{}:{}", connect.get_host(), connect.get_port());
        let probe = tokio::time::timeout(options.acquire_timeout, PgConnection::connect_with(&connect)).await;
        match probe {
            Ok(Ok(connection)) => drop(connection.close().await),
            Ok(Err(error)) => {
                let told = translate(error);
                return Err(Error::unavailable(format!("{target}: {told}")).with_source(told));
            }
            Err(_) => {
                let patience = options.acquire_timeout;
                return Err(Error::unavailable(format!(
                    "{target}: the database did not answer within {patience:?}"
                )));
            }
        }
        let listener = listen::Listener::new(schema.channel(), connect.clone());
        let pool = pool::Pool::new(connect, options.max_connections, options.acquire_timeout);
        let store = PostgresStore(Arc::new(Inner { pool, schema, listener, notify: options.notify }));
        match store.schema_version().await? {
            found if found > SCHEMA_VERSION => Err(newer(found)),
            _ => Ok(store),
        }
    }

    /// The schema that holds the tables.
    pub fn schema(&self) -> &str {
        &self.0.schema.name
    }

    fn sql(&self, text: &'static str) -> SqlStr {
        self.0.schema.sql(text)
    }
}

/// The schema's name, and our statements with it filled in.
#[derive(Debug)]
struct Schema {
    name: String,
    filled: RwLock<HashMap<&'static str, Arc<str>>>,
}

impl Schema {
    fn new(name: &str) -> Result<Self> {
        let first = |c: char| c.is_ascii_lowercase() || c == '_';
        let good = name.len() <= 63
            && name.starts_with(first)
            && !name.starts_with("pg_")   // Postgres keeps these to itself
            && name.chars().all(|c| first(c) || c.is_ascii_digit());
        if !good {
            return Err(Error::invalid(
                "schema",
                "schema: use a lowercase letter or underscore, then letters, digits and underscores, 63 at most, and not pg_ in front",
            ));
        }
        Ok(Schema { name: name.into(), filled: RwLock::default() })
    }

    /// The constants name the default schema, so that they run in psql as they
    /// stand; another one takes its place here. The name was checked above.
    fn sql(&self, text: &'static str) -> SqlStr {
        if self.name == DEFAULT_SCHEMA {
            return text.into_sql_str();
        }
        let known = self.filled.read().unwrap_or_else(PoisonError::into_inner).get(text).cloned();
        let filled = known.unwrap_or_else(|| {
            let filled: Arc<str> = self.fill(text).into();
            self.filled.write().unwrap_or_else(PoisonError::into_inner).insert(text, filled.clone());
            filled
        });
        AssertSqlSafe(filled).into_sql_str()
    }

    fn fill(&self, text: &str) -> String {
        if self.name == DEFAULT_SCHEMA {
            return text.into();
        }
        // Quoted, because a name may be a word of SQL.
        text.replace("longshore.wake", &self.channel()).replace("longshore.", &format!("\"{}\".", self.name))
    }

    /// Channel names end at 63 bytes; two long schema names that begin alike
    /// would share one, and wake each other for nothing.
    fn channel(&self) -> String {
        format!("{:.58}.wake", self.name)
    }
}

/// Takes one parameter out of a URL's query.
fn take_parameter(url: &str, name: &str, mut take: impl FnMut(&str) -> Result<()>) -> Result<String> {
    let Some((base, query)) = url.split_once('?') else { return Ok(url.into()) };
    let mut rest = Vec::new();
    for pair in query.split('&') {
        match pair.split_once('=') {
            Some((key, value)) if key == name => take(value)?,
            _ => rest.push(pair),
        }
    }
    Ok(if rest.is_empty() { base.into() } else { format!("{base}?{}", rest.join("&")) })
}

const VERSION: &str = "select coalesce(max(version), 0) from longshore.migrations";

const HAS_MIGRATIONS: &str = "select to_regclass($1) is not null";

impl PostgresStore {
    async fn version(&self, connection: &mut PgConnection) -> Done<i64> {
        let table = self.0.schema.fill("longshore.migrations");
        let there: bool = sqlx::query_scalar(HAS_MIGRATIONS).bind(table).fetch_one(&mut *connection).await?;
        if !there {
            return Ok(0);
        }
        Ok(sqlx::query_scalar(self.sql(VERSION)).fetch_one(connection).await?)
    }

    async fn migrate_on(&self, connection: &mut PgConnection) -> Done<Migrated> {
        let from = self.version(connection).await?;
        if from > SCHEMA_VERSION {
            return Err(newer(from).into());
        }
        if from == SCHEMA_VERSION {
            return Ok(Migrated { from, to: from });
        }
        let mut tx = connection.begin().await?;
        // One migrates, the others wait and find it done. Ends with the
        // transaction, so it works behind a transaction pooler.
        sqlx::query("select pg_advisory_xact_lock(hashtextextended($1, 0))")
            .bind(self.0.schema.fill("longshore.migrations"))
            .execute(&mut *tx)
            .await?;
        // Looked for first: making one needs a right on the database that a
        // role with a schema of its own may lack.
        let name = &self.0.schema.name;
        let there: bool = sqlx::query_scalar("select exists (select 1 from pg_namespace where nspname = $1)")
            .bind(name)
            .fetch_one(&mut *tx)
            .await?;
        if !there {
            sqlx::raw_sql(AssertSqlSafe(format!("create schema \"{name}\""))).execute(&mut *tx).await?;
        }
        let history = self.0.schema.fill(
            "create table if not exists longshore.migrations (
                 version bigint primary key,
                 applied_at timestamptz not null default now())",
        );
        sqlx::raw_sql(AssertSqlSafe(history)).execute(&mut *tx).await?;
        let from = self.version(&mut tx).await?;
        if from > SCHEMA_VERSION {
            return Err(newer(from).into());
        }
        for (version, text) in MIGRATIONS.iter().filter(|(version, _)| *version > from) {
            sqlx::raw_sql(AssertSqlSafe(self.0.schema.fill(text))).execute(&mut *tx).await?;
            sqlx::query(self.sql("insert into longshore.migrations (version) values ($1)"))
                .bind(version)
                .execute(&mut *tx)
                .await?;
        }
        tx.commit().await?;
        Ok(Migrated { from, to: SCHEMA_VERSION })
    }
}

/// `replace function` takes effect for all processes at once, because every
/// statement reads the time by it.
fn clock_definition(at: Option<DateTime<Utc>>) -> String {
    let body = match at {
        None => "select now()".to_owned(),
        Some(at) => format!("select ''{}''::timestamptz", at.to_rfc3339()),
    };
    format!(
        "create or replace function longshore.clock() returns timestamptz
         language sql stable parallel safe as '{body}'"
    )
}

#[async_trait]
impl Store for PostgresStore {
    async fn migrate(&self) -> Result<Migrated> {
        self.run((), |store, connection, ()| Box::pin(store.migrate_on(connection))).await
    }

    async fn schema_version(&self) -> Result<i64> {
        self.run((), |store, connection, ()| Box::pin(store.version(connection))).await
    }

    async fn now(&self) -> Result<DateTime<Utc>> {
        self.run_quick((), |store, connection, ()| {
            Box::pin(async move {
                Ok(sqlx::query_scalar(store.sql("select longshore.clock()")).fetch_one(connection).await?)
            })
        })
        .await
    }

    async fn pin_clock(&self, at: Option<DateTime<Utc>>) -> Result<()> {
        self.run(at, |store, connection, at| {
            Box::pin(async move {
                let text = store.0.schema.fill(&clock_definition(*at));
                sqlx::raw_sql(AssertSqlSafe(text)).execute(connection).await?;
                Ok(())
            })
        })
        .await
    }

    fn with_own_connection(&self) -> Arc<dyn Store> {
        Arc::new(PostgresStore(Arc::new(Inner {
            pool: self.0.pool.of_one(),
            schema: Schema { name: self.0.schema.name.clone(), filled: RwLock::default() },
            listener: self.0.listener.unconnected(),
            notify: self.0.notify,
        })))
    }

    async fn enqueue(&self, jobs: &[ValidJob], wait: KeyWait) -> Result<Vec<Enqueued>> {
        let work: Work<_, _> = |store, connection, (jobs, wait): &(Vec<ValidJob>, KeyWait)| {
            Box::pin(store.enqueue_on(connection, jobs, *wait))
        };
        self.run_here(DEADLINE, (jobs.to_vec(), wait), work).await
    }

    fn notify_local(&self, queues: &[String]) -> bool {
        self.0.listener.notify_local(queues)
    }

    async fn notify_others(&self, queues: &[String]) -> Result<()> {
        self.notify_server(queues).await
    }

    async fn subscribe(&self) -> Result<Wakeups> {
        self.0.listener.subscribe().await
    }

    async fn leases(&self, worker: WorkerId) -> Result<Vec<Lease>> {
        self.run_quick(worker, |store, connection, worker| Box::pin(store.leases_on(connection, *worker)))
            .await
    }

    async fn claim(&self, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Result<Claims> {
        let args = (request.clone(), tokio::sync::Mutex::new(std::mem::take(cursor)));
        let (claims, moved) = self.run_here(QUICK, args, claim_with_cursor).await?;
        *cursor = moved;
        Ok(claims)
    }

    async fn claims(&self, leases: &[Lease]) -> Result<Vec<Option<Claimed>>> {
        self.run_quick(leases.to_vec(), |store, connection, leases| {
            Box::pin(store.claims_on(connection, leases))
        })
        .await
    }

    async fn mark_started(&self, lease: &Lease) -> Result<Fenced> {
        self.run_quick(*lease, |store, connection, lease| Box::pin(store.mark_started_on(connection, lease)))
            .await
    }

    async fn progress(&self, reports: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>> {
        reports.iter().try_for_each(|(_, progress)| check_json("progress", progress.get(), MAX_PAYLOAD))?;
        self.run_quick(reports.to_vec(), |store, connection, reports| {
            Box::pin(store.progress_on(connection, reports))
        })
        .await
    }

    async fn save_checkpoint(&self, lease: &Lease, data: &RawValue) -> Result<Fenced> {
        check_json("checkpoint", data.get(), MAX_PAYLOAD)?;
        self.run_quick((*lease, data.to_owned()), |store, connection, (lease, data)| {
            Box::pin(store.save_checkpoint_on(connection, lease, data))
        })
        .await
    }

    async fn checkpoint(&self, id: JobId) -> Result<Option<Box<RawValue>>> {
        self.run_quick(id, |store, connection, id| Box::pin(store.checkpoint_on(connection, *id))).await
    }

    async fn assert_lease(&self, lease: &Lease) -> Result<Fenced> {
        self.run_quick(*lease, |store, connection, lease| Box::pin(store.assert_lease_on(connection, lease)))
            .await
    }

    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>> {
        let work: Work<_, _> = |store, connection, settlements: &Vec<Settlement>| {
            Box::pin(store.settle_on(connection, settlements))
        };
        // Each of its statements is quick; of many locked leases, each has its turn.
        self.run_here(DEADLINE, settlements.to_vec(), work).await
    }

    async fn register(&self, worker: &NewWorker) -> Result<()> {
        self.run_while_awaited(worker.clone(), |store, connection, worker| {
            Box::pin(store.register_on(connection, worker))
        })
        .await
    }

    async fn beat(&self, worker: WorkerId, held: &[Lease]) -> Result<Beat> {
        self.run_while_awaited((worker, held.to_vec()), |store, connection, (worker, held)| {
            Box::pin(store.beat_on(connection, *worker, held))
        })
        .await
    }

    async fn retire(&self, worker: WorkerId) -> Result<()> {
        self.run_quick(worker, |store, connection, worker| Box::pin(store.retire_on(connection, *worker)))
            .await
    }

    async fn workers(&self, threshold: Option<Duration>) -> Result<Vec<WorkerRecord>> {
        self.run(threshold, |store, connection, threshold| Box::pin(store.workers_on(connection, *threshold)))
            .await
    }

    async fn mark_dead(&self, threshold: Option<Duration>) -> Result<Vec<WorkerId>> {
        self.run_quick(threshold, |store, connection, threshold| {
            Box::pin(store.mark_dead_on(connection, *threshold))
        })
        .await
    }

    async fn interrupted(&self, scope: &SweepScope) -> Result<Vec<Interrupted>> {
        self.run(scope.clone(), |store, connection, scope| Box::pin(store.interrupted_on(connection, scope)))
            .await
    }

    async fn recover(&self, recoveries: &[(Interruptor, Settlement)]) -> Result<Vec<Settled>> {
        self.run(recoveries.to_vec(), |store, connection, recoveries| {
            Box::pin(store.recover_on(connection, recoveries))
        })
        .await
    }

    async fn locate(&self, id: JobId) -> Result<Option<State>> {
        self.run_quick(id, |store, connection, id| Box::pin(store.locate_on(connection, *id))).await
    }

    async fn operate(&self, id: JobId, from: &State, to: &Operation) -> Result<Operated> {
        self.run((id, from.clone(), to.clone()), |store, connection, (id, from, to)| {
            Box::pin(store.operate_on(connection, *id, from, to))
        })
        .await
    }

    async fn dead_letters(&self, filter: &DeadFilter) -> Result<Vec<JobId>> {
        self.run(filter.clone(), |store, connection, filter| {
            Box::pin(store.dead_letters_on(connection, filter))
        })
        .await
    }

    async fn set_queue(&self, name: &str, change: &QueueChange) -> Result<()> {
        self.run((name.to_owned(), change.clone()), |store, connection, (name, change)| {
            Box::pin(store.set_queue_on(connection, name, change))
        })
        .await
    }

    async fn queues(&self) -> Result<Vec<QueueRecord>> {
        self.run((), |store, connection, ()| Box::pin(store.queues_on(connection))).await
    }

    async fn get(&self, id: JobId) -> Result<Option<JobRecord>> {
        self.run_quick(id, |store, connection, id| Box::pin(store.get_on(connection, *id))).await
    }

    async fn list(&self, filter: &ListFilter) -> Result<Page> {
        filter.validate()?;
        self.run(filter.clone(), |store, connection, filter| Box::pin(store.list_on(connection, filter)))
            .await
    }

    async fn counts(&self) -> Result<Vec<Count>> {
        self.run((), |store, connection, ()| Box::pin(store.counts_on(connection))).await
    }

    async fn glance(&self, most: u32, also: &[JobId]) -> Result<Vec<Glance>> {
        self.run((most, also.to_vec()), |store, connection, (most, also)| {
            Box::pin(store.glance_on(connection, *most, also))
        })
        .await
    }

    async fn overdue(&self) -> Result<Vec<(String, Duration)>> {
        self.run((), |store, connection, ()| Box::pin(store.overdue_on(connection))).await
    }

    async fn ahead(&self, id: JobId, kinds: Option<&[String]>, most: u32) -> Result<Option<Ahead>> {
        self.run((id, kinds.map(<[_]>::to_vec), most), |store, connection, (id, kinds, most)| {
            Box::pin(store.ahead_on(connection, *id, kinds.as_deref(), *most))
        })
        .await
    }

    async fn tallied(&self, since: DateTime<Utc>) -> Result<Vec<Tallied>> {
        self.run(since, |store, connection, since| Box::pin(store.tallied_on(connection, *since))).await
    }

    async fn check(&self) -> Result<CheckReport> {
        // Reads everything there is.
        const PATIENCE: Duration = Duration::from_secs(60 * 60);
        self.run_within(PATIENCE, (), |store, connection, ()| Box::pin(store.check_on(connection))).await
    }

    async fn put_schedule(&self, schedule: &Schedule) -> Result<Schedule> {
        schedule.validate()?;
        self.run(schedule.clone(), |store, connection, schedule| {
            Box::pin(store.put_schedule_on(connection, schedule))
        })
        .await
    }

    async fn schedules(&self) -> Result<Vec<Schedule>> {
        self.run_quick((), |store, connection, ()| Box::pin(store.schedules_on(connection))).await
    }

    async fn set_ticking(&self, name: &str, ticking: Ticking) -> Result<bool> {
        self.run((name.to_owned(), ticking), |store, connection, (name, ticking)| {
            Box::pin(store.set_ticking_on(connection, name, *ticking))
        })
        .await
    }

    async fn remove_schedule(&self, name: &str) -> Result<bool> {
        self.run(name.to_owned(), |store, connection, name| {
            Box::pin(store.remove_schedule_on(connection, name))
        })
        .await
    }

    async fn fire(
        &self,
        seen: &Schedule,
        next: DateTime<Utc>,
        fired: Option<DateTime<Utc>>,
        jobs: &[ValidJob],
    ) -> Result<Option<Vec<Enqueued>>> {
        self.run(
            (seen.clone(), next, fired, jobs.to_vec()),
            |store, connection, (seen, next, fired, jobs)| {
                Box::pin(store.fire_on(connection, seen, *next, *fired, jobs))
            },
        )
        .await
    }

    async fn retain(&self, policy: &Retention, step: u32) -> Result<Retained> {
        self.run((*policy, step), |store, connection, (policy, step)| {
            Box::pin(store.retain_on(connection, policy, *step))
        })
        .await
    }

    async fn fold_tallies(&self, step: u32) -> Result<u64> {
        self.run(step, |store, connection, step| Box::pin(store.fold_tallies_on(connection, *step))).await
    }

    async fn put_token(&self, token: &NewToken) -> Result<()> {
        token.validate()?;
        self.run_quick(token.clone(), |store, connection, token| {
            Box::pin(store.put_token_on(connection, token))
        })
        .await
    }

    async fn token(&self, hash: &[u8; 32]) -> Result<Option<TokenRecord>> {
        self.run_quick(*hash, |store, connection, hash| Box::pin(store.token_on(connection, hash))).await
    }

    async fn tokens(&self) -> Result<Vec<TokenRecord>> {
        self.run((), |store, connection, ()| Box::pin(store.tokens_on(connection))).await
    }

    async fn revoke_token(&self, id: Uuid) -> Result<bool> {
        self.run_quick(id, |store, connection, id| Box::pin(store.revoke_token_on(connection, *id))).await
    }

    async fn put_kinds(&self, kinds: &[NewKind]) -> Result<()> {
        kinds.iter().try_for_each(NewKind::validate)?;
        self.run_quick(kinds.to_vec(), |store, connection, kinds| {
            Box::pin(store.put_kinds_on(connection, kinds))
        })
        .await
    }

    async fn kinds(&self) -> Result<Vec<KindRecord>> {
        self.run((), |store, connection, ()| Box::pin(store.kinds_on(connection))).await
    }

    async fn remove_kind(&self, name: &str) -> Result<bool> {
        self.run_quick(name.to_owned(), |store, connection, name| {
            Box::pin(store.remove_kind_on(connection, name))
        })
        .await
    }
}

fn claim_with_cursor<'c>(
    store: &'c PostgresStore,
    connection: &'c mut PgConnection,
    (request, cursor): &'c (ClaimRequest, tokio::sync::Mutex<ClaimCursor>),
) -> Doing<'c, (Claims, ClaimCursor)> {
    Box::pin(async move {
        let mut cursor = cursor.lock().await;
        let claims = store.claim_on(connection, request, &mut cursor).await?;
        Ok((claims, std::mem::take(&mut *cursor)))
    })
}

/// Jobs stored by the caller's connection, inside whatever transaction is open
/// on it.
impl crate::client::CallerTransaction for &mut PgConnection {
    async fn enqueue(self, store: &dyn Store, jobs: &[ValidJob]) -> Result<Vec<Enqueued>> {
        let any: &dyn std::any::Any = store;
        let store = any.downcast_ref::<PostgresStore>().ok_or_else(|| {
            Error::invalid(
                "transaction",
                "transaction: a Postgres transaction, but this client uses another engine",
            )
        })?;
        store.enqueue_in(self, jobs).await
    }
}
