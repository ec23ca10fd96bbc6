//! What one operation runs on: a connection, its statements with the schema's name
//! filled in, and the translation of driver errors into ours.

use std::borrow::Cow;
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection, PgConnection, SqlStr};

use super::Inner;
use crate::error::Error;
use crate::store::db::Atomicity;

/// If the connection dies without a reset, the server does not notice for hours, and the
/// transaction would keep its locks: a key, a schedule, or the row of retention. Our
/// transactions never wait between two statements, so the server ends one that does.
const BEGIN: &str = "begin; set local idle_in_transaction_session_timeout = '5s'";

/// As [`BEGIN`], for a transaction in which the user's code runs. It may wait for something else
/// between two statements, but not for long: the lease is locked meanwhile.
#[cfg(feature = "worker")]
const BEGIN_STEP: &str = "begin; set local idle_in_transaction_session_timeout = '60s'";

/// For reads of a page. The server stops a statement that takes longer, because nobody waits for it any more.
const BEGIN_VIEW: &str = "begin read only;
     set local idle_in_transaction_session_timeout = '5s';
     set local statement_timeout = '10s'";

/// One snapshot for several statements. They read the first few rows of an index. Without
/// statistics, as on a new table, the planner would rather read all rows of a queue and sort
/// them, so it has to use the index.
const BEGIN_SNAPSHOT: &str = "begin isolation level repeatable read, read only;
     set local idle_in_transaction_session_timeout = '5s';
     set local statement_timeout = '10s';
     set local enable_bitmapscan = off;
     set local enable_seqscan = off";

/// One snapshot for statements that read all tables.
const BEGIN_LONG_SNAPSHOT: &str = "begin isolation level repeatable read, read only;
     set local idle_in_transaction_session_timeout = '5s'";

/// For statements that find each of their rows through an index. The planner would read the whole table if it
/// is out of date about it: it does not count dead rows, which become many while a snapshot is held, and it
/// may have analyzed the table when it was empty. With other plans turned off, its estimates are huge, so the
/// compiler (`jit`) is turned off too.
const BEGIN_INDEXED: &str = "begin;
     set local idle_in_transaction_session_timeout = '5s';
     set local enable_bitmapscan = off;
     set local enable_seqscan = off;
     set local jit = off";

/// A connection for one operation. Each statement is its own transaction,
/// unless the operation [begins](Tx::begin) one or runs in the caller's.
pub(super) struct Tx<'c> {
    pub(super) store: &'c Inner,
    pub(super) connection: &'c mut PgConnection,
    /// How long a statement that is its own transaction may wait for locks, if the operation limits it.
    pub(super) max_lock_wait: Option<Duration>,
    /// Whether to roll back the transaction of the procedure, although it did not fail.
    pub(super) is_undone: bool,
}

impl<'c> Tx<'c> {
    pub(super) fn new(store: &'c Inner, connection: &'c mut PgConnection) -> Self {
        Tx { store, connection, max_lock_wait: None, is_undone: false }
    }

    /// A statement with the name of the schema in use.
    pub(super) fn sql(&self, text: &'static str) -> SqlStr {
        self.store.schema.sql(text)
    }

    /// The same for a statement that is built at run time.
    pub(super) fn fill(&self, text: &str) -> String {
        self.store.schema.fill(text)
    }

    /// Makes statements of the open transaction fail if they wait for a lock for longer.
    pub(super) async fn limit_lock_waits(&mut self, max_wait: Duration) -> Sql<()> {
        sqlx::query("select set_config('lock_timeout', $1, true)")
            .bind(lock_timeout(max_wait))
            .execute(&mut *self.connection)
            .await?;
        Ok(())
    }

    pub(super) async fn begin(&mut self) -> Sql<Transaction<'_>> {
        self.begin_unless_begun(BEGIN).await
    }

    /// Begins a transaction for statements that find each of their rows through an index.
    pub(super) async fn begin_indexed(&mut self) -> Sql<Transaction<'_>> {
        self.begin_unless_begun(BEGIN_INDEXED).await
    }

    /// Begins the transaction of a procedure. If there is a limit, a statement that waits longer for a lock
    /// fails.
    pub(super) async fn begin_as(
        &mut self,
        atomicity: Atomicity,
        max_lock_wait: Option<Duration>,
    ) -> Sql<Transaction<'_>> {
        let begin = match atomicity {
            Atomicity::Single | Atomicity::Together => BEGIN,
            Atomicity::TogetherIndexed => BEGIN_INDEXED,
            Atomicity::OneMoment => BEGIN_SNAPSHOT,
            Atomicity::LongSnapshot => BEGIN_LONG_SNAPSHOT,
        };
        let Some(max_wait) = max_lock_wait else { return self.begin_unless_begun(begin).await };
        let limited = format!("{begin}; set local lock_timeout = '{}'", lock_timeout(max_wait));
        if !self.connection.is_in_transaction() {
            return Ok(Transaction {
                store: self.store,
                inner: self.connection.begin_with(AssertSqlSafe(limited)).await?,
            });
        }
        let mut transaction = self.begin_unless_begun(begin).await?;
        transaction.tx().limit_lock_waits(max_wait).await?;
        Ok(transaction)
    }

    /// Begins a transaction. Until it ends, no other one [locks](crate::store::db::Db::lock_each) these names. If this
    /// fails, [roll back](Tx::roll_back_begin).
    pub(super) async fn begin_sharing(&mut self, of: &'static str, names: &[String]) -> Sql<Transaction<'_>> {
        if names.is_empty() {
            return self.begin().await;
        }
        // A statement without parameters may follow another one, in one round trip. It is a statement of its own: the
        // next one has a newer snapshot.
        let keys = names.iter().map(|name| self.fill(&format!("longshore.{of}:")) + name);
        let keys: Vec<String> = keys.map(|key| format!("'{}'", hex(key.as_bytes()))).collect();
        let keys = keys.join(", ");
        let begin = format!(
            "{BEGIN};
             select count(pg_advisory_xact_lock_shared(hashtextextended(key, 0)))
               from (select convert_from(decode(hex, 'hex'), 'UTF8') as key
                       from unnest(array[{keys}]) as k(hex)
                      order by key) as sorted"
        );
        let inner = self.connection.begin_with(AssertSqlSafe(begin)).await?;
        Ok(Transaction { store: self.store, inner })
    }

    /// Rolls back a transaction that failed while it began. The driver does not know that it is open.
    pub(super) async fn roll_back_begin(&mut self) {
        if let Err(error) = sqlx::raw_sql("rollback").execute(&mut *self.connection).await {
            tracing::debug!(%error, "could not roll back");
        }
    }

    async fn begin_unless_begun(&mut self, begin: &'static str) -> Sql<Transaction<'_>> {
        let inner = if self.connection.is_in_transaction() {
            self.connection.begin().await?
        } else {
            self.connection.begin_with(begin).await?
        };
        Ok(Transaction { store: self.store, inner })
    }

    /// Begins a transaction in which the user's code runs.
    #[cfg(feature = "worker")]
    pub(super) async fn begin_step(self) -> Sql<Transaction<'c>> {
        Ok(Transaction { store: self.store, inner: self.connection.begin_with(BEGIN_STEP).await? })
    }

    /// Begins a read-only transaction whose statements the server stops when they take too long.
    pub(super) async fn begin_view(&mut self) -> Sql<Transaction<'_>> {
        self.begin_unless_begun(BEGIN_VIEW).await
    }

    /// Begins a read-only transaction whose statements all see the same rows.
    pub(super) async fn begin_snapshot(&mut self) -> Sql<Transaction<'_>> {
        Ok(Transaction { store: self.store, inner: self.connection.begin_with(BEGIN_SNAPSHOT).await? })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A time as a value of the setting `lock_timeout`.
pub(super) fn lock_timeout(max_wait: Duration) -> String {
    format!("{}ms", max_wait.as_millis().max(1))
}

/// A transaction. It rolls back unless it is committed.
pub(super) struct Transaction<'c> {
    store: &'c Inner,
    inner: sqlx::Transaction<'c, sqlx::Postgres>,
}

impl Transaction<'_> {
    pub(super) fn tx(&mut self) -> Tx<'_> {
        Tx::new(self.store, &mut self.inner)
    }

    pub(super) async fn commit(self) -> Sql<()> {
        Ok(self.inner.commit().await?)
    }

    pub(super) async fn rollback(self) -> Sql<()> {
        Ok(self.inner.rollback().await?)
    }
}

pub(super) type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>;

/// The result of database work.
pub(super) type Sql<T> = std::result::Result<T, Fault>;

/// Why database work failed. Separate from [`Error`], so that no driver type enters
/// the public API.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The driver's error.
    Driver(sqlx::Error),
    /// One of our own errors.
    Ours(Error),
    /// One of our own errors, after the operation lost a race several times in a row.
    LostRace(Error),
    /// The database did not reply in this time. The connection is in the middle of
    /// a reply and cannot be used again.
    Timeout(Duration),
}

impl Fault {
    /// Whether a retry may succeed, because this try lost a race.
    pub(super) fn is_lost_race(&self) -> bool {
        // 23505: two callers inserted the same key at the same time; the next try
        // finds the other caller's job.
        matches!(self, Fault::LostRace(_))
            || matches!(self.code().as_deref(), Some("40001" | "40P01" | "23505"))
    }

    pub(super) fn is_duplicate(&self) -> bool {
        self.code().as_deref() == Some("23505")
    }

    /// Whether a claim found a row that cannot be claimed: a job that is already running, or
    /// one that has no request.
    pub(super) fn is_unsound_row(&self) -> bool {
        self.is_duplicate() || self.code().as_deref() == Some("22P02")
    }

    pub(in crate::store) fn is_lock_timeout(&self) -> bool {
        self.code().as_deref() == Some("55P03")
    }

    /// Whether the database refused this change, and may accept others: a constraint, a
    /// trigger or a lock is the reason, not the server or the connection.
    pub(super) fn is_refusal(&self) -> bool {
        self.code().is_some_and(|code| is_refusal(&code))
    }

    /// Whether the connection is broken or of no more use, and probably the pool's others
    /// too.
    pub(super) fn is_broken_connection(&self) -> bool {
        match self {
            Fault::Driver(sqlx::Error::Database(_)) => {
                // The server shuts down, crashed or restarts, or ended an idle transaction.
                self.was_refused_by_a_standby()
                    || matches!(self.code().as_deref(), Some("57P01" | "57P02" | "57P03" | "25P03"))
            }
            Fault::Driver(_) | Fault::Timeout(_) => true,
            Fault::Ours(_) | Fault::LostRace(_) => false,
        }
    }

    /// Whether the server accepts no writes: after a failover, an open connection may end
    /// at a standby. The statement had no effect.
    pub(super) fn was_refused_by_a_standby(&self) -> bool {
        self.code().as_deref() == Some("25006")
    }

    /// Whether a prepared statement was not on the server connection where it was expected, or
    /// another one was. A pooler moved the client to another server connection.
    pub(super) fn is_mixed_up_statement(&self) -> bool {
        matches!(self.code().as_deref(), Some("42P05" | "26000" | "08P01"))
            || matches!(self, Fault::Driver(sqlx::Error::ColumnDecode { .. } | sqlx::Error::RowNotFound))
    }

    /// Whether a pooler refused a transaction, because each statement may run on another
    /// server connection.
    pub(super) fn is_statement_pooling(&self) -> bool {
        matches!(self, Fault::Driver(sqlx::Error::Database(error)) if error.message().contains(STATEMENT_POOLING))
    }

    /// Whether the server may be frozen or cut off, as opposed to stopped.
    pub(super) fn is_timeout(&self) -> bool {
        matches!(self, Fault::Timeout(_))
    }

    pub(super) fn code(&self) -> Option<Cow<'_, str>> {
        match self {
            Fault::Driver(error) => code(error),
            _ => None,
        }
    }
}

/// The code of an error that the server reported.
pub(super) fn code(error: &sqlx::Error) -> Option<Cow<'_, str>> {
    error.as_database_error().and_then(|error| error.code())
}

/// Whether an error with this code is a [refusal](Fault::is_refusal).
pub(super) fn is_refusal(code: &str) -> bool {
    !["08", "25", "53", "57P", "58"].iter().any(|outage| code.starts_with(outage))
}

impl From<sqlx::Error> for Fault {
    fn from(error: sqlx::Error) -> Self {
        Fault::Driver(error)
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Fault::Ours(error)
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Driver(error) => translate(error),
            Fault::Ours(error) | Fault::LostRace(error) => error,
            Fault::Timeout(deadline) => {
                Error::unreachable(format!("the database did not reply within {deadline:?}"))
            }
        }
    }
}

/// The message for a pooler that does not keep a client's prepared statements.
pub(super) const MIXED_UP_STATEMENTS: &str = "a connection pooler mixes up the prepared statements of its clients: PgBouncer in transaction mode that does \
     not track them. Set `pool_mode = session`, or use PgBouncer 1.21 or newer with `max_prepared_statements` above 0, \
     or connect to Postgres directly";
/// What PgBouncer calls its mode that allows no transactions.
const STATEMENT_POOLING: &str = "statement pooling mode";
/// What PgBouncer replies to a parameter of the URL that it does not know.
const UNSUPPORTED_PARAMETER: &str = "unsupported startup parameter";

/// Turns a driver error into one of ours. Never repeats the URL.
pub(super) fn translate(error: sqlx::Error) -> Error {
    let translated = match &error {
        sqlx::Error::Database(database) => {
            let message = database.message();
            match database.code().as_deref().unwrap_or_default() {
                _ if message.contains(UNSUPPORTED_PARAMETER) => Error::unavailable(format!(
                    "the connection pooler refuses a parameter of the database URL ({message}); remove it from the \
                     URL, or add it to `ignore_startup_parameters` in pgbouncer.ini"
                )),
                _ if message.contains(STATEMENT_POOLING) => Error::unavailable(
                    "the connection pooler allows no transactions: PgBouncer in statement mode; set `pool_mode = session`",
                ),
                "42P05" | "26000" => Error::unavailable(MIXED_UP_STATEMENTS),
                "42P01" | "3F000" | "42883" | "42703" | "42704" => Error::schema(format!(
                    "the queue's tables are missing or too old ({message}); run `longshore migrate`"
                )),
                "25006" => Error::read_only(
                    "the database accepts no writes: it is a standby or set to read-only; connect to the primary",
                ),
                "55P03" => Error::locked(
                    "another client's open transaction holds a key or a row that this operation needs, and did not \
                     end in time; end that transaction, or try again later",
                ),
                "22021" => Error::invalid(
                    "text",
                    "a text contains a NUL character, which Postgres cannot store; remove it",
                ),
                "42501" => Error::unavailable(format!(
                    "the database user lacks a privilege: {message}; grant it, or connect as the owner of the queue's \
                     schema"
                )),
                "57014" => Error::unavailable(format!(
                    "the database stopped a statement that took too long ({message}); it is overloaded, or too much \
                     was to be read; try again, or ask for less"
                )),
                "3D000" => Error::unavailable(format!(
                    "{message} on this server; create it, or correct the name in the database URL"
                )),
                "28P01" | "28000" => Error::unavailable(format!("the database refused access: {message}")),
                code if ["08", "25P03", "53", "57P"].iter().any(|class| code.starts_with(class)) => {
                    Error::unreachable(format!("the database is not available: {message}"))
                }
                code if ["40", "55", "57", "58"].iter().any(|class| code.starts_with(class)) => {
                    Error::unavailable(format!("the database is not available: {message}"))
                }
                code => Error::internal(format!("the database refused a statement ({code}): {message}")),
            }
        }
        sqlx::Error::Tls(reason) if reason.to_string().contains("without TLS support") => Error::unreachable(
            "the `sslmode` of the database URL requires TLS, and this program was built without it; enable the \
             feature `tls` of the crate `longshore`, or set sslmode=disable if the network is trusted",
        ),
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::Tls(_) => {
            Error::unreachable(format!("the database cannot be reached: {error}"))
        }
        sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => {
            Error::unreachable(format!("the connection to the database broke: {error}"))
        }
        _ => Error::internal(format!("unexpected reply from the database: {error}")),
    };
    translated.with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_tls_names_the_feature_that_adds_it() {
        // The text of the driver.
        let reason = "TLS upgrade required by connect options but SQLx was built without TLS support enabled";
        let error = translate(sqlx::Error::Tls(reason.into())).to_string();
        assert!(error.contains("`sslmode`") && error.contains("feature `tls`"), "{error}");
        let refused = translate(sqlx::Error::Tls("server does not support TLS".into())).to_string();
        assert!(refused.contains("server does not support TLS"), "{refused}");
        assert!(!refused.contains("feature `tls`"), "{refused}");
    }

    #[cfg(not(feature = "tls"))]
    #[tokio::test]
    async fn the_driver_reports_that_it_has_no_tls_in_the_expected_words() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let options: sqlx::postgres::PgConnectOptions =
            format!("postgres://ada@127.0.0.1:{port}/jobs?sslmode=require").parse().unwrap();
        let error = sqlx::ConnectOptions::connect(&options).await.unwrap_err();
        assert!(translate(error).to_string().contains("feature `tls`"));
    }
}
