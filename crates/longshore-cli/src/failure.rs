//! The error of a failed command: a message for people and an exit code for programs.
//! Passwords in URLs are removed from every message.

use std::fmt;

use crate::secret::redact;

/// The exit codes. The help of the root command documents them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Code {
    /// Done.
    Done = 0,
    /// Something is wrong: a check found a problem, a migration is pending, or
    /// the command failed for a reason that no other code covers.
    Problem = 1,
    /// The command line, or a value in it, is invalid.
    Usage = 2,
    /// No such job, schedule or kind.
    NotFound = 3,
    /// The job exists, but its state does not allow this.
    Conflict = 4,
    /// The database or the server did not respond, or the database accepts no writes.
    Unavailable = 5,
    /// The tables are missing, too old or too new.
    Schema = 6,
    /// The server requires a token, or one with another scope.
    Denied = 7,
    /// The awaited job failed permanently or was cancelled.
    EndedWithoutSuccess = 8,
    /// The awaited job did not end in time.
    NotEnded = 9,
}

impl Code {
    fn of(error: &longshore::Error) -> Self {
        if error.is_invalid() {
            Code::Usage
        } else if error.is_not_found() {
            Code::NotFound
        } else if error.is_conflict() {
            Code::Conflict
        } else if error.is_unavailable() || error.is_read_only() {
            Code::Unavailable
        } else if error.is_schema() {
            Code::Schema
        } else {
            Code::Problem
        }
    }

    /// The error code for programs, as in the `error` field of the HTTP API.
    pub(crate) fn slug(self) -> &'static str {
        match self {
            Code::Done => "done",
            Code::Problem | Code::EndedWithoutSuccess | Code::NotEnded => "internal",
            Code::Usage => "bad_request",
            Code::NotFound => "not_found",
            Code::Conflict => "conflict",
            Code::Unavailable | Code::Schema => "unavailable",
            Code::Denied => "forbidden",
        }
    }
}

/// Why a command failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: Code,
    message: String,
}

impl Failure {
    pub(crate) fn new(code: Code, message: impl fmt::Display) -> Self {
        Failure { code, message: redact(&message.to_string()) }
    }

    /// An invalid value. The message names it and says what is valid.
    pub(crate) fn usage(message: impl fmt::Display) -> Self {
        Failure::new(Code::Usage, message)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<&longshore::Error> for Failure {
    fn from(error: &longshore::Error) -> Self {
        Failure::new(Code::of(error), error)
    }
}

impl From<longshore::Error> for Failure {
    fn from(error: longshore::Error) -> Self {
        Failure::from(&error)
    }
}

/// The result of a command: the exit code, or why it failed.
pub(crate) type Outcome = Result<Code, Failure>;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn invalid_input_is_a_usage_error() {
        let error = longshore::NewJob::new("", &()).validate().unwrap_err();
        assert_eq!(Failure::from(error).code, Code::Usage);
    }
}
