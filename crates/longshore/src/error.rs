//! The one error type. Owns what can go wrong for a caller and how it is told;
//! expected results (a lost lease, an existing job) are values, not errors.

use std::fmt;

/// What every fallible operation returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation did not happen. Nothing was written unless the error
/// [is unavailable](Error::is_unavailable): then the answer was lost, and the
/// same call may be made again (ids are chosen before the first try, so a
/// repeated enqueue cannot double).
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
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Invalid,
    NotFound,
    Conflict,
    Unavailable,
    ReadOnly,
    Schema,
    Internal,
}

impl Error {
    fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error(Box::new(Inner { kind, field: None, message: message.into(), source: None }))
    }

    /// Input that can never be accepted as it is; `field` is what to change.
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

    /// The same refusal for another caller who shared the statement.
    pub(crate) fn shared(&self) -> Self {
        let mut copy = Error::new(self.0.kind, self.to_string());
        copy.0.field = self.0.field.clone();
        copy
    }

    /// The input is wrong; [`field`](Error::field) says which part of it.
    pub fn is_invalid(&self) -> bool {
        self.0.kind == Kind::Invalid
    }

    /// No such job, queue, worker or schedule.
    pub fn is_not_found(&self) -> bool {
        self.0.kind == Kind::NotFound
    }

    /// The thing exists but is in a state that forbids the operation.
    pub fn is_conflict(&self) -> bool {
        self.0.kind == Kind::Conflict
    }

    /// The database did not answer, or not in time; try again.
    pub fn is_unavailable(&self) -> bool {
        self.0.kind == Kind::Unavailable
    }

    /// The database accepts no writes (a standby, a read-only file).
    pub fn is_read_only(&self) -> bool {
        self.0.kind == Kind::ReadOnly
    }

    /// The tables are missing, too old or newer than this build.
    pub fn is_schema(&self) -> bool {
        self.0.kind == Kind::Schema
    }

    /// The name of the field to change, when the input was wrong.
    pub fn field(&self) -> Option<&str> {
        self.0.field.as_deref()
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
