//! What one operation runs on: a transaction with its time, columns read as domain types,
//! and the translation of driver errors into ours.

use std::cell::Cell;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chrono::{DateTime, Utc};
use rusqlite::types::{FromSql, ValueRef};
use rusqlite::{CachedStatement, Connection, ErrorCode, OptionalExtension, Params, Row, RowIndex};
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::job::{FlowId, JobId, Outcome, WorkerId};
use crate::rules::flow::Condition;
use crate::rules::lifecycle::When;

const SECOND: i64 = 1_000_000;
pub(super) const HOUR: i64 = 60 * 60 * SECOND;
pub(super) const DAY: i64 = 24 * HOUR;

/// A transaction on a connection, and its time.
pub(super) struct Tx<'c> {
    pub(super) conn: &'c Connection,
    now: Cell<Option<i64>>,
}

impl<'c> Tx<'c> {
    pub(super) fn new(conn: &'c Connection) -> Self {
        Tx { conn, now: Cell::new(None) }
    }

    /// The transaction, if its time is known.
    pub(super) fn at(conn: &'c Connection, now: i64) -> Self {
        Tx { conn, now: Cell::new(Some(now)) }
    }

    pub(super) fn prepare(&self, sql: &str) -> Sql<CachedStatement<'c>> {
        Ok(self.conn.prepare_cached(sql)?)
    }

    pub(super) fn execute(&self, sql: &str, params: impl Params) -> Sql<usize> {
        Ok(self.prepare(sql)?.execute(params)?)
    }

    /// Runs a statement that returns at most one row.
    pub(super) fn row<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Sql<Option<T>> {
        Ok(self.prepare(sql)?.query_row(params, read).optional()?)
    }

    /// Runs a statement and reads all its rows.
    pub(super) fn rows<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Sql<Vec<T>> {
        let mut statement = self.prepare(sql)?;
        let rows = statement.query_map(params, read)?;
        Ok(rows.collect::<rusqlite::Result<_>>()?)
    }

    /// Runs a statement that returns one value, or none.
    pub(super) fn value<T: FromSql>(&self, sql: &str, params: impl Params) -> Sql<Option<T>> {
        self.row(sql, params, |row| row.get(0))
    }

    /// The engine's time in microseconds, the same throughout the transaction.
    pub(super) fn now(&self) -> Sql<i64> {
        const PINNED: &str = "
            select pinned
              from clock";
        if let Some(now) = self.now.get() {
            return Ok(now);
        }
        // Read after the write lock was taken, so that a later writer also has a later
        // time.
        let pinned = self.value::<Option<i64>>(PINNED, [])?.flatten();
        let now = pinned.unwrap_or_else(host_clock);
        self.now.set(Some(now));
        Ok(now)
    }

    pub(super) fn due(&self, when: When) -> Sql<i64> {
        Ok(match when {
            When::At(at) => at.timestamp_micros(),
            When::After(delay) => self.now()?.saturating_add(micros(delay)),
        })
    }
}

pub(super) fn host_clock() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    micros(since)
}

pub(super) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

pub(super) fn instant(micros: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(micros).unwrap_or_default()
}

/// Reads columns as domain types.
pub(super) trait Columns {
    fn uuid(&self, column: impl RowIndex + Copy) -> rusqlite::Result<Uuid>;
    fn job(&self, column: impl RowIndex + Copy) -> rusqlite::Result<JobId>;
    fn flow(&self, column: impl RowIndex + Copy) -> rusqlite::Result<Option<FlowId>>;
    fn worker(&self, column: impl RowIndex + Copy) -> rusqlite::Result<WorkerId>;
    fn time(&self, column: impl RowIndex + Copy) -> rusqlite::Result<DateTime<Utc>>;
    fn maybe_time(&self, column: impl RowIndex + Copy) -> rusqlite::Result<Option<DateTime<Utc>>>;
    fn timeout(&self, column: impl RowIndex + Copy) -> rusqlite::Result<Option<Duration>>;
    fn outcome(&self, column: impl RowIndex + Copy) -> rusqlite::Result<Outcome>;
    fn condition(&self, column: impl RowIndex + Copy) -> rusqlite::Result<Condition>;
    fn list(&self, column: impl RowIndex + Copy) -> rusqlite::Result<Vec<String>>;
}

impl Columns for Row<'_> {
    fn uuid(&self, column: impl RowIndex + Copy) -> rusqlite::Result<Uuid> {
        self.get(column).map(Uuid::from_bytes)
    }

    fn job(&self, column: impl RowIndex + Copy) -> rusqlite::Result<JobId> {
        self.uuid(column).map(JobId)
    }

    fn flow(&self, column: impl RowIndex + Copy) -> rusqlite::Result<Option<FlowId>> {
        Ok(self.get::<_, Option<[u8; 16]>>(column)?.map(|id| FlowId(Uuid::from_bytes(id))))
    }

    fn worker(&self, column: impl RowIndex + Copy) -> rusqlite::Result<WorkerId> {
        self.uuid(column).map(WorkerId)
    }

    fn time(&self, column: impl RowIndex + Copy) -> rusqlite::Result<DateTime<Utc>> {
        self.get(column).map(instant)
    }

    fn maybe_time(&self, column: impl RowIndex + Copy) -> rusqlite::Result<Option<DateTime<Utc>>> {
        Ok(self.get::<_, Option<i64>>(column)?.map(instant))
    }

    fn timeout(&self, column: impl RowIndex + Copy) -> rusqlite::Result<Option<Duration>> {
        let ms = self.get::<_, Option<i64>>(column)?;
        Ok(ms.and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis))
    }

    fn outcome(&self, column: impl RowIndex + Copy) -> rusqlite::Result<Outcome> {
        decoded(self.get_ref(column)?, Outcome::from_stored)
    }

    fn condition(&self, column: impl RowIndex + Copy) -> rusqlite::Result<Condition> {
        decoded(self.get_ref(column)?, Condition::from_stored)
    }

    fn list(&self, column: impl RowIndex + Copy) -> rusqlite::Result<Vec<String>> {
        match self.get_ref(column)? {
            ValueRef::Null => Ok(Vec::new()),
            text => decoded(text, |text| serde_json::from_str(text)),
        }
    }
}

/// Reads a row of a statement that runs for every job. The columns have the order of the fields, so none is looked up by its
/// name, which would take longer than reading it. Builds for tests compare the names.
macro_rules! in_order {
    ($row:ident, $type:ident { $($field:ident),+ $(,)? }) => {{
        let mut positions = 0..;
        let mut position_of = |field: &str| {
            let position = positions.next().unwrap_or(usize::MAX);
            debug_assert_eq!($row.as_ref().column_name(position), Ok(field));
            position
        };
        Ok($type { $($field: $row.get(position_of(stringify!($field)))?),+ })
    }};
}
pub(super) use in_order;

pub(super) fn decoded<T, E>(
    value: ValueRef<'_>,
    decode: impl FnOnce(&str) -> Result<T, E>,
) -> rusqlite::Result<T>
where
    E: std::error::Error + Send + Sync + 'static,
{
    decode(value.as_str()?).map_err(|error| rusqlite::types::FromSqlError::Other(Box::new(error)).into())
}

/// A list as it is stored: as JSON, or as null if it is empty.
pub(super) fn stored_list(list: &[String]) -> Sql<Option<String>> {
    if list.is_empty() { Ok(None) } else { json_list(list).map(Some) }
}

pub(super) fn json_list<T: serde::Serialize>(list: &[T]) -> Sql<String> {
    let json = serde_json::to_string(list);
    json.map_err(|error| Error::internal("a list cannot be encoded as JSON").with_source(error).into())
}

/// The result of database work.
pub(super) type Sql<T> = Result<T, Fault>;

/// Why database work failed. Separate from [`Error`], so that no driver type enters
/// the public API.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The driver's error.
    Driver(rusqlite::Error),
    /// One of our own errors.
    Ours(Error),
}

impl Fault {
    /// Whether the database refused this change, and may accept others: a constraint, a
    /// trigger or an unreadable value is the reason, not the file.
    pub(super) fn is_refusal(&self) -> bool {
        let Fault::Driver(error) = self else { return true };
        is_refusal(error)
    }
}

/// Whether the driver's error is a [refusal](Fault::is_refusal).
pub(super) fn is_refusal(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code().is_none_or(|code| {
        matches!(
            code,
            ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch | ErrorCode::TooBig | ErrorCode::Unknown
        )
    })
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        Fault::Driver(error)
    }
}

impl From<rusqlite::types::FromSqlError> for Fault {
    fn from(error: rusqlite::types::FromSqlError) -> Self {
        Fault::Driver(error.into())
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Fault::Ours(error)
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        let error = match fault {
            Fault::Driver(error) => error,
            Fault::Ours(error) => return error,
        };
        let message = error.to_string();
        let extended = error.sqlite_error().map(|error| error.extended_code);
        let translated = match error.sqlite_error_code() {
            // Only in the caller's transaction: our own begin with the lock.
            Some(ErrorCode::DatabaseBusy) if extended == Some(rusqlite::ffi::SQLITE_BUSY_SNAPSHOT) => {
                Error::unavailable(
                    "the transaction began with a read, and the database has changed since; \
                     begin it with `TransactionBehavior::Immediate` and try again",
                )
            }
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
                Error::unavailable("another process has locked the database for 5 s; try again")
            }
            Some(ErrorCode::ReadOnly) => Error::read_only(
                "the database file or its folder cannot be written; give this user write access to both",
            ),
            Some(ErrorCode::DiskFull) => {
                Error::unavailable("the disk that holds the database is full; free some space and try again")
            }
            Some(ErrorCode::CannotOpen | ErrorCode::SystemIoFailure | ErrorCode::OutOfMemory) => {
                Error::unavailable(format!("the database file cannot be used ({message}); try again"))
            }
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
                Error::internal(format!("the database file is damaged ({message}); restore it from a backup"))
            }
            _ if message.contains("no such table") => {
                Error::schema("the database has no queue tables; run `longshore migrate`")
            }
            _ if message.contains("no such column") || message.contains("has no column") => {
                Error::schema("the queue tables have another version; run `longshore migrate`")
            }
            _ => Error::internal(format!("the database refused a statement: {message}")),
        };
        translated.with_source(error)
    }
}
