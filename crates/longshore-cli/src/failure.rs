//! Why a command did not do what was asked: the message for people, the exit
//! code for programs. No password of a database URL passes through here.

use std::fmt;

use crate::secret::redact;

/// The exit codes, as the root help documents them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Code {
    /// Done.
    Done = 0,
    /// Something is wrong: a check found a problem, a migration is pending, or
    /// the command failed for a reason with no code of its own.
    Problem = 1,
    /// The command line, or a value in it, cannot be right.
    Usage = 2,
    /// No such job, schedule or kind.
    NotFound = 3,
    /// It exists, but its state forbids this.
    Conflict = 4,
    /// The database or the server did not answer, or takes no writes.
    Unavailable = 5,
    /// The tables are missing, too old or too new.
    Schema = 6,
    /// The server wants a token, or one that may do more.
    Denied = 7,
    /// The awaited job failed for good or was cancelled.
    EndedOtherwise = 8,
    /// The awaited job has not ended in time.
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

    /// The word for programs, as in the `error` field of the HTTP API.
    pub(crate) fn slug(self) -> &'static str {
        match self {
            Code::Done => "done",
            Code::Problem | Code::EndedOtherwise | Code::NotEnded => "internal",
            Code::Usage => "bad_request",
            Code::NotFound => "not_found",
            Code::Conflict => "conflict",
            Code::Unavailable | Code::Schema => "unavailable",
            Code::Denied => "forbidden",
        }
    }
}

/// A command that did not do what was asked.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: Code,
    message: String,
}

impl Failure {
    pub(crate) fn new(code: Code, message: impl fmt::Display) -> Self {
        Failure { code, message: redact(&message.to_string()) }
    }

    /// A value that cannot be right; the message names it and what would be.
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

/// What every command returns: how to exit.
pub(crate) type Outcome = Result<Code, Failure>;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn refused_input_is_a_usage_error() {
        let refused = longshore::NewJob::new("", &()).validate().unwrap_err();
        assert_eq!(Failure::from(refused).code, Code::Usage);
    }
}
