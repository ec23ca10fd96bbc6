//! The URL parameters that each route takes, from the OpenAPI document. Refuses others: a
//! misspelt filter that is ignored would select every job. Values are checked by `extract`. Also encodes texts for URLs.

use std::sync::Arc;

use axum::extract::{Query, Request};
use axum::http::{Method, Uri};
use utoipa::openapi::path::{Operation, ParameterIn, Paths};

use super::problem::{ApiResult, Problem};

/// A text as part of a path or a query.
pub(crate) fn encoded(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

/// The names of the URL parameters of one route, per method. A method that is not listed
/// is not checked.
#[derive(Clone, Debug)]
pub(super) struct UrlParameters(Arc<[(Method, Vec<String>)]>);

impl UrlParameters {
    pub(super) fn of(paths: &Paths) -> Self {
        let methods = paths.paths.values().flat_map(|item| {
            [
                (Method::GET, &item.get),
                (Method::PUT, &item.put),
                (Method::POST, &item.post),
                (Method::DELETE, &item.delete),
                (Method::PATCH, &item.patch),
            ]
        });
        let checked = methods.filter_map(|(method, operation)| {
            let operation = operation.as_ref().filter(|operation| !is_page(operation))?;
            let parameters = operation.parameters.iter().flatten();
            let in_url = parameters.filter(|parameter| parameter.parameter_in == ParameterIn::Query);
            Some((method, in_url.map(|parameter| parameter.name.clone()).collect()))
        });
        UrlParameters(checked.collect())
    }

    /// Refuses a request with a parameter that its route does not take.
    pub(super) fn check(&self, request: &Request) -> ApiResult<()> {
        match request.uri().query() {
            None | Some("") => Ok(()),
            Some(_) => self.check_names(request.method(), request.uri()),
        }
    }

    fn check_names(&self, method: &Method, uri: &Uri) -> ApiResult<()> {
        let method = if method == Method::HEAD { &Method::GET } else { method };
        let Some((_, known)) = self.0.iter().find(|(of, _)| of == method) else { return Ok(()) };
        // Cannot fail: every query string is a list of pairs.
        let sent = Query::<Vec<(String, String)>>::try_from_uri(uri).map(|pairs| pairs.0).unwrap_or_default();
        match sent.iter().find(|(name, _)| !known.contains(name)) {
            None => Ok(()),
            Some((name, _)) => Err(unknown(name, known)),
        }
    }
}

/// Whether the operation returns a page or a file for browsers, which may add parameters of
/// their own, for example to bypass a cache.
fn is_page(operation: &Operation) -> bool {
    operation.tags.iter().flatten().any(|tag| tag == "documentation")
}

fn unknown(name: &str, known: &[String]) -> Problem {
    let name = &name[..name.floor_char_boundary(100)];
    let remedy = match (known, nearest(name, known)) {
        ([], _) => "this route takes none; remove it, or send it in the body".to_owned(),
        (known, None) => format!("use {}", known.join(", ")),
        (known, Some(nearest)) => format!("did you mean `{nearest}`? This route takes {}", known.join(", ")),
    };
    Problem::bad_request(format!("unknown URL parameter `{name}`; {remedy}"))
}

/// The word with the most similar spelling, unless all are very different.
fn nearest<'a>(word: &str, known: &'a [String]) -> Option<&'a str> {
    let distances = known.iter().map(|known| (distance(word, known), known.as_str()));
    let (distance, nearest) = distances.min_by_key(|(distance, _)| *distance)?;
    (distance <= 1 + word.chars().count() / 3).then_some(nearest)
}

/// How many characters must be inserted, deleted or replaced to turn one word into the
/// other.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in other.iter().enumerate() {
            let replaced = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distance_counts_single_changes() {
        for (one, other, expected) in
            [("", "", 0), ("queue", "queue", 0), ("quue", "queue", 1), ("kind", "tag", 4), ("", "tag", 3)]
        {
            assert_eq!((distance(one, other), distance(other, one)), (expected, expected), "{one} {other}");
        }
    }

    #[test]
    fn the_nearest_parameter_is_the_one_that_was_probably_meant() {
        let known = ["status", "kind", "queue", "limit", "idempotency_key"].map(str::to_owned);
        for (word, meant) in [
            ("quue", Some("queue")),
            ("queues", Some("queue")),
            ("kinds", Some("kind")),
            ("idempotencykey", Some("idempotency_key")),
            ("colour", None),
        ] {
            assert_eq!(nearest(word, &known), meant, "{word}");
        }
        assert_eq!(nearest("queue", &[]), None);
    }
}
