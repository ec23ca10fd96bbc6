//! Runs procedures, and the statements that both engines run, on Postgres.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::postgres::types::PgInterval;
use sqlx::{Column as _, Row as _, TypeInfo as _, ValueRef as _};
use uuid::Uuid;

use super::PostgresStore;
use super::run::{LockWait, Mode, Working};
use super::tx::{self, Query, Tx};
use crate::error::{Error, Result};
use crate::store::db::{
    Arg, Atomicity, Db, Engine, Expected, Fault, How, Locks, Row, Sql, Statement, Value, Work,
};

#[async_trait]
impl Engine for PostgresStore {
    const FLOWS_PER_STEP: u32 = 32;

    fn is_refusal(error: &Error) -> bool {
        let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<sqlx::Error>());
        source.and_then(tx::code).is_some_and(|code| tx::is_refusal(&code))
    }

    async fn call<A, T>(&self, how: How, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let procedure = Procedure { how, args, work };
        match how.locks {
            Locks::WaitForClients(wait) => {
                return self.run_unless_locked(mode(how.expected), wait, procedure, run_waiting).await;
            }
            Locks::WaitAside => return self.run_aside(mode(how.expected), procedure, run_waiting).await,
            Locks::Wait | Locks::WaitUpTo(_) => {}
        }
        match how.expected {
            Expected::QuickRead => self.run_read(procedure, run).await,
            Expected::View => self.run_view(procedure, run).await,
            Expected::Quick => self.run_quick(procedure, run).await,
            Expected::WhileAwaited | Expected::ReadWhileAwaited => {
                self.run_while_awaited(procedure, run).await
            }
            Expected::Slow | Expected::SlowRead => self.run(procedure, run).await,
            Expected::AllTables => self.run_as(Mode::ALL_TABLES, procedure, run).await,
        }
    }
}

struct Procedure<A, T> {
    how: How,
    args: A,
    work: Work<A, T>,
}

fn run<'c, A, T>(tx: &'c mut Tx<'_>, procedure: &'c Procedure<A, T>) -> Working<'c, T>
where
    A: Send + Sync + 'static,
    T: Send + 'static,
{
    let max_wait = match procedure.how.locks {
        Locks::WaitUpTo(max_wait) => Some(max_wait),
        Locks::Wait | Locks::WaitForClients(_) | Locks::WaitAside => None,
    };
    Box::pin(run_limited(tx, procedure, max_wait))
}

fn run_waiting<'c, A, T>(
    tx: &'c mut Tx<'_>,
    (procedure, wait): &'c (Arc<Procedure<A, T>>, LockWait),
) -> Working<'c, T>
where
    A: Send + Sync + 'static,
    T: Send + 'static,
{
    Box::pin(async move { run_limited(tx, procedure, Some(wait.remaining())).await })
}

async fn run_limited<A, T>(
    tx: &mut Tx<'_>,
    Procedure { how, args, work }: &Procedure<A, T>,
    max_wait: Option<Duration>,
) -> tx::Sql<T> {
    if how.atomicity == Atomicity::Single {
        tx.max_lock_wait = max_wait;
        return Ok(work(tx, args).await?);
    }
    let mut transaction = tx.begin_as(how.atomicity, max_wait).await?;
    let mut tx = transaction.tx();
    let done = work(&mut tx, args).await?;
    if tx.is_undone {
        transaction.rollback().await?;
    } else {
        transaction.commit().await?;
    }
    Ok(done)
}

fn mode(expected: Expected) -> Mode {
    match expected {
        Expected::Slow | Expected::SlowRead | Expected::View => Mode::SLOW,
        Expected::AllTables => Mode::ALL_TABLES,
        Expected::Quick | Expected::QuickRead | Expected::WhileAwaited | Expected::ReadWhileAwaited => {
            Mode::QUICK
        }
    }
}

#[async_trait]
impl Db for Tx<'_> {
    async fn rows(&mut self, sql: &'static Statement, args: &[Arg<'_>]) -> Sql<Vec<Row>> {
        let query = args.iter().fold(sqlx::query(self.sql(sql.for_postgres())), bind);
        Ok(rows_of(&query.fetch_all(&mut *self.connection).await?)?)
    }

    async fn execute(&mut self, sql: &'static Statement, args: &[Arg<'_>]) -> Sql<u64> {
        let query = args.iter().fold(sqlx::query(self.sql(sql.for_postgres())), bind);
        Ok(query.execute(&mut *self.connection).await?.rows_affected())
    }

    async fn lock(&mut self, name: &'static str) -> Sql<()> {
        sqlx::query("select pg_advisory_xact_lock(hashtextextended($1, 0))")
            .bind(self.fill(&format!("longshore.{name}")))
            .execute(&mut *self.connection)
            .await?;
        Ok(())
    }

    async fn lock_each(&mut self, of: &'static str, names: &[String]) -> Sql<()> {
        const LOCK: &str = "
            select count(pg_advisory_xact_lock(hashtextextended($1 || name, 0)))
              from (select name from unnest($2::text[]) as n(name) order by name) as sorted";
        sqlx::query(self.sql(LOCK))
            .bind(self.fill(&format!("longshore.{of}:")))
            .bind(names)
            .execute(&mut *self.connection)
            .await?;
        Ok(())
    }

    fn lock_timeout(&self) -> String {
        // Zero limits nothing.
        self.max_lock_wait.map_or_else(|| "0".into(), tx::lock_timeout)
    }

    fn undo(&mut self) -> Sql<()> {
        self.is_undone = true;
        Ok(())
    }
}

/// The rows of one statement.
pub(super) fn rows_of(rows: &[PgRow]) -> sqlx::Result<Vec<Row>> {
    let Some(first) = rows.first() else { return Ok(Vec::new()) };
    let names: Arc<[String]> = first.columns().iter().map(|column| column.name().to_owned()).collect();
    let types: Vec<Type> = first.columns().iter().map(|column| Type::of(column.type_info().name())).collect();
    let read = |row: &PgRow| -> sqlx::Result<Row> {
        let values = types.iter().enumerate().map(|(nth, kind)| kind.value(row, nth));
        Ok(Row { names: names.clone(), values: values.collect::<sqlx::Result<_>>()? })
    };
    rows.iter().map(read).collect()
}

fn bind<'q>(query: Query<'q>, arg: &'q Arg<'_>) -> Query<'q> {
    match arg {
        Arg::Bool(value) => query.bind(value),
        Arg::Int(value) => query.bind(value),
        Arg::Text(value) => query.bind(value),
        Arg::Bytes(value) => query.bind(value),
        Arg::Id(value) => query.bind(value),
        Arg::Time(value) => query.bind(value),
        Arg::Span(value) => {
            let microseconds = i64::try_from(value.as_micros()).unwrap_or(i64::MAX);
            query.bind(PgInterval { months: 0, days: 0, microseconds })
        }
        Arg::Texts(value) => query.bind(value),
        Arg::OptionalTexts(value) => query.bind(value),
        Arg::Ids(value) => query.bind(value),
        Arg::Times(value) => query.bind(value),
        Arg::Ints(value) => query.bind(value),
        Arg::Hashes(value) => query.bind(value.iter().map(|hash| hash.as_slice()).collect::<Vec<_>>()),
    }
}

/// How a column is read. Decided once for all rows of a result.
enum Type {
    Bool,
    Int2,
    Int4,
    Int8,
    Bytes,
    Id,
    Time,
    Ids,
    Texts,
    /// Also JSON and the types of the schema.
    Text,
}

impl Type {
    fn of(name: &str) -> Self {
        match name {
            "BOOL" => Type::Bool,
            "INT2" => Type::Int2,
            "INT4" => Type::Int4,
            "INT8" => Type::Int8,
            "BYTEA" => Type::Bytes,
            "UUID" => Type::Id,
            "TIMESTAMPTZ" => Type::Time,
            "UUID[]" => Type::Ids,
            "TEXT[]" => Type::Texts,
            _ => Type::Text,
        }
    }

    fn value(&self, row: &PgRow, nth: usize) -> sqlx::Result<Value> {
        let value = match self {
            Type::Bool => row.try_get::<Option<bool>, _>(nth)?.map(Value::Bool),
            Type::Int2 => row.try_get::<Option<i16>, _>(nth)?.map(|value| Value::Int(value.into())),
            Type::Int4 => row.try_get::<Option<i32>, _>(nth)?.map(|value| Value::Int(value.into())),
            Type::Int8 => row.try_get::<Option<i64>, _>(nth)?.map(Value::Int),
            Type::Bytes => row.try_get::<Option<Vec<u8>>, _>(nth)?.map(Value::Bytes),
            Type::Id => row.try_get::<Option<Uuid>, _>(nth)?.map(Value::Id),
            Type::Time => row.try_get::<Option<DateTime<Utc>>, _>(nth)?.map(Value::Time),
            Type::Ids => row.try_get::<Option<Vec<Uuid>>, _>(nth)?.map(Value::Ids),
            Type::Texts => {
                // A list that was written in SQL may have nulls, which count for nothing.
                let texts = row.try_get::<Option<Vec<Option<String>>>, _>(nth)?;
                texts.map(|texts| Value::Texts(texts.into_iter().flatten().collect()))
            }
            Type::Text => {
                let raw = row.try_get_raw(nth)?;
                let text = (!raw.is_null()).then(|| raw.as_str().map(str::to_owned)).transpose();
                text.map_err(sqlx::Error::Decode)?.map(Value::Text)
            }
        };
        Ok(value.unwrap_or(Value::Null))
    }
}

impl From<sqlx::Error> for Fault {
    fn from(error: sqlx::Error) -> Self {
        Fault::Postgres(error.into())
    }
}

impl From<tx::Fault> for Fault {
    fn from(fault: tx::Fault) -> Self {
        Fault::Postgres(fault)
    }
}

impl From<Fault> for tx::Fault {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Postgres(fault) => fault,
            Fault::Ours(error) => tx::Fault::Ours(error),
            #[cfg(feature = "sqlite")]
            Fault::Sqlite(_) => tx::Fault::Ours(Error::internal("the fault is one of another engine")),
        }
    }
}
