//! Secrets: a type that `Debug` does not print, and functions that remove passwords from
//! text before it is shown or logged.

use std::convert::Infallible;
use std::fmt;

/// A password, a key, or a URL that contains one.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(String);

impl Secret {
    /// Accepts any text, because clap quotes a rejected value in its message. The code that
    /// uses the secret validates it.
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

const HIDDEN: &str = "***";

/// A secret in a form that may be shown: a URL without its password, and `***` for
/// anything else. An SQLite URL has no password and is shown unchanged.
pub(crate) fn mask(text: &str) -> String {
    if text.is_empty() || text.starts_with("sqlite:") {
        return text.to_owned();
    }
    match text.split_once("://") {
        Some((scheme, _)) if !is_scheme(scheme) => HIDDEN.into(),
        Some((scheme, rest)) if has_valid_host(rest) => {
            format!("{scheme}://{}", without_secrets(scheme, rest))
        }
        Some((scheme, _)) => format!("{scheme}://{HIDDEN}"),
        None => HIDDEN.into(),
    }
}

/// Replaces the password in every URL of a text.
pub(crate) fn redact(text: &str) -> String {
    let mut starts = url_starts(text);
    starts.push(text.len());
    let mut shown = text[..starts[0]].to_owned();
    for url in starts.windows(2) {
        // Treat everything up to the next URL as part of this one. A password may contain
        // spaces and quotes, so the end of the URL is unknown.
        let (scheme, rest) = text[url[0]..url[1]].split_once("://").unwrap_or_default();
        shown.extend([scheme, "://", &without_secrets(scheme, rest)]);
    }
    shown
}

/// The offsets where URLs start. A `://` in the middle of a word belongs to the previous
/// URL, because a password may contain `://` too.
fn url_starts(text: &str) -> Vec<usize> {
    let mut starts: Vec<usize> = Vec::new();
    for (at, _) in text.match_indices("://") {
        let scheme = text[..at].rfind(|c: char| !is_scheme_char(c));
        let before = scheme.and_then(|last| text[last..].chars().next());
        let is_separate = before.is_none_or(|c| c.is_whitespace() || "'\"`([<=,".contains(c));
        if starts.is_empty() || is_separate {
            let start = before.map_or(0, |c| scheme.unwrap_or(0) + c.len_utf8());
            starts.push(start.max(starts.last().copied().unwrap_or(0)));
        }
    }
    starts
}

/// The part after `://`, without the password and without parameters that contain
/// secrets. A password that was not percent-encoded may contain any character; hiding too
/// much is the safe mistake. The user name of a database URL is shown. That of a web URL
/// is hidden, because people put tokens there.
fn without_secrets(scheme: &str, rest: &str) -> String {
    let (before_query, query) = rest.split_at(rest.find(['?', '#']).unwrap_or(rest.len()));
    if query.contains('@') {
        return HIDDEN.into();
    }
    let is_web = ["http", "https"].iter().any(|web| scheme.eq_ignore_ascii_case(web));
    let hidden_from = |user: &str| if is_web { Some(0) } else { Some(user.find(':')? + 1) };
    let mut shown = match before_query.rfind('@').and_then(|at| Some((hidden_from(&before_query[..at])?, at)))
    {
        Some((from, at)) => format!("{}{HIDDEN}{}", &before_query[..from], &before_query[at..]),
        None => before_query.to_owned(),
    };
    let mut is_secret = false;
    for parameter in query.split_inclusive('&') {
        let (text, end) = parameter.strip_suffix('&').map_or((parameter, ""), |text| (text, "&"));
        let (name, value) = text.split_at(text.find('=').map_or(0, |at| at + 1));
        // A parameter without a name may be the rest of a password that contains `&`.
        is_secret = names_a_secret(name) || (is_secret && name.is_empty());
        shown.extend([name, if is_secret { HIDDEN } else { value }, end]);
    }
    shown
}

fn names_a_secret(name: &str) -> bool {
    let name = url::form_urlencoded::parse(name.trim_start_matches(['?', '#']).as_bytes()).next();
    let name = name.map(|(name, _)| name.to_lowercase()).unwrap_or_default();
    ["pass", "pwd", "secret", "token", "key"].iter().any(|word| name.contains(word))
}

/// Whether the part before the path can be a host and a port. If not, the URL may have a
/// password in an unexpected position.
fn has_valid_host(rest: &str) -> bool {
    let before_query = rest.split(['?', '#']).next().unwrap_or_default();
    let after_user = before_query.rfind('@').map_or(0, |at| at + 1);
    let hosts = before_query[after_user..].split('/').next().unwrap_or_default();
    // A database URL may name several hosts.
    hosts.split(',').all(|host| {
        // Start after the `]` of an IPv6 address, which itself contains colons.
        let port = host.rsplit(']').next().unwrap_or_default().split_once(':');
        port.is_none_or(|(_, port)| port.chars().all(|c| c.is_ascii_digit()))
    })
}

fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.chars().all(is_scheme_char)
}

fn is_scheme_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || "+-.".contains(c)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// URLs and their masked form, tested alone and inside a sentence.
    const MASKED: [(&str, &str); 19] = [
        ("postgres://ada:s3cret@db/jobs", "postgres://ada:***@db/jobs"),
        ("postgres://ada@db:5432/jobs", "postgres://ada@db:5432/jobs"),
        ("postgres://ada:s3@db1:5432,db2:5433/jobs", "postgres://ada:***@db1:5432,db2:5433/jobs"),
        ("postgres://ada:s3'cret@[::1]:5499/jobs", "postgres://ada:***@[::1]:5499/jobs"),
        ("postgres://ada:s3 cret@db/jobs", "postgres://ada:***@db/jobs"),
        ("postgres://ada:s3\"cret@db/jobs", "postgres://ada:***@db/jobs"),
        ("postgres://ada:s3`cret@db/jobs", "postgres://ada:***@db/jobs"),
        ("postgres://o'hara:s3cret@db/jobs", "postgres://o'hara:***@db/jobs"),
        ("postgres://ada:s3/c@ret@db/jobs", "postgres://ada:***@db/jobs"),
        ("postgres://ada:s3?c'ret@db/jobs", "postgres://***"),
        ("postgres://ada:1#c'ret@db/jobs", "postgres://***"),
        ("postgres://ada:s3://cret@db/jobs", "postgres://ada:***@db/jobs"),
        ("postgres://db/x?a=b&Password=s3'c ret&c=d", "postgres://db/x?a=b&Password=***&c=d"),
        ("postgres://db/x?pass%77ord=s3c&ret&c=d", "postgres://db/x?pass%77ord=***&***&c=d"),
        ("postgres://a:s3@db/x?password=s3@cret", "postgres://***"),
        ("https://[::1]:8080/api", "https://[::1]:8080/api"),
        ("https://s3cret@queue.example.com/api", "https://***@queue.example.com/api"),
        ("HTTP://ada:s3cret@queue.example.com", "HTTP://***@queue.example.com"),
        ("smtps://me:mailpw'x@mail.example.com", "smtps://me:***@mail.example.com"),
    ];

    #[test]
    fn masking_a_url_hides_only_its_password() {
        for (text, shown) in MASKED {
            assert_eq!(mask(text), shown);
        }
    }

    #[test]
    fn masking_anything_but_a_valid_url_hides_all_of_it() {
        for text in ["whsec_s3cret", "whsec_a://b", "postgres:ada:s3cret@db", "://"] {
            assert_eq!(mask(text), "***");
        }
        assert_eq!(mask("postgres://ada:s3cret"), "postgres://***");
        for text in ["", "sqlite:./jobs.db"] {
            assert_eq!(mask(text), text);
        }
    }

    #[test]
    fn redacted_text_contains_no_password() {
        for (text, shown) in MASKED {
            assert_eq!(redact(&format!("wrong: {text}")), format!("wrong: {shown}"));
            let quoted = redact(&format!("at '{text}': no"));
            assert!(quoted.starts_with(&format!("at '{}", shown.trim_end_matches("&c=d"))), "{quoted}");
        }
        assert_eq!(
            redact("postgres://:s3cret@db and 'postgres://b:s3'cret@c'"),
            "postgres://:***@db and 'postgres://b:***@c'"
        );
    }

    #[test]
    fn text_without_a_password_is_unchanged() {
        for text in [
            "postgres://ada@db:5432/jobs",
            "http://127.0.0.1:80: refused; try 'https://a'",
            "sqlite:./jobs.db",
            "no URL: a@b",
            "://",
            "",
        ] {
            assert_eq!(redact(text), text);
        }
    }
}
