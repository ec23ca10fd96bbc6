//! The one error type. It owns what can go wrong for a caller and how that is reported. Expected
//! results (a lost lease, an existing job) are values, not errors.

use std::fmt;

use crate::job::{JobId, Status};

/// The result type of every fallible operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed. Nothing was written, unless the error
/// [is unavailable](Error::is_unavailable): then the reply may have been lost, and the caller may
/// repeat the call. Ids are chosen before the first try, so a repeated enqueue cannot create a
/// duplicate.
///
/// ```
/// use longshore::NewJob;
///
/// let refused = NewJob::new("", &()).validate().unwrap_err();
/// assert!(refused.is_invalid());
/// assert_eq!(refused.field(), Some("kind"));
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    kind: Kind,
    field: Option<String>,
    status: Option<Status>,
    /// Another job, because of which the operation was refused.
    other: Option<JobId>,
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Invalid,
    NotFound,
    Conflict,
    Unavailable,
    /// Unavailable, because the connection to the database failed. The same happens to any
    /// part of the operation.
    Unreachable,
    /// Unavailable, because another client's open transaction holds a lock. The message
    /// contains no internals.
    Locked,
    /// Unavailable, because too many operations wait already. Nothing was written, and the
    /// message contains no internals.
    Overloaded,
    ReadOnly,
    Schema,
    Internal,
}

impl Error {
    fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error(Box::new(Inner {
            kind,
            field: None,
            status: None,
            other: None,
            message: message.into(),
            source: None,
        }))
    }

    /// Input that can never be accepted; `field` is the part to change.
    pub(crate) fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = Error::new(Kind::Invalid, message);
        error.0.field = Some(field.into());
        error
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Error::new(Kind::NotFound, message)
    }

    pub(crate) fn conflict(message: impl Into<String>) -> Self {
        Error::new(Kind::Conflict, message)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Error::new(Kind::Unavailable, message)
    }

    #[cfg(feature = "postgres")]
    pub(crate) fn unreachable(message: impl Into<String>) -> Self {
        Error::new(Kind::Unreachable, message)
    }

    pub(crate) fn locked(message: impl Into<String>) -> Self {
        Error::new(Kind::Locked, message)
    }

    pub(crate) fn overloaded(message: impl Into<String>) -> Self {
        Error::new(Kind::Overloaded, message)
    }

    pub(crate) fn read_only(message: impl Into<String>) -> Self {
        Error::new(Kind::ReadOnly, message)
    }

    pub(crate) fn schema(message: impl Into<String>) -> Self {
        Error::new(Kind::Schema, message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Error::new(Kind::Internal, message)
    }

    pub(crate) fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Adds the job's status, if the operation was refused because of it.
    pub(crate) fn with_status(mut self, status: Status) -> Self {
        self.0.status = Some(status);
        self
    }

    /// Adds the job because of which the operation was refused.
    pub(crate) fn because_of(mut self, other: JobId) -> Self {
        self.0.other = Some(other);
        self
    }

    /// The job because of which the operation was refused. The message names it.
    #[cfg(feature = "api")]
    pub(crate) fn other_job(&self) -> Option<JobId> {
        self.0.other
    }

    /// The same error about item `i` of the list `list`, if it names a field.
    pub(crate) fn in_item(self, list: &str, i: usize) -> Self {
        match self.field() {
            Some(field) => Error::invalid(format!("{list}[{i}].{field}"), format!("{list}[{i}]: {self}")),
            None => self,
        }
    }

    /// The same error about a task of a flow, if it names a field.
    pub(crate) fn in_task(self, task: &str) -> Self {
        match self.field() {
            Some(field) => Error::invalid(field.to_owned(), format!("task `{task}`: {self}")),
            None => self,
        }
    }

    /// A copy of the error for another caller that shared the same statement.
    pub(crate) fn shared(&self) -> Self {
        let mut copy = Error::new(self.0.kind, self.to_string());
        copy.0.field = self.0.field.clone();
        copy.0.status = self.0.status;
        copy.0.other = self.0.other;
        copy
    }

    /// The input is invalid; [`field`](Error::field) names the part to change.
    pub fn is_invalid(&self) -> bool {
        self.0.kind == Kind::Invalid
    }

    /// The job, queue, worker or schedule does not exist.
    pub fn is_not_found(&self) -> bool {
        self.0.kind == Kind::NotFound
    }

    /// The object exists, but its state does not allow the operation.
    pub fn is_conflict(&self) -> bool {
        self.0.kind == Kind::Conflict
    }

    /// The database could not be reached or did not reply in time, another client's
    /// transaction holds a lock, or too many operations wait already; try again.
    pub fn is_unavailable(&self) -> bool {
        matches!(self.0.kind, Kind::Unavailable | Kind::Unreachable | Kind::Locked | Kind::Overloaded)
    }

    /// The connection failed, so parts of the operation would fail too.
    pub(crate) fn is_unreachable(&self) -> bool {
        self.0.kind == Kind::Unreachable
    }

    /// Another client's open transaction holds a key or a row that the operation needs.
    pub(crate) fn is_locked(&self) -> bool {
        self.0.kind == Kind::Locked
    }

    #[cfg(feature = "sqlite")]
    pub(crate) fn is_internal(&self) -> bool {
        self.0.kind == Kind::Internal
    }

    /// Too many operations wait already. Nothing was written.
    #[cfg(any(feature = "api", test))]
    pub(crate) fn is_overloaded(&self) -> bool {
        self.0.kind == Kind::Overloaded
    }

    /// The database accepts no writes (a standby, a read-only file).
    pub fn is_read_only(&self) -> bool {
        self.0.kind == Kind::ReadOnly
    }

    /// The tables are missing, too old or newer than this build.
    pub fn is_schema(&self) -> bool {
        self.0.kind == Kind::Schema
    }

    /// The name of the field to change, if the input is invalid.
    pub fn field(&self) -> Option<&str> {
        self.0.field.as_deref()
    }

    /// The status of the job when the operation was refused, if the refusal is a
    /// [conflict](Error::is_conflict) with it.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> longshore::Result<()> {
    /// use longshore::{Client, NewJob, Status};
    ///
    /// let client = Client::connect("sqlite::memory:").await?;
    /// client.migrate().await?;
    /// let job = client.enqueue(NewJob::new("greet", "Ada")).await?;
    /// client.cancel(job.id).await?;
    ///
    /// let refused = client.cancel(job.id).await.unwrap_err();
    /// assert!(refused.is_conflict());
    /// assert_eq!(refused.status(), Some(Status::Cancelled));
    /// # Ok(()) }
    /// # #[cfg(not(feature = "sqlite"))] fn main() {}
    /// ```
    pub fn status(&self) -> Option<Status> {
        self.0.status
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.0.kind, self.0.message)?;
        match &self.0.source {
            Some(source) => write!(f, " ({source})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}
