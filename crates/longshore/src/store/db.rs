//! The layer between procedures and engines: statements that both engines run, written once, with their
//! arguments and rows.
//!
//! A statement is written for Postgres. For SQLite, [`for_sqlite`] replaces the few words that differ, so a statement
//! uses nothing else that only Postgres has: no lateral joins, no changes in `with`, no arrays except in `= any(…)` and
//! `unnest(…)`. If a statement needs more, each engine has its own, and the procedure calls it as one of the
//! [`Moves`](super::moves::Moves).

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
#[cfg(feature = "sqlite")]
use std::sync::OnceLock;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::KeyWait;
use super::inspect::Pages;
use super::moves::Moves;
use crate::error::{Error, Result};
use crate::job::{FlowId, JobId, OperationId, WorkerId};

/// A statement that both engines run.
pub(crate) struct Statement {
    text: &'static str,
    #[cfg(feature = "sqlite")]
    for_sqlite: OnceLock<String>,
}

impl Statement {
    pub(crate) const fn new(text: &'static str) -> Self {
        Statement {
            text,
            #[cfg(feature = "sqlite")]
            for_sqlite: OnceLock::new(),
        }
    }

    #[cfg(feature = "postgres")]
    pub(super) fn for_postgres(&self) -> &'static str {
        self.text
    }

    #[cfg(feature = "sqlite")]
    pub(super) fn for_sqlite(&self) -> &str {
        self.for_sqlite.get_or_init(|| for_sqlite(self.text))
    }
}

/// A transaction, or a connection on which each statement is a transaction.
#[async_trait]
pub(crate) trait Db: Send {
    async fn rows(&mut self, sql: &'static Statement, args: &[Arg<'_>]) -> Sql<Vec<Row>>;

    /// Returns how many rows the statement changed.
    async fn execute(&mut self, sql: &'static Statement, args: &[Arg<'_>]) -> Sql<u64>;

    /// Waits until no other transaction holds the lock with this name, and holds it until this transaction
    /// ends.
    async fn lock(&mut self, name: &'static str) -> Sql<()>;

    /// As [`lock`](Db::lock), for each of these names, in sorted order, so that two transactions never wait
    /// for each other.
    async fn lock_each(&mut self, of: &'static str, names: &[String]) -> Sql<()>;

    /// How long a statement may wait for locks, as a value of the setting `lock_timeout`. A procedure whose
    /// statements are separate transactions passes it to those that
    /// [wait for clients](How::waiting_for_clients).
    fn lock_timeout(&self) -> String;

    /// Rolls the procedure back, even if it returns a result. Only for procedures in one transaction that
    /// found a locked row, so never on SQLite.
    fn undo(&mut self) -> Sql<()>;

    /// Returns the first row.
    async fn row(&mut self, sql: &'static Statement, args: &[Arg<'_>]) -> Sql<Option<Row>> {
        Ok(self.rows(sql, args).await?.into_iter().next())
    }

    /// Whether the statement returns a row.
    async fn has_row(&mut self, sql: &'static Statement, args: &[Arg<'_>]) -> Sql<bool> {
        Ok(!self.rows(sql, args).await?.is_empty())
    }
}

/// What a procedure runs on: statements that both engines run, moves of jobs between tables, and parts of lists.
pub(crate) trait Rows: Db + Moves + Pages {}
impl<R: Db + Moves + Pages> Rows for R {}

/// Runs procedures: owns transactions, connections, deadlines and retries.
#[async_trait]
pub(crate) trait Engine: Send + Sync {
    /// How many flows one step may lock. Other processes can follow the rest at the same time.
    const FLOWS_PER_STEP: u32;

    /// Whether the database refused this change and may accept others: a constraint, a trigger or a lock is the
    /// reason, not the server, the connection or the file.
    fn is_refusal(error: &Error) -> bool;

    async fn call<A, T>(&self, how: How, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static;
}

/// A procedure. It may run again with the same arguments, if it lost a race against another transaction.
pub(crate) type Work<A, T> =
    for<'c> fn(&'c mut (dyn Rows + 'c), &'c A) -> Pin<Box<dyn Future<Output = Sql<T>> + Send + 'c>>;

/// How a procedure runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    pub(super) expected: Expected,
    pub(super) atomicity: Atomicity,
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "nothing is locked on SQLite"))]
    pub(super) locks: Locks,
}

/// How long a procedure may take, which decides its connection and its deadline. SQLite only distinguishes
/// reads from writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    /// It reads few rows.
    QuickRead,
    /// It reads many rows for a page that somebody waits for.
    View,
    /// It is quick on a healthy database.
    Quick,
    /// As `Quick`, and it stops if its caller goes away. It must be harmless if it completes unnoticed.
    WhileAwaited,
    /// As `WhileAwaited`, and it only reads.
    ReadWhileAwaited,
    /// It may take long.
    Slow,
    /// It may take long, and it only reads.
    SlowRead,
    /// It reads all tables.
    AllTables,
}

impl Expected {
    #[cfg(feature = "sqlite")]
    pub(super) fn only_reads(self) -> bool {
        matches!(
            self,
            Expected::QuickRead
                | Expected::View
                | Expected::ReadWhileAwaited
                | Expected::SlowRead
                | Expected::AllTables
        )
    }
}

/// Whether all statements of a procedure run in one transaction. On SQLite, they always do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Atomicity {
    /// Each statement is a transaction.
    Single,
    Together,
    /// As `Together`. The statements only read, see one snapshot, and may take long.
    LongSnapshot,
    /// As `Together`. The statements find each of their rows through an index, whatever the planner expects.
    TogetherIndexed,
    /// As `Together`. The statements only read, see one snapshot, and find each of their rows through an
    /// index.
    OneMoment,
}

/// What happens if another client's open transaction has locked a row. On SQLite there is one writer, so none is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Locks {
    /// The procedure waits until its deadline.
    Wait,
    /// The procedure fails as locked after this time.
    WaitUpTo(Duration),
    /// The procedure waits for a moment. If that is not enough, it runs again on the connections for long
    /// waits or, with [`KeyWait::Skip`], fails as locked.
    WaitForClients(KeyWait),

    /// As `WaitUpTo` with a few milliseconds. If that is not enough, the procedure runs again on one of the
    /// few connections for long waits, and waits there for up to two seconds.
    WaitAside,
}

impl How {
    const fn new(expected: Expected) -> Self {
        How { expected, atomicity: Atomicity::Single, locks: Locks::Wait }
    }

    pub(crate) const READ: How = How::new(Expected::QuickRead);
    pub(crate) const VIEW: How = How::new(Expected::View);
    pub(crate) const QUICK: How = How::new(Expected::Quick);
    pub(crate) const WHILE_AWAITED: How = How::new(Expected::WhileAwaited);
    pub(crate) const READ_WHILE_AWAITED: How = How::new(Expected::ReadWhileAwaited);
    pub(crate) const SLOW: How = How::new(Expected::Slow);
    pub(crate) const SLOW_READ: How = How::new(Expected::SlowRead);
    pub(crate) const ALL_TABLES: How =
        How { atomicity: Atomicity::LongSnapshot, ..How::new(Expected::AllTables) };

    /// Stores all statements together or none.
    pub(crate) const fn together(self) -> Self {
        match self.atomicity {
            Atomicity::Single => How { atomicity: Atomicity::Together, ..self },
            // The other values include that.
            _ => self,
        }
    }

    /// Reads everything from one snapshot.
    pub(crate) const fn of_one_moment(self) -> Self {
        How { atomicity: Atomicity::OneMoment, ..self }
    }

    /// Stores all statements together or none, and fails as locked if one waits for longer than this.
    pub(crate) const fn waiting_up_to(self, max_wait: Duration) -> Self {
        How { locks: Locks::WaitUpTo(max_wait), ..self.together() }
    }

    /// Fails as locked if a client's open transaction has locked what it needs and does not end in time. Almost always
    /// nothing is locked, so the first try takes none of the few connections for long waits.
    pub(crate) const fn waiting_for_clients(self, wait: KeyWait) -> Self {
        How { locks: Locks::WaitForClients(wait), ..self }
    }

    /// Stores all statements together or none. Waits for locks on the connections for long waits.
    pub(crate) const fn waiting_aside(self) -> Self {
        How { locks: Locks::WaitAside, ..self.together() }
    }

    /// Stores all statements together or none. They find each of their rows through an index, whatever the planner
    /// expects.
    pub(crate) const fn indexed(self) -> Self {
        How { atomicity: Atomicity::TogetherIndexed, ..self }
    }
}

/// The result of a procedure.
pub(crate) type Sql<T> = std::result::Result<T, Fault>;

/// Why a procedure failed. The engine decides by it whether to try again.
#[derive(Debug)]
pub(crate) enum Fault {
    Ours(Error),
    #[cfg(feature = "postgres")]
    Postgres(super::postgres::Fault),
    #[cfg(feature = "sqlite")]
    Sqlite(super::sqlite::Fault),
}

impl Fault {
    /// Whether a lock was not free in time.
    pub(crate) fn is_lock_timeout(&self) -> bool {
        match self {
            #[cfg(feature = "postgres")]
            Fault::Postgres(fault) => fault.is_lock_timeout(),
            _ => false,
        }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Fault::Ours(error)
    }
}

/// An argument of a statement.
pub(crate) enum Arg<'a> {
    Bool(Option<bool>),
    Int(Option<i64>),
    Text(Option<&'a str>),
    Bytes(Option<&'a [u8]>),
    Id(Option<Uuid>),
    Time(Option<DateTime<Utc>>),
    /// A duration to add to a time.
    Span(Duration),
    Texts(Option<&'a [String]>),
    /// With nulls, for `unnest`.
    OptionalTexts(Vec<Option<&'a str>>),
    Ids(Option<Vec<Uuid>>),
    Times(Vec<DateTime<Utc>>),
    Ints(Vec<i64>),
    Hashes(&'a [[u8; 32]]),
}

macro_rules! arg_from {
    ($($type:ty => |$value:ident| $arg:expr),+ $(,)?) => {
        $(impl<'a> From<$type> for Arg<'a> {
            fn from($value: $type) -> Self {
                $arg
            }
        })+
    };
}
arg_from! {
    bool => |v| Arg::Bool(Some(v)),
    Option<bool> => |v| Arg::Bool(v),
    i16 => |v| Arg::Int(Some(v.into())),
    i32 => |v| Arg::Int(Some(v.into())),
    i64 => |v| Arg::Int(Some(v)),
    Option<i64> => |v| Arg::Int(v),
    u32 => |v| Arg::Int(Some(v.into())),
    Option<u32> => |v| Arg::Int(v.map(i64::from)),
    u64 => |v| Arg::Int(Some(i64::try_from(v).unwrap_or(i64::MAX))),
    Option<u64> => |v| Arg::Int(v.map(|v| i64::try_from(v).unwrap_or(i64::MAX))),
    &'a str => |v| Arg::Text(Some(v)),
    &'a String => |v| Arg::Text(Some(v)),
    Option<&'a str> => |v| Arg::Text(v),
    &'a Option<String> => |v| Arg::Text(v.as_deref()),
    &'a RawValue => |v| Arg::Text(Some(v.get())),
    &'a [u8; 32] => |v| Arg::Bytes(Some(v)),
    Uuid => |v| Arg::Id(Some(v)),
    Option<Uuid> => |v| Arg::Id(v),
    &'a [Uuid] => |v| Arg::Ids(Some(v.to_vec())),
    &'a Vec<Uuid> => |v| Arg::Ids(Some(v.clone())),
    Vec<Uuid> => |v| Arg::Ids(Some(v)),
    DateTime<Utc> => |v| Arg::Time(Some(v)),
    Option<DateTime<Utc>> => |v| Arg::Time(v),
    Duration => |v| Arg::Span(v),
    &'a [String] => |v| Arg::Texts(Some(v)),
    &'a Vec<String> => |v| Arg::Texts(Some(v)),
    &'a Option<Vec<String>> => |v| Arg::Texts(v.as_deref()),
    Vec<Option<&'a str>> => |v| Arg::OptionalTexts(v),
    Vec<&'a str> => |v| Arg::OptionalTexts(v.into_iter().map(Some).collect()),
    Vec<DateTime<Utc>> => |v| Arg::Times(v),
    Vec<i64> => |v| Arg::Ints(v),
    &'a [i64] => |v| Arg::Ints(v.to_vec()),
    Vec<i16> => |v| Arg::Ints(v.into_iter().map(i64::from).collect()),
    &'a [[u8; 32]] => |v| Arg::Hashes(v),
}

/// Converts a type of ids: one id, an optional id, and a list.
macro_rules! arg_from_ids {
    ($($id:ident),+) => {
        $(
            arg_from! {
                $id => |v| Arg::Id(Some(v.0)),
                Option<$id> => |v| Arg::Id(v.map(|id| id.0)),
                &'a [$id] => |v| Arg::Ids(Some(v.iter().map(|id| id.0).collect())),
                &'a Vec<$id> => |v| Arg::Ids(Some(v.iter().map(|id| id.0).collect())),
                Option<&'a [$id]> => |v| Arg::Ids(v.map(|ids| ids.iter().map(|id| id.0).collect())),
            }
            column! { $id { value => Uuid::of(value).map($id) } }
        )+
    };
}

/// The arguments of a statement, in order.
macro_rules! args {
    ($($arg:expr),* $(,)?) => { &[$($crate::store::db::Arg::from($arg)),*] };
}
pub(crate) use args;

/// A row. Each column is taken once, by its name.
pub(crate) struct Row {
    pub(super) names: Arc<[String]>,
    pub(super) values: Vec<Value>,
}

impl Row {
    pub(crate) fn take<T: Column>(&mut self, name: &str) -> Sql<T> {
        let column = self.names.iter().position(|known| known == name);
        let value = column.map(|column| std::mem::replace(&mut self.values[column], Value::Null));
        let value =
            value.ok_or_else(|| Error::internal(format!("a statement returns no column `{name}`")))?;
        // The value itself may be a secret.
        Ok(T::of(value).ok_or_else(|| {
            Error::internal(format!("the column `{name}` has a value of an unexpected type"))
        })?)
    }

    /// Takes a text and parses it.
    pub(crate) fn parse<T>(&mut self, name: &str, parse: impl FnOnce(&str) -> Result<T>) -> Sql<T> {
        Ok(parse(&self.take::<String>(name)?)?)
    }
}

/// The value of a column.
pub(crate) enum Value {
    Null,
    #[cfg(feature = "postgres")]
    Bool(bool),
    /// On SQLite also a truth value, or a time in microseconds.
    Int(i64),
    /// On SQLite also a list, as JSON.
    Text(String),
    /// On SQLite also an id.
    Bytes(Vec<u8>),
    #[cfg(feature = "postgres")]
    Id(Uuid),
    #[cfg(feature = "postgres")]
    Time(DateTime<Utc>),
    #[cfg(feature = "postgres")]
    Texts(Vec<String>),
    #[cfg(feature = "postgres")]
    Ids(Vec<Uuid>),
}

/// A type that a column can be read as.
pub(crate) trait Column: Sized {
    /// `None` for a value of another type.
    fn of(value: Value) -> Option<Self>;
}

macro_rules! column {
    ($($type:ty { $($(#[$attribute:meta])* $found:pat => $value:expr),+ $(,)? })+) => {
        $(impl Column for $type {
            fn of(value: Value) -> Option<Self> {
                match value {
                    $($(#[$attribute])* $found => $value,)+
                    #[allow(unreachable_patterns, reason = "a type may accept every value")]
                    _ => None,
                }
            }
        })+
    };
}
column! {
    bool {
        Value::Int(v) => Some(v != 0),
        #[cfg(feature = "postgres")] Value::Bool(v) => Some(v),
    }
    i64 { Value::Int(v) => Some(v) }
    i32 { Value::Int(v) => v.try_into().ok() }
    i16 { Value::Int(v) => v.try_into().ok() }
    u64 { Value::Int(v) => v.try_into().ok() }
    u32 { Value::Int(v) => v.try_into().ok() }
    u16 { Value::Int(v) => v.try_into().ok() }
    String { Value::Text(v) => Some(v) }
    [u8; 32] { Value::Bytes(v) => v.try_into().ok() }
    Uuid {
        Value::Bytes(v) => Uuid::from_slice(&v).ok(),
        #[cfg(feature = "postgres")] Value::Id(v) => Some(v),
    }
    DateTime<Utc> {
        Value::Int(v) => DateTime::from_timestamp_micros(v),
        #[cfg(feature = "postgres")] Value::Time(v) => Some(v),
    }
    Box<RawValue> { Value::Text(v) => RawValue::from_string(v).ok() }
    Vec<String> {
        Value::Text(v) => serde_json::from_str(&v).ok(),
        #[cfg(feature = "postgres")] Value::Texts(v) => Some(v),
    }
    // Without hyphens on SQLite, which reads ids back with `unhex`.
    Vec<JobId> {
        Value::Text(v) => serde_json::from_str::<Vec<Uuid>>(&v).ok().map(|ids| ids.into_iter().map(JobId).collect()),
        #[cfg(feature = "postgres")] Value::Ids(v) => Some(v.into_iter().map(JobId).collect()),
    }
}
arg_from_ids!(JobId, FlowId, OperationId, WorkerId);

impl<T: Column> Column for Option<T> {
    fn of(value: Value) -> Option<Self> {
        match value {
            Value::Null => Some(None),
            value => T::of(value).map(Some),
        }
    }
}

static NOW: Statement = Statement::new("select longshore.clock() as now");

/// The engine's time.
pub(crate) async fn now(db: &mut dyn Db) -> Sql<DateTime<Utc>> {
    one(db.row(&NOW, &[]).await?)?.take("now")
}

/// The row of a statement that always returns one.
pub(crate) fn one(row: Option<Row>) -> Sql<Row> {
    Ok(row.ok_or_else(|| Error::internal("a statement that always returns a row returned none"))?)
}

/// One column of all rows.
pub(crate) fn column<T: Column>(rows: Vec<Row>, name: &str) -> Sql<Vec<T>> {
    rows.into_iter().map(|mut row| row.take(name)).collect()
}

/// Translates a statement for SQLite. The engine's time becomes one more argument, after the others.
#[cfg(feature = "sqlite")]
pub(super) fn for_sqlite(text: &str) -> String {
    let time = format!("?{}", highest_argument(text) + 1);
    let text = text.replace("longshore.clock()", &time).replace("longshore.", "");
    let text = with_lists(&with_arrays(&with_subqueries(&without_lock_timeout(&text))));
    let text = without_locks(&without_casts(&text)).replace(" collate \"C\"", "");
    text.replace('$', "?")
}

#[cfg(feature = "sqlite")]
fn highest_argument(text: &str) -> u32 {
    let numbers = text.split('$').skip(1).filter_map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..end].parse().ok()
    });
    numbers.max().unwrap_or(0)
}

/// Replaces `= any(array(select …))`, with which Postgres evaluates the subquery once.
#[cfg(feature = "sqlite")]
fn with_subqueries(text: &str) -> String {
    const ARRAY: &str = "= any(array(";
    let mut text = text.to_owned();
    while let Some(start) = text.find(ARRAY) {
        let from = start + ARRAY.len();
        let end = from + end_of_parenthesis(&text[from..]);
        let subquery = format!("in ({})", &text[from..end]);
        text.replace_range(start..end + "))".len(), &subquery);
    }
    text
}

/// The position of the `)` that closes a parenthesis opened before the text.
#[cfg(feature = "sqlite")]
fn end_of_parenthesis(text: &str) -> usize {
    let mut open = 1;
    let end = text.find(|c| {
        open += match c {
            '(' => 1,
            ')' => -1,
            _ => 0,
        };
        open == 0
    });
    end.unwrap_or(text.len())
}

/// Replaces `= any($1::text[])` and `<> all($1::text[])`. A list is stored and bound as JSON.
#[cfg(feature = "sqlite")]
fn with_lists(text: &str) -> String {
    let mut text = text.to_owned();
    for (words, operator) in [("= any($", "in"), ("<> all($", "not in")] {
        while let Some(start) = text.find(words) {
            let from = start + words.len() - 1;
            let end = from + end_of_parenthesis(&text[from..]);
            let (list, item) = list_and_item(&text[from..end]);
            let values = format!("{operator} (select {item} from json_each({list}))");
            text.replace_range(start..=end, &values);
        }
    }
    text
}

/// Replaces `unnest($1::text[], $2::int8[]) as i(name, number)`.
#[cfg(feature = "sqlite")]
fn with_arrays(text: &str) -> String {
    const UNNEST: &str = "unnest(";
    let mut text = text.to_owned();
    while let Some(start) = text.find(UNNEST) {
        let from = start + UNNEST.len();
        let close = from + end_of_parenthesis(&text[from..]);
        let Some(open) = text[close..].find('(').map(|at| close + at) else { break };
        let end = open + 1 + end_of_parenthesis(&text[open + 1..]);
        let alias = text[close + 1..open].trim().trim_start_matches("as ").to_owned();
        let lists: Vec<_> = text[from..close].split(',').map(|array| list_and_item(array.trim())).collect();
        let columns: Vec<_> = text[open + 1..end].split(',').map(str::trim).collect();
        let items: Vec<String> = lists
            .iter()
            .zip(columns)
            .enumerate()
            .map(|(nth, ((list, item), column))| match nth {
                0 => format!("{item} as {column}"),
                // The first list numbers the rows.
                _ => format!("{} as {column}", item.replace("value", &format!("({list} ->> key)"))),
            })
            .collect();
        let first = lists.first().map_or("", |(list, _)| list);
        let table = format!("(select {} from json_each({first})) as {alias}", items.join(", "));
        text.replace_range(start..=end, &table);
    }
    text
}

/// Replaces the condition `set_config('lock_timeout', '2s', true) <> ''`.
#[cfg(feature = "sqlite")]
fn without_lock_timeout(text: &str) -> String {
    const SET: &str = "set_config('lock_timeout', ";
    const IS_SET: &str = ", true) <> ''";
    let mut text = text.to_owned();
    while let Some(start) = text.find(SET) {
        let Some(end) = text[start..].find(IS_SET) else { break };
        text.replace_range(start..start + end + IS_SET.len(), "true");
    }
    text
}

/// Leaves out locks of rows, such as `for update of r skip locked`.
#[cfg(feature = "sqlite")]
fn without_locks(text: &str) -> String {
    let mut text = text.to_owned();
    for lock in ["for no key update", "for key share", "for update"] {
        while let Some(start) = text.find(lock) {
            let rest = &text[start + lock.len()..];
            let of = rest.strip_prefix(" of ").map_or(0, |table| {
                " of ".len() + table.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(table.len())
            });
            text.replace_range(start..start + lock.len() + of, "");
        }
    }
    text.replace("skip locked", "")
}

/// Splits `$1::uuid[]`, or a subquery of it without a table, into the list and how an item of its JSON is read.
#[cfg(feature = "sqlite")]
fn list_and_item(array: &str) -> (&str, &'static str) {
    let array = array.strip_prefix("(select ").and_then(|array| array.strip_suffix(')')).unwrap_or(array);
    let array = array.strip_suffix(" where true").unwrap_or(array);
    match array.split_once("::") {
        Some((list, "uuid[]" | "bytea[]")) => (list, "unhex(value)"),
        Some((list, _)) => (list, "value"),
        None => (array, "value"),
    }
}

#[cfg(feature = "sqlite")]
fn without_casts(text: &str) -> String {
    let mut parts = text.split("::");
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let rest = part.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '_');
        kept += rest.strip_prefix("[]").unwrap_or(rest);
    }
    kept
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_locks_keeps_how_rows_are_found() {
        for how in [How::SLOW.indexed().waiting_aside(), How::SLOW.indexed().waiting_up_to(Duration::ZERO)] {
            assert_eq!(how.atomicity, Atomicity::TogetherIndexed);
        }
        assert_eq!(How::SLOW.waiting_aside().atomicity, Atomicity::Together);
    }

    #[test]
    fn the_time_is_the_argument_after_the_others() {
        let text =
            "update longshore.jobs set at = longshore.clock() where id = $2 and $10 > longshore.clock() + $1";
        assert_eq!(for_sqlite(text), "update jobs set at = ?11 where id = ?2 and ?10 > ?11 + ?1");
        assert_eq!(for_sqlite("select longshore.clock() as now"), "select ?1 as now");
    }

    #[test]
    fn casts_and_locks_are_left_out() {
        let text = "select a::text, $1::text[], b::int8 from longshore.t where c collate \"C\" > $2 for update skip locked";
        assert_eq!(for_sqlite(text).trim_end(), "select a, ?1, b from t where c > ?2");
        assert_eq!(for_sqlite("x for no key update"), "x ");
        assert_eq!(for_sqlite("(x for key share of r), y for update of t"), "(x ), y ");
        let limited = "where id = (select $1::uuid where set_config('lock_timeout', '2s', true) <> '')";
        assert_eq!(for_sqlite(limited), "where id = (select ?1 where true)");
    }

    #[test]
    fn lists_are_json() {
        assert_eq!(for_sqlite("a = any($1::text[])"), "a in (select value from json_each(?1))");
        assert_eq!(for_sqlite("a <> all($2::text[])"), "a not in (select value from json_each(?2))");
        assert_eq!(for_sqlite("(a = any($1::uuid[]))"), "(a in (select unhex(value) from json_each(?1)))");
        assert_eq!(for_sqlite("any = any($3::bytea[]);"), "any in (select unhex(value) from json_each(?3));");
    }

    #[test]
    fn arrays_are_tables() {
        let one = "select i.a from unnest($1::int8[]) as i(a) where true";
        assert_eq!(for_sqlite(one), "select i.a from (select value as a from json_each(?1)) as i where true");
        let two = "from unnest($1::text[], $3::uuid[]) as i(a, b)";
        let translated = "from (select value as a, unhex((?3 ->> key)) as b from json_each(?1)) as i";
        assert_eq!(for_sqlite(two), translated);
        let limited = "from unnest((select $1::text[] where set_config('lock_timeout', '2s', true) <> ''), (select $3::uuid[])) as i(a, b)";
        assert_eq!(for_sqlite(limited), translated);
        assert_eq!(
            for_sqlite("unnest(o.queues) as q(n)"),
            "(select value as n from json_each(o.queues)) as q"
        );
    }

    #[test]
    fn a_subquery_is_not_an_array() {
        let text = "where id = any(array(select id from longshore.t where f(x) limit $1)) and y";
        assert_eq!(for_sqlite(text), "where id in (select id from t where f(x) limit ?1) and y");
    }
}
