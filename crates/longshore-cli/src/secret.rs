//! A value that no message, log line or `Debug` shows.

use std::convert::Infallible;
use std::fmt;

use crate::failure::redact;

/// A password, a key, or a URL that holds one.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(String);

impl Secret {
    /// Takes any text: a parser that refuses would have clap repeat the value in
    /// its message. Whoever uses the secret says what is wrong with it.
    pub(crate) fn read(text: &str) -> Result<Self, Infallible> {
        Ok(Secret(text.trim().to_owned()))
    }

    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// A secret as it may be shown: a URL without its password, of anything else
/// nothing. An SQLite file has no password.
pub(crate) fn mask(text: &str) -> String {
    match text {
        _ if text.contains("://") => redact(text),
        _ if text.is_empty() || text.starts_with("sqlite:") => text.to_owned(),
        _ => "***".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_url_only_the_password_is_hidden_and_of_the_rest_everything() {
        for (text, shown) in [
            ("postgres://ada:s3cret@db/jobs", "postgres://ada:***@db/jobs"),
            ("postgres://ada@db/jobs", "postgres://ada@db/jobs"),
            ("sqlite:./jobs.db", "sqlite:./jobs.db"),
            ("whsec_s3cret", "***"),
            ("postgres:ada:s3cret@db", "***"),
            ("", ""),
        ] {
            assert_eq!(mask(text), shown);
        }
    }
}
