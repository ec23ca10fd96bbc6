//! Which failures are the same. Two failures belong to one group if their kinds are equal and their errors differ only
//! in what differs from job to job: numbers, ids, quoted text, addresses and paths.
//!
//! Pure: a fingerprint depends on nothing but the kind and the error, and stays the same in later versions, because
//! it is stored.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The fingerprint of a failure: a hash of the kind and of the error without what differs from job to job. Written as 16
/// hexadecimal digits.
///
/// ```
/// use longshore::Fingerprint;
///
/// let one = Fingerprint::of("mail", "order 17: timeout after 30.1s");
/// assert_eq!(one, Fingerprint::of("mail", "order 18: timeout after 29.9s"));
/// assert_ne!(one, Fingerprint::of("mail", "order 17: refused"));
/// assert_eq!(one.to_string().parse::<Fingerprint>()?, one);
/// # Ok::<(), longshore::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Fingerprint(pub(crate) i64);

impl Fingerprint {
    /// The fingerprint of a failure of this kind with this error.
    pub fn of(kind: &str, error: &str) -> Self {
        let mut hash = Fnv::default();
        hash.add(kind.as_bytes());
        hash.add(&[0]);
        hash.add(normalise(error).as_bytes());
        Fingerprint(hash.0 as i64)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let is_hex = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let parsed = u64::from_str_radix(text, 16).ok().filter(|_| is_hex);
        parsed.map(|hash| Fingerprint(hash as i64)).ok_or_else(|| {
            Error::invalid(
                "failure",
                "failure: is not a fingerprint; use the 16 hexadecimal digits that `GET /failures` returns",
            )
        })
    }
}

impl From<Fingerprint> for String {
    fn from(fingerprint: Fingerprint) -> String {
        fingerprint.to_string()
    }
}

impl TryFrom<String> for Fingerprint {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

/// FNV-1a with 64 bits: short, and the same on every platform and in every version.
pub(crate) struct Fnv(pub(crate) u64);

impl Default for Fnv {
    fn default() -> Self {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

/// Only this much of a normalised error counts: the rest is detail.
const MAX_NORMALISED: usize = 300;
/// Only this much of a line is read.
const MAX_READ: usize = 16 * 1024;
/// The first line of a Python traceback, which says nothing about the error. The last line does.
const TRACEBACK: &str = "Traceback (most recent call last)";

/// The line that says what went wrong, without what differs from job to job.
fn normalise(error: &str) -> String {
    let mut lines = error.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or_default();
    let line = if first.starts_with(TRACEBACK) { lines.next_back().unwrap_or(first) } else { first };
    let line = &line[..line.floor_char_boundary(MAX_READ)];
    let mut normal = String::with_capacity(line.len().min(2 * MAX_NORMALISED));
    let mut rest = line;
    // Cut only what is normalised: a longer number must not move the end.
    while let Some(first) = rest.chars().next().filter(|_| normal.len() <= MAX_NORMALISED) {
        let end = match first {
            '"' | '`' | '\'' => quoted(rest, &normal),
            _ => None,
        };
        if let Some(end) = end {
            normal.push('"');
            rest = &rest[end..];
        } else if first.is_whitespace() {
            if !normal.ends_with(' ') {
                normal.push(' ');
            }
            rest = &rest[first.len_utf8()..];
        } else {
            let is_end =
                |c: char| c.is_whitespace() || matches!(c, '"' | '`' | ',' | ';' | '(' | ')' | '[' | ']');
            let end = rest.char_indices().skip(1).find(|(_, c)| is_end(*c)).map_or(rest.len(), |(at, _)| at);
            add_word(&mut normal, &rest[..end]);
            rest = &rest[end..];
        }
    }
    normal.truncate(normal.floor_char_boundary(MAX_NORMALISED));
    normal
}

/// Where the quoted text at the beginning ends. An apostrophe inside a word is not a quotation mark.
fn quoted(text: &str, before: &str) -> Option<usize> {
    let mark = text.chars().next()?;
    if mark == '\'' && before.ends_with(char::is_alphanumeric) {
        return None;
    }
    let end = text[1..].find(mark)? + 2;
    let is_apostrophe = mark == '\'' && text[end..].starts_with(char::is_alphanumeric);
    (!is_apostrophe).then_some(end)
}

fn add_word(normal: &mut String, word: &str) {
    let trimmed = word.trim_end_matches(['.', ':', '!', '?']);
    if let Some((scheme, rest)) = trimmed.split_once("://") {
        // The host says which service failed.
        let host = rest.split(['/', '?', '#', ':']).next().unwrap_or_default();
        normal.extend([scheme, "://", host]);
    } else if trimmed.contains('@') && trimmed.contains('.') {
        normal.push('@');
    } else if trimmed.matches(['/', '\\']).count() > 1 {
        normal.push('/');
    } else {
        for part in trimmed.split_inclusive([':', '=', '/', '\\', '<', '>', '{', '}', '|', '#']) {
            let name = part.trim_end_matches([':', '=', '/', '\\', '<', '>', '{', '}', '|', '#']);
            add_name(normal, name);
            normal.push_str(&part[name.len()..]);
        }
    }
    normal.push_str(&word[trimmed.len()..]);
}

/// A part of a word without separators.
fn add_name(normal: &mut String, name: &str) {
    if is_code(name) || is_status(name, normal) {
        normal.push_str(name);
    } else if is_id(name) {
        normal.push('#');
    } else {
        let mut was_digit = false;
        for c in name.chars() {
            // `1.5` and `1` are both one number.
            let is_digit = c.is_ascii_digit() || (was_digit && c == '.');
            match (is_digit, was_digit) {
                (true, true) => {}
                (true, false) => normal.push('#'),
                (false, _) => normal.push(c),
            }
            was_digit = is_digit;
        }
    }
}

/// Statuses of HTTP and SMTP. Other numbers are in this range too, so the text before must say that it is one.
fn is_status(name: &str, before: &str) -> bool {
    const WORDS: [&str; 11] = [
        "code",
        "error",
        "got",
        "http",
        "replied",
        "responded",
        "response",
        "returned",
        "said",
        "smtp",
        "status",
    ];
    let before = before.trim_end_matches([' ', '=', '(']);
    let last = before.rsplit([' ', '/', ':', '=', '(']).next().unwrap_or_default();
    name.parse::<u16>().is_ok_and(|number| (400..600).contains(&number))
        && (before.is_empty()
            || before.ends_with(':')
            || WORDS.iter().any(|word| last.eq_ignore_ascii_case(word)))
}

/// Names that say what went wrong, such as `E0308` or `ORA-00942`.
fn is_code(name: &str) -> bool {
    let letters = name.bytes().take_while(u8::is_ascii_uppercase).count();
    let number = name[letters..].strip_prefix('-').unwrap_or(&name[letters..]);
    (1..=6).contains(&letters)
        && (2..=6).contains(&number.len())
        && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Ids: UUIDs, hashes and other long names with several digits.
fn is_id(name: &str) -> bool {
    let digits = name.bytes().filter(u8::is_ascii_digit).count();
    let is_hex = name.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    (is_hex && name.len() >= 6 && digits >= 1) || (name.len() >= 10 && digits >= 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_from_job_to_job_is_replaced() {
        for (error, normal) in [
            ("timeout after 30.1s", "timeout after #s"),
            ("order 17 of customer 4: no stock", "order # of customer #: no stock"),
            ("job 0199a8e2-7d1f-7c3a-9d44-5f1c2b3a4d5e is gone", "job # is gone"),
            ("commit 9fceb02d0ae598e95dc970b74767f19372d61af8", "commit #"),
            ("no file \"a b.pdf\" here", "no file \" here"),
            ("unknown field `colour`, expected `color`", "unknown field \", expected \""),
            ("key 'x' isn't there, it's gone", "key \" isn't there, it's gone"),
            ("mail to ada@example.com refused", "mail to @ refused"),
            ("GET https://api.example.com:8080/v1/users/7?x=1: 503", "GET https://api.example.com: 503"),
            ("open /var/lib/data/17.json: permission denied", "open /: permission denied"),
            ("id=81723 status=active", "id=# status=active"),
            ("  \n\n first line \n second line 7", "first line"),
            ("token tok_live_98a7s6d5f", "token #"),
            ("", ""),
        ] {
            assert_eq!(normalise(error), normal, "{error:?}");
        }
    }

    #[test]
    fn long_errors_that_differ_in_numbers_are_the_same() {
        let of = |order: &str| {
            let columns =
                "insert into orders (customer, article, amount, currency) values failed; ".repeat(9);
            Fingerprint::of("sync", &format!("order {order}: {columns}"))
        };
        assert_eq!(of("9"), of("10"));
        assert_eq!(of("9"), of("1234567890"));
        let late = "x".repeat(MAX_NORMALISED);
        assert_eq!(Fingerprint::of("k", &format!("{late} a")), Fingerprint::of("k", &format!("{late} b")));
    }

    #[test]
    fn a_traceback_is_known_by_its_last_line() {
        let of = |last: &str| {
            let text =
                format!("Traceback (most recent call last):\n  File \"a.py\", line 7, in run\n{last}\n");
            normalise(&text)
        };
        assert_eq!(of("ValueError: bad order 7"), "ValueError: bad order #");
        assert_eq!(of("ConnectionError: refused"), "ConnectionError: refused");
        assert_eq!(normalise("Traceback (most recent call last):"), "Traceback (most recent call last):");
    }

    #[test]
    fn codes_stay() {
        for error in [
            "503 Service Unavailable",
            "responded 404",
            "HTTP 500",
            "status=429",
            "upstream: 502",
            "smtp said 550",
            "error E0308",
            "ORA-00942: table or view",
            "SQLSTATE P0001",
        ] {
            assert_eq!(normalise(error), error);
        }
        assert_eq!(normalise("waited 300 ms"), "waited # ms");
        assert_eq!(normalise("connection 574 refused after 410 ms"), "connection # refused after # ms");
    }

    #[test]
    fn the_kind_belongs_to_the_fingerprint() {
        assert_ne!(Fingerprint::of("a", "x"), Fingerprint::of("b", "x"));
        assert_ne!(Fingerprint::of("ab", "c"), Fingerprint::of("a", "bc"));
    }

    /// Fingerprints are stored, so they must not change.
    #[test]
    fn a_fingerprint_never_changes() {
        assert_eq!(Fingerprint::of("mail", "timeout after 30 s").to_string(), "056aee5eca7fd0a7");
    }

    #[test]
    fn any_text_has_a_fingerprint() {
        let long = "é\"'`/\\@://9".repeat(1000);
        for text in ["'", "\"", "''", "a'", "://", "@.", "//", "\u{2028}x", long.as_str()] {
            Fingerprint::of("k", text);
        }
    }

    #[test]
    fn other_text_is_no_fingerprint() {
        for text in ["", "12", "+123456789abcdef0", "123456789abcdefg", "0x3456789abcdef01"] {
            assert!(text.parse::<Fingerprint>().is_err(), "{text:?}");
        }
        assert_eq!("ffffffffffffffff".parse::<Fingerprint>().unwrap().0, -1);
    }
}
