//! Why a command did not do what was asked: the message for people, the exit
//! code for programs. No password of a database URL passes through here.

use std::fmt;

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
        match error {
            _ if error.is_invalid() => Code::Usage,
            _ if error.is_not_found() => Code::NotFound,
            _ if error.is_conflict() => Code::Conflict,
            _ if error.is_unavailable() || error.is_read_only() => Code::Unavailable,
            _ if error.is_schema() => Code::Schema,
            _ => Code::Problem,
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

/// Replaces the password of every URL in a text.
pub(crate) fn redact(text: &str) -> String {
    const HIDDEN: &str = "***";
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        shown.push_str(before);
        let end =
            after.find(|c: char| c.is_whitespace() || matches!(c, '\'' | '"' | '`')).unwrap_or(after.len());
        let (url, tail) = after.split_at(end);
        // Up to the last `@`: a password that was not percent-encoded may hold
        // `@` and `/` itself, and showing too little is the safe mistake.
        match url.rfind('@').and_then(|at| Some((url[..at].find(':')?, at))) {
            Some((colon, at)) => {
                shown.push_str(&url[..=colon]);
                shown.push_str(HIDDEN);
                shown.push_str(&redact_query(&url[at..]));
            }
            None => shown.push_str(&redact_query(url)),
        }
        rest = tail;
    }
    shown.push_str(rest);
    shown
}

fn redact_query(url: &str) -> String {
    let Some(at) = url.find("password=") else { return url.to_owned() };
    let (before, secret) = url.split_at(at + "password=".len());
    let end = secret.find('&').unwrap_or(secret.len());
    format!("{before}***{}", &secret[end..])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn no_password_survives() {
        let cases = [
            ("postgres://ada:s3cret@db/jobs", "postgres://ada:***@db/jobs"),
            ("at 'postgres://ada:s3cret@db/jobs': no", "at 'postgres://ada:***@db/jobs': no"),
            ("postgres://ada:s3/c@ret@db/jobs", "postgres://ada:***@db/jobs"),
            ("postgres://db/jobs?user=a&password=s3cret&x=1", "postgres://db/jobs?user=a&password=***&x=1"),
            ("postgres://:s3cret@db and postgres://b:s3cret@c", "postgres://:***@db and postgres://b:***@c"),
        ];
        for (text, shown) in cases {
            assert_eq!(redact(text), shown);
        }
    }

    #[test]
    fn what_holds_no_password_stays() {
        for text in ["postgres://ada@db:5432/jobs", "sqlite:./jobs.db", "no URL: a@b", "://", ""] {
            assert_eq!(redact(text), text);
        }
    }

    #[test]
    fn refused_input_is_a_usage_error() {
        let refused = longshore::NewJob::new("", &()).validate().unwrap_err();
        assert_eq!(Failure::from(refused).code, Code::Usage);
    }
}
