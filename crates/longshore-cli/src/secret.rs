//! A value that no message, log line or `Debug` shows, and how texts that may
//! hold one are shown.

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

const HIDDEN: &str = "***";

/// A secret as it may be shown: a URL without its password, of anything else
/// nothing. An SQLite file has no password.
pub(crate) fn mask(text: &str) -> String {
    if text.is_empty() || text.starts_with("sqlite:") {
        return text.to_owned();
    }
    match text.split_once("://") {
        Some((scheme, _)) if !is_scheme(scheme) => HIDDEN.into(),
        Some((scheme, rest)) if has_a_host(rest) => format!("{scheme}://{}", without_secrets(scheme, rest)),
        Some((scheme, _)) => format!("{scheme}://{HIDDEN}"),
        None => HIDDEN.into(),
    }
}

/// Replaces the password of every URL in a text.
pub(crate) fn redact(text: &str) -> String {
    let mut starts = starts_of_urls(text);
    starts.push(text.len());
    let mut shown = text[..starts[0]].to_owned();
    for url in starts.windows(2) {
        // Up to the next URL: a password may hold white space and quotes, so
        // where this one ends is not known.
        let (scheme, rest) = text[url[0]..url[1]].split_once("://").unwrap_or_default();
        shown.extend([scheme, "://", &without_secrets(scheme, rest)]);
    }
    shown
}

/// Where URLs begin. A `://` in the middle of a word belongs to the URL before:
/// a password may hold that too.
fn starts_of_urls(text: &str) -> Vec<usize> {
    let mut starts: Vec<usize> = Vec::new();
    for (at, _) in text.match_indices("://") {
        let scheme = text[..at].rfind(|c: char| !is_of_scheme(c));
        let before = scheme.and_then(|last| text[last..].chars().next());
        let is_apart = before.is_none_or(|c| c.is_whitespace() || "'\"`([<=,".contains(c));
        if starts.is_empty() || is_apart {
            let start = before.map_or(0, |c| scheme.unwrap_or(0) + c.len_utf8());
            starts.push(start.max(starts.last().copied().unwrap_or(0)));
        }
    }
    starts
}

/// What follows the `://`, without the password and the parameters that hold
/// secrets. A password that was not percent-encoded may hold any character, and
/// showing too little is the safe mistake. The name alone is no secret in the URL of
/// a database; on the web it is where people put tokens.
fn without_secrets(scheme: &str, rest: &str) -> String {
    let (place, query) = rest.split_at(rest.find(['?', '#']).unwrap_or(rest.len()));
    if query.contains('@') {
        return HIDDEN.into();
    }
    let is_web = ["http", "https"].iter().any(|web| scheme.eq_ignore_ascii_case(web));
    let hidden_from = |user: &str| if is_web { Some(0) } else { Some(user.find(':')? + 1) };
    let mut shown = match place.rfind('@').and_then(|at| Some((hidden_from(&place[..at])?, at))) {
        Some((from, at)) => format!("{}{HIDDEN}{}", &place[..from], &place[at..]),
        None => place.to_owned(),
    };
    let mut is_secret = false;
    for parameter in query.split_inclusive('&') {
        let (text, end) = parameter.strip_suffix('&').map_or((parameter, ""), |text| (text, "&"));
        let (name, value) = text.split_at(text.find('=').map_or(0, |at| at + 1));
        // Without a name it may be the rest of a password that holds a `&`.
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

/// Whether what stands before the path can be a host and a port. If not, a
/// password may stand where nobody expects it.
fn has_a_host(rest: &str) -> bool {
    let place = rest.split(['?', '#']).next().unwrap_or_default();
    let after_user = place.rfind('@').map_or(0, |at| at + 1);
    let host = place[after_user..].split('/').next().unwrap_or_default();
    // Behind the `]` of an address that has colons itself.
    let port = host.rsplit(']').next().unwrap_or_default().split_once(':');
    port.is_none_or(|(_, port)| port.chars().all(|c| c.is_ascii_digit()))
}

fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.chars().all(is_of_scheme)
}

fn is_of_scheme(c: char) -> bool {
    c.is_ascii_alphanumeric() || "+-.".contains(c)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a whole and in a sentence.
    const SHOWN: [(&str, &str); 18] = [
        ("postgres://ada:s3cret@db/jobs", "postgres://ada:***@db/jobs"),
        ("postgres://ada@db:5432/jobs", "postgres://ada@db:5432/jobs"),
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
    fn of_a_url_only_the_password_is_hidden() {
        for (text, shown) in SHOWN {
            assert_eq!(mask(text), shown);
        }
    }

    #[test]
    fn of_a_secret_that_is_no_proper_url_nothing_is_shown() {
        for text in ["whsec_s3cret", "whsec_a://b", "postgres:ada:s3cret@db", "://"] {
            assert_eq!(mask(text), "***");
        }
        assert_eq!(mask("postgres://ada:s3cret"), "postgres://***");
        for text in ["", "sqlite:./jobs.db"] {
            assert_eq!(mask(text), text);
        }
    }

    #[test]
    fn no_password_survives_in_a_text() {
        for (text, shown) in SHOWN {
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
    fn what_holds_no_password_stays() {
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
