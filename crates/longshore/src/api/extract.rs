//! Extractors: read bodies, query strings, headers and path parameters with limits,
//! and refuse invalid ones with a [`Problem`] that says what is wrong.

use std::num::{IntErrorKind, ParseIntError};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use hyper::body::Body as _;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::bodies::BodyReceiver;
use super::problem::{ApiResult, Problem, Slug};
use crate::error::Error;
use crate::job::{FlowId, JobId, OperationId};
use crate::rules::enqueue::{MAX_DEPTH, MAX_PAYLOAD};
use crate::rules::retry::MAX_DELAY;

/// The largest body of one job: the largest payload plus all other fields.
pub(super) const MAX_BODY: usize = MAX_PAYLOAD + 256 * 1024;
/// The largest form: a token, and little else.
#[cfg(feature = "dashboard")]
const MAX_FORM: usize = 4 * 1024;
/// The largest body of a batch.
pub(super) const MAX_BATCH_BODY: usize = 16 * 1024 * 1024;

/// A JSON object as the body. Refuses another content type with 415, a body that is
/// too large with 413, invalid JSON with 400, and unexpected JSON with 422.
pub(super) struct Body<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> ApiResult<Self> {
        expect_content_type(request.headers(), &["application/json"])?;
        let bytes = read_body(request, MAX_BODY).await?;
        parse_object(Subject::Body, &bytes).map(Body)
    }
}

/// As [`Body`], as large as a batch.
pub(super) struct LargeBody<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for LargeBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> ApiResult<Self> {
        expect_content_type(request.headers(), &["application/json"])?;
        let bytes = read_body(request, MAX_BATCH_BODY).await?;
        parse_object(Subject::Body, &bytes).map(LargeBody)
    }
}

/// As [`Body`], but an absent body means the defaults.
pub(super) struct OptionalBody<T>(pub(super) T);

impl<T: DeserializeOwned + Default, S: Send + Sync> FromRequest<S> for OptionalBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> ApiResult<Self> {
        let typed = request.headers().contains_key(header::CONTENT_TYPE);
        if typed {
            expect_content_type(request.headers(), &["application/json"])?;
        }
        let bytes = read_body(request, MAX_BODY).await?;
        if bytes.is_empty() {
            return Ok(OptionalBody(T::default()));
        }
        if !typed {
            expect_content_type(&HeaderMap::new(), &["application/json"])?;
        }
        parse_object(Subject::Body, &bytes).map(OptionalBody)
    }
}

/// The fields of an HTML form.
#[cfg(feature = "dashboard")]
pub(crate) struct Form<T>(pub(crate) T);

#[cfg(feature = "dashboard")]
impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Form<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> ApiResult<Self> {
        expect_content_type(request.headers(), &["application/x-www-form-urlencoded"])?;
        let bytes = read_body(request, MAX_FORM).await?;
        let form = Request::post("/").header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
        let form = form.body(axum::body::Body::from(bytes));
        let form = form.map_err(|error| Problem::bad_request(error.to_string()))?;
        let parsed = axum::Form::from_request(form, state).await;
        parsed.map(|axum::Form(fields)| Form(fields)).map_err(|error| Problem::bad_request(error.body_text()))
    }
}

pub(super) fn expect_content_type(headers: &HeaderMap, accepted: &[&str]) -> ApiResult<()> {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = value.split(';').next().unwrap_or_default().trim();
    if accepted.iter().any(|accepted| essence.eq_ignore_ascii_case(accepted)) {
        Ok(())
    } else {
        Err(Problem::new(Slug::UnsupportedMediaType, format!("content-type: send {}", accepted.join(" or "))))
    }
}

pub(super) async fn read_body(request: Request, limit: usize) -> ApiResult<Bytes> {
    refuse_encoding(request.headers())?;
    // Without one, the request has no body.
    let Some(receiver) = request.extensions().get::<BodyReceiver>().cloned() else { return Ok(Bytes::new()) };
    let limit = receiver.largest(limit);
    match request.body().size_hint().exact() {
        // Refuse before reading the first byte.
        Some(declared) if declared > limit as u64 => Err(receiver.refuse(request, declared, limit)),
        _ => receiver.receive(request, limit).await,
    }
}

/// Larger bodies are worked on in a thread where this delays no other request.
const MAX_INLINE: usize = 64 * 1024;

/// Does work that takes longer the larger the body is.
pub(super) async fn work_on<T: Send + 'static>(
    bytes: Bytes,
    work: impl FnOnce(&[u8]) -> T + Send + 'static,
) -> ApiResult<T> {
    if bytes.len() <= MAX_INLINE {
        return Ok(work(&bytes));
    }
    let done = tokio::task::spawn_blocking(move || work(&bytes)).await;
    done.map_err(|error| Error::internal("the work on a body ended early").with_source(error).into())
}

/// Refuses a compressed body, whose contents would be reported as invalid JSON.
fn refuse_encoding(headers: &HeaderMap) -> ApiResult<()> {
    let codings = headers.get_all(header::CONTENT_ENCODING).iter();
    let mut codings = codings.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    let is_identity = |coding: &[u8]| coding.is_empty() || coding.eq_ignore_ascii_case(b"identity");
    match codings.find(|coding| !is_identity(coding.trim_ascii())) {
        None => Ok(()),
        Some(coding) => Err(Problem::new(
            Slug::UnsupportedMediaType,
            format!(
                "content-encoding: `{}` is not supported; send the body uncompressed",
                coding.trim_ascii().escape_ascii()
            ),
        )
        .with_header(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"))),
    }
}

/// What is parsed, for error messages.
#[derive(Clone, Copy)]
pub(super) enum Subject {
    Body,
    /// One job of a batch.
    Job,
}

impl Subject {
    fn name(self) -> &'static str {
        match self {
            Subject::Body => "the body",
            Subject::Job => "the job",
        }
    }

    /// Serde's message. For a job of a batch it has no line number, which would be
    /// relative to the job; the caller adds the line of the batch.
    fn describe(self, error: &serde_json::Error) -> String {
        match self {
            Subject::Body => error.to_string(),
            Subject::Job => format!("{} at column {}", without_position(error), error.column()),
        }
    }
}

/// As [`parse`], but accepts only objects. Serde would also accept an array of the
/// field values.
pub(super) fn parse_object<'a, T: Deserialize<'a>>(subject: Subject, bytes: &'a [u8]) -> ApiResult<T> {
    match bytes.trim_ascii_start().first() {
        None | Some(b'{') => parse(subject, bytes),
        // Report invalid JSON first.
        Some(_) => parse::<&RawValue>(subject, bytes).and_then(|_| {
            let name = subject.name();
            Err(Problem::validation(format!(
                "{name} is not an object; send one, for example {{\"kind\": …}}"
            )))
        }),
    }
}

/// Parses JSON. Payloads stay text and are checked with the job.
pub(super) fn parse<'a, T: Deserialize<'a>>(subject: Subject, bytes: &'a [u8]) -> ApiResult<T> {
    let json = std::str::from_utf8(bytes)
        .map_err(|_| Problem::bad_request(format!("{} is not UTF-8; send JSON as UTF-8", subject.name())))?;
    serde_json::from_str(json).map_err(|error| problem::<T>(subject, json, &error))
}

fn problem<'a, T: Deserialize<'a>>(subject: Subject, json: &'a str, error: &serde_json::Error) -> Problem {
    use serde_json::error::Category;
    let message = error.to_string();
    match error.classify() {
        Category::Data => Problem::validation(with_field::<T>(json, error)),
        // Valid JSON, but not text that a database can store.
        _ if message.contains("surrogate") || message.contains("end of hex escape") => {
            Problem::validation("a string contains half a surrogate pair; send both halves")
        }
        _ if message.contains("recursion limit") => Problem::validation(format!(
            "{} is nested more than {MAX_DEPTH} levels deep; flatten it",
            subject.name()
        )),
        _ => Problem::bad_request(format!("{} is not JSON: {}", subject.name(), subject.describe(error))),
    }
}

/// Serde's message after the field that it is about, such as `retry.base_ms: invalid type: …`. Parses again to find the
/// field, so that valid bodies do not pay for it.
fn with_field<'a, T: Deserialize<'a>>(json: &'a str, error: &serde_json::Error) -> String {
    let message = without_position(error);
    let mut input = serde_json::Deserializer::from_str(json);
    let Err(located) = serde_path_to_error::deserialize::<_, T>(&mut input) else { return message };
    let mut fields: Vec<String> = located.path().iter().map(ToString::to_string).collect();
    let named = named_field(&message);
    // The path may end with the field that the message names.
    let is_named = |field: &String| {
        let rest = named.and_then(|named| named.strip_prefix(field.as_str()));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
            || message.starts_with(&format!("unknown field `{field}`"))
    };
    if fields.last().is_some_and(is_named) {
        fields.pop();
    }
    match fields.join(".").replace(".[", "[") {
        _ if without_position(located.inner()) != message => message,
        path if path.is_empty() => message,
        // The message names the rest of the path.
        path if named.is_some() => format!("{path}.{message}"),
        path => format!("{path}: {message}"),
    }
}

/// The field at the start of a message: `base_ms` of `base_ms: invalid type`.
fn named_field(message: &str) -> Option<&str> {
    let is_name =
        |name: &&str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.[]".contains(&byte));
    message.split_once(": ").map(|(name, _)| name).filter(is_name)
}

/// Serde's message without line and column, which do not help in a small body.
pub(super) fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(at) => text[..at].to_owned(),
        None => text,
    }
}

// ---- fields of bodies ------------------------------------------------------

/// A value that must be a JSON object. Serde would also accept an array of the field
/// values.
pub(super) struct Object<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        let text = <&RawValue>::deserialize(input)?.get();
        if !text.starts_with('{') {
            return Err(D::Error::custom("expected an object with named fields"));
        }
        serde_json::from_str(text)
            .map(Object)
            .map_err(|error| D::Error::custom(with_field::<T>(text, &error)))
    }
}

/// Deserializes a field that is an [`Object`].
pub(super) fn object<'de, D: Deserializer<'de>, T: Deserialize<'de>>(input: D) -> Result<T, D::Error> {
    Object::deserialize(input).map(|object| object.0)
}

/// Deserializes a field that is an [`Object`] or null.
pub(super) fn optional_object<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    input: D,
) -> Result<Option<T>, D::Error> {
    let object = Option::<Object<T>>::deserialize(input)?;
    Ok(object.map(|object| object.0))
}

/// Deserializes a field that is a list of [`Object`]s.
pub(super) fn objects<'de, D: Deserializer<'de>, T: Deserialize<'de>>(input: D) -> Result<Vec<T>, D::Error> {
    let objects = Vec::<Object<T>>::deserialize(input)?;
    Ok(objects.into_iter().map(|object| object.0).collect())
}

/// Deserializes a field that is a list of [`Object`]s or null.
pub(super) fn optional_objects<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    input: D,
) -> Result<Option<Vec<T>>, D::Error> {
    let objects = Option::<Vec<Object<T>>>::deserialize(input)?;
    Ok(objects.map(|objects| objects.into_iter().map(|object| object.0).collect()))
}

/// Deserializes a field in which null is a value, different from an absent field.
pub(super) fn nullable<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::deserialize(input).map(Some)
}

/// Deserializes a number of a query string that is clamped to a range. So a number beyond the
/// range of the type is not an error.
pub(super) fn clamped<'de, D: Deserializer<'de>>(input: D) -> Result<Option<i64>, D::Error> {
    let parsed = String::deserialize(input)?.parse();
    match parsed.as_ref().map_err(ParseIntError::kind) {
        Err(IntErrorKind::PosOverflow) => Ok(Some(i64::MAX)),
        Err(IntErrorKind::NegOverflow) => Ok(Some(i64::MIN)),
        _ => parsed.map(Some).map_err(serde::de::Error::custom),
    }
}

/// Converts a field in seconds to a duration of at most ten years.
pub(super) fn duration(field: &str, seconds: f64) -> ApiResult<Duration> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if duration <= MAX_DELAY => Ok(duration),
        _ => Err(Problem::validation(format!(
            "{field}: {seconds} is out of range; use 0 to {} seconds (at most ten years)",
            MAX_DELAY.as_secs()
        ))),
    }
}

// ---- headers and URLs ------------------------------------------------------

/// A query string. Refuses unknown and malformed parameters by name.
pub(super) struct Query<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> ApiResult<Self> {
        match axum::extract::Query::<T>::try_from_uri(&parts.uri) {
            Ok(parsed) => Ok(Query(parsed.0)),
            Err(error) => {
                let source = std::error::Error::source(&error).map(ToString::to_string);
                let reason = source.unwrap_or_else(|| error.to_string());
                Err(Problem::bad_request(format!("query string: {reason}")))
            }
        }
    }
}

/// When the headers of the request arrived. Its body may have taken much longer.
pub(super) struct Arrived(pub(super) tokio::time::Instant);

impl<S: Send + Sync> FromRequestParts<S> for Arrived {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let receiver = parts.extensions.get::<BodyReceiver>();
        Ok(Arrived(receiver.map_or_else(tokio::time::Instant::now, |receiver| receiver.received().into())))
    }
}

/// The headers that concern a new job. Extracted one by one, because extracting a
/// `HeaderMap` would copy all headers for every job.
pub(super) struct JobHeaders {
    pub(super) idempotency_key: Option<String>,
    pub(super) trace: Option<String>,
}

impl<S: Send + Sync> FromRequestParts<S> for JobHeaders {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> ApiResult<Self> {
        const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
        const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
        let mut keys = parts.headers.get_all(IDEMPOTENCY_KEY).iter();
        let idempotency_key = keys.next().map(|key| std::str::from_utf8(key.as_bytes()).map(str::to_owned));
        let idempotency_key = idempotency_key.transpose();
        // Either one could be the key that the sender meant.
        if keys.next().is_some() {
            return Err(Problem::bad_request("Idempotency-Key: sent more than once; send it once"));
        }
        let idempotency_key =
            idempotency_key.map_err(|_| Problem::bad_request("Idempotency-Key: not UTF-8; send UTF-8"))?;
        let trace = parts.headers.get(TRACEPARENT).and_then(|trace| trace.to_str().ok());
        Ok(JobHeaders { idempotency_key, trace: trace.map(str::to_owned) })
    }
}

/// A job id in the path.
pub(super) struct JobIdPath(pub(super) JobId);

impl<S: Send + Sync> FromRequestParts<S> for JobIdPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> ApiResult<Self> {
        let Path(text) = path::<String, S>(parts, state).await?;
        text.parse().map(JobIdPath).map_err(Problem::in_url)
    }
}

/// The id of a flow in the path.
pub(super) struct FlowIdPath(pub(super) FlowId);

impl<S: Send + Sync> FromRequestParts<S> for FlowIdPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> ApiResult<Self> {
        let Path(text) = path::<String, S>(parts, state).await?;
        text.parse().map(FlowIdPath).map_err(Problem::in_url)
    }
}

/// The id of an operation in the path.
pub(super) struct OperationIdPath(pub(super) OperationId);

impl<S: Send + Sync> FromRequestParts<S> for OperationIdPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> ApiResult<Self> {
        let Path(text) = path::<String, S>(parts, state).await?;
        text.parse().map(OperationIdPath).map_err(Problem::in_url)
    }
}

/// A name in the path.
pub(super) struct NamePath(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for NamePath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> ApiResult<Self> {
        let Path(name) = path::<String, S>(parts, state).await?;
        if name.contains('\0') {
            return Err(Problem::bad_request("path: contains a NUL character; names cannot contain one"));
        }
        Ok(NamePath(name))
    }
}

/// Two names in the path: that of a queue and that of one of its groups.
pub(super) struct GroupPath(pub(super) String, pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for GroupPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> ApiResult<Self> {
        let Path((queue, group)) = path::<(String, String), S>(parts, state).await?;
        if queue.contains('\0') || group.contains('\0') {
            return Err(Problem::bad_request("path: contains a NUL character; names cannot contain one"));
        }
        Ok(GroupPath(queue, group))
    }
}

async fn path<T: DeserializeOwned + Send, S: Send + Sync>(
    parts: &mut Parts,
    state: &S,
) -> ApiResult<Path<T>> {
    Path::<T>::from_request_parts(parts, state)
        .await
        .map_err(|error| Problem::bad_request(format!("path: {error}")))
}

/// Refuses texts with a NUL character. No stored name or key has one, and Postgres
/// rejects such text.
pub(super) fn refuse_nul<'a>(texts: impl IntoIterator<Item = Option<&'a str>>) -> ApiResult<()> {
    if texts.into_iter().flatten().any(|text| text.contains('\0')) {
        Err(Problem::bad_request("a name contains a NUL character; names and keys cannot contain one"))
    } else {
        Ok(())
    }
}

/// Refuses a number outside of 1 to `limit`.
pub(super) fn check_range(field: &str, value: u32, limit: u32) -> ApiResult<u32> {
    if (1..=limit).contains(&value) {
        Ok(value)
    } else {
        Err(Problem::validation(format!("{field}: {value} is out of range; use 1 to {limit}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Outer<'a> {
        kind: String,
        #[serde(borrow)]
        payload: Option<&'a RawValue>,
        #[serde(default, deserialize_with = "optional_object")]
        inner: Option<Inner>,
        #[serde(default)]
        tags: Vec<String>,
        #[serde(default, deserialize_with = "objects")]
        items: Vec<Inner>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Inner {
        #[serde(default, deserialize_with = "odd")]
        odd: Option<u32>,
        count: u32,
    }

    fn odd<'de, D: Deserializer<'de>>(input: D) -> Result<Option<u32>, D::Error> {
        match u32::deserialize(input)? {
            n if n % 2 == 1 => Ok(Some(n)),
            n => Err(D::Error::custom(format!("odd: {n} is even"))),
        }
    }

    #[test]
    fn the_error_names_the_field() {
        for (json, expected) in [
            (r#"{"kind": 7}"#, "kind: invalid type: integer `7`, expected a string"),
            (r#"{"payload": {"a": [1]}, "kind": null}"#, "kind: invalid type: null, expected a string"),
            (r#"{}"#, "missing field `kind`"),
            (r#"{"kind": "a", "tags": ["b", 7]}"#, "tags[1]: invalid type: integer `7`, expected a string"),
            (r#"{"kind": "a", "inner": "b"}"#, "inner: expected an object with named fields"),
            (
                r#"{"kind": "a", "inner": {"count": "b"}}"#,
                "inner.count: invalid type: string \"b\", expected u32",
            ),
            (r#"{"kind": "a", "inner": {"count": 1, "odd": 2}}"#, "inner.odd: 2 is even"),
            (r#"{"kind": "a", "items": [{"count": 1}, {}]}"#, "items[1]: missing field `count`"),
        ] {
            let problem = parse_object::<Outer>(Subject::Body, json.as_bytes()).expect_err(json);
            assert_eq!(problem.message(), expected, "{json}");
        }
        let unknown = parse_object::<Outer>(Subject::Body, br#"{"kind": "a", "inner": {"more": 1}}"#);
        let message = unknown.expect_err("an unknown field").message().to_owned();
        assert!(message.starts_with("inner: unknown field `more`, expected"), "{message}");
    }
}
