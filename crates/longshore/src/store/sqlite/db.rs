//! Runs procedures, and the statements that both engines run, on SQLite.

use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use async_trait::async_trait;
use rusqlite::types::{FromSqlError, Value as Stored, ValueRef};
use rusqlite::{CachedStatement, Connection, params_from_iter};
use serde::Serialize;

use super::SqliteStore;
use super::tx::{self, Tx, json_list, micros};
use crate::error::{Error, Result};
use crate::store::db::{Arg, Db, Engine, Fault, How, Row, Sql, Statement, Value, Work};

#[async_trait]
impl Engine for SqliteStore {
    // There is one writer at a time, so nobody waits for them.
    const FLOWS_PER_STEP: u32 = 256;

    fn is_refusal(error: &Error) -> bool {
        match std::error::Error::source(error).and_then(|source| source.downcast_ref::<rusqlite::Error>()) {
            Some(error) => tx::is_refusal(error),
            // A row of this flow cannot be read.
            None => error.is_internal(),
        }
    }

    async fn call<A, T>(&self, how: How, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let run = move |conn: &mut Connection| Ok(poll_once(work(&mut Rows::new(conn), &args))?);
        if how.expected.only_reads() {
            self.engine.read_on(run).await
        } else {
            self.engine.write_on(run).await
        }
    }
}

/// Runs a procedure to its end. On SQLite nothing that it awaits is ever pending.
fn poll_once<T>(procedure: impl Future<Output = Sql<T>>) -> Sql<T> {
    match std::pin::pin!(procedure).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => {
            Err(Error::internal("a procedure of the store waits for something; this is a bug").into())
        }
    }
}

/// A transaction that can be sent to another thread, as the futures of procedures must be.
pub(super) struct Rows<'c> {
    conn: &'c mut Connection,
    now: Option<i64>,
}

impl<'c> Rows<'c> {
    fn new(conn: &'c mut Connection) -> Self {
        Rows { conn, now: None }
    }

    /// The same transaction, for the engine's own functions.
    pub(super) fn tx(&mut self) -> tx::Sql<Tx<'_>> {
        let now = match self.now {
            Some(now) => now,
            None => *self.now.insert(Tx::new(self.conn).now()?),
        };
        Ok(Tx::at(self.conn, now))
    }
}

impl<'c> Tx<'c> {
    fn fill(&self, sql: &Statement, args: &[Arg<'_>]) -> tx::Sql<(CachedStatement<'c>, Vec<Stored>)> {
        let mut params = args.iter().map(stored).collect::<tx::Sql<Vec<_>>>()?;
        let statement = self.prepare(sql.for_sqlite())?;
        if statement.parameter_count() > params.len() {
            params.push(self.now()?.into());
        }
        Ok((statement, params))
    }

    /// Whether the statement returns a row, for the engine's own functions.
    pub(super) fn has_row(&self, sql: &Statement, args: &[Arg<'_>]) -> tx::Sql<bool> {
        let (mut statement, params) = self.fill(sql, args)?;
        Ok(statement.exists(params_from_iter(params))?)
    }
}

#[async_trait]
impl Db for Rows<'_> {
    async fn rows(&mut self, sql: &'static Statement, args: &[Arg<'_>]) -> Sql<Vec<Row>> {
        let (mut statement, params) = self.tx()?.fill(sql, args)?;
        let names: Arc<[String]> = statement.column_names().into_iter().map(str::to_owned).collect();
        let read = |row: &rusqlite::Row<'_>| -> rusqlite::Result<Row> {
            let values = (0..names.len()).map(|nth| value(row.get_ref(nth)?));
            Ok(Row { names: names.clone(), values: values.collect::<rusqlite::Result<_>>()? })
        };
        let rows = statement.query_map(params_from_iter(params), read)?;
        Ok(rows.collect::<rusqlite::Result<_>>()?)
    }

    async fn execute(&mut self, sql: &'static Statement, args: &[Arg<'_>]) -> Sql<u64> {
        let (mut statement, params) = self.tx()?.fill(sql, args)?;
        Ok(statement.execute(params_from_iter(params))? as u64)
    }

    async fn lock(&mut self, _: &'static str) -> Sql<()> {
        // There is one writer at a time.
        Ok(())
    }

    async fn lock_each(&mut self, _: &'static str, _: &[String]) -> Sql<()> {
        Ok(())
    }

    fn lock_timeout(&self) -> String {
        String::new()
    }

    fn undo(&mut self) -> Sql<()> {
        Err(Error::internal("a procedure of the store met a locked row on SQLite; this is a bug").into())
    }
}

fn stored(arg: &Arg<'_>) -> tx::Sql<Stored> {
    Ok(match arg {
        Arg::Bool(value) => (*value).into(),
        Arg::Int(value) => (*value).into(),
        Arg::Text(value) => value.map(str::to_owned).into(),
        Arg::Bytes(value) => value.map(<[u8]>::to_vec).into(),
        Arg::Id(value) => value.map(|id| id.into_bytes().to_vec()).into(),
        Arg::Time(value) => value.map(|at| at.timestamp_micros()).into(),
        Arg::Span(value) => micros(*value).into(),
        Arg::Texts(value) => value.map(json_list).transpose()?.into(),
        Arg::OptionalTexts(value) => list(value)?,
        Arg::Ids(None) => Stored::Null,
        // As hexadecimal numbers, for `unhex`.
        Arg::Ids(Some(value)) => list(value.iter().map(|id| id.simple()))?,
        Arg::Times(value) => list(value.iter().map(|at| at.timestamp_micros()))?,
        Arg::Ints(value) => list(value)?,
        Arg::Hashes(value) => list(value.iter().map(|hash| hex(hash.as_slice())))?,
    })
}

fn list(items: impl IntoIterator<Item = impl Serialize>) -> tx::Sql<Stored> {
    json_list(items.into_iter().collect::<Vec<_>>().as_slice()).map(Stored::Text)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn value(stored: ValueRef<'_>) -> rusqlite::Result<Value> {
    Ok(match stored {
        ValueRef::Null => Value::Null,
        // No statement of the layer returns a fraction.
        ValueRef::Real(_) => return Err(FromSqlError::InvalidType.into()),
        ValueRef::Integer(value) => Value::Int(value),
        ValueRef::Text(_) => Value::Text(stored.as_str()?.to_owned()),
        ValueRef::Blob(value) => Value::Bytes(value.to_vec()),
    })
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        Fault::Sqlite(error.into())
    }
}

impl From<tx::Fault> for Fault {
    fn from(fault: tx::Fault) -> Self {
        Fault::Sqlite(fault)
    }
}

impl From<Fault> for tx::Fault {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Sqlite(fault) => fault,
            Fault::Ours(error) => tx::Fault::Ours(error),
            #[cfg(feature = "postgres")]
            Fault::Postgres(_) => tx::Fault::Ours(Error::internal("the fault is one of another engine")),
        }
    }
}
