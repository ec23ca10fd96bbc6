//! A value that no message, log line or `Debug` shows.

use std::convert::Infallible;
use std::fmt;

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
