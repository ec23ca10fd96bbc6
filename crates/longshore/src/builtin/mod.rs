//! The built-in kinds `send_email`, `resize_image`, `summarize_text` and `webhook_delivery`, as
//! `longshore worker` runs them, and a simulator of them (feature `builtin`).
//!
//! ```
//! # #[cfg(feature = "sqlite")]
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> longshore::Result<()> {
//! use longshore::{Client, NewJob, Worker, builtin};
//!
//! // The client refuses invalid payloads of these kinds.
//! let client = Client::connect("sqlite::memory:").await?.check_payloads(builtin::check_payload);
//! client.migrate().await?;
//! let text = serde_json::json!({ "text": "Ships come in. Ships go out.", "max_words": 3 });
//! let id = client.enqueue(NewJob::new("summarize_text", &text)).await?.id;
//!
//! // Your own kinds can be registered in the same worker.
//! let worker = builtin::register(Worker::builder(client.clone()), &builtin::Settings::default())?;
//! worker.build()?.drain().await?;
//! let result = client.get(id).await?.result.unwrap();
//! assert!(result.get().contains("Ships come in."));
//! # Ok(()) }
//! # #[cfg(not(feature = "sqlite"))] fn main() {}
//! ```
//!
//! Each kind has its own file with its payload, the payload's checks and the handler. This file
//! has what they share. `outbound` makes their HTTP calls, and `simulate` has the simulator. How
//! the settings can be given on a command line belongs to the command.

mod email;
mod folder;
mod image;
mod outbound;
mod signature;
mod simulate;
mod summary;
#[cfg(all(test, feature = "sqlite"))]
mod testing;
mod webhook;

use std::fmt;
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::Result;
use crate::worker::{Builder, Context, Failure, StopReason};

use email::{Mailer, SendEmail};
use image::{Images, ResizeImage};
use outbound::{Outbound, Rules};
use summary::SummarizeText;
use webhook::{WebhookDelivery, Webhooks};

pub use email::Sender;
pub use outbound::Allowed;
#[doc(hidden)]
pub use outbound::tls;
pub use simulate::simulate;

/// The payload of a built-in kind.
trait Kind: DeserializeOwned + Send + 'static {
    const NAME: &'static str;

    /// Checks what the type does not express. The error names the field and the
    /// remedy.
    fn check(&self) -> Result<(), String>;

    /// The payload's JSON Schema, version 2020-12. It accepts everything that `check`
    /// accepts. What a schema cannot express is left to `check`.
    fn schema() -> Value;
}

/// The settings of the built-in kinds.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The mail server. Without one, mail is written to the outbox.
    pub smtp_url: Option<Secret>,
    /// The sender of mail. Required with a mail server.
    pub mail_from: Option<Sender>,
    /// The folder for messages if there is no mail server.
    pub outbox: PathBuf,
    /// The only folder that `file://` URLs may read from.
    pub image_root: Option<PathBuf>,
    /// The folder for resized images.
    pub image_output: PathBuf,
    /// The secrets that sign webhooks: usually one, and two during a rotation.
    pub webhook_secrets: Vec<Secret>,
    /// Whether `http://` URLs may be called in addition to `https://`.
    pub allow_http: bool,
    /// Internal addresses that may be called.
    pub allow_outbound: Vec<Allowed>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            smtp_url: None,
            mail_from: None,
            outbox: "outbox".into(),
            image_root: None,
            image_output: "images".into(),
            webhook_secrets: Vec::new(),
            allow_http: false,
            allow_outbound: Vec::new(),
        }
    }
}

/// A password, a key, or a URL that contains one. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps the text, without white space around it. Whatever uses the secret validates it.
    pub fn new(text: &str) -> Self {
        Secret(text.trim().to_owned())
    }

    fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Registers the built-in kinds with their real handlers. The error for an invalid setting
/// names the field of [`Settings`].
pub fn register(builder: Builder, settings: &Settings) -> Result<Builder> {
    let outbound = Outbound::new(Rules::of(settings))?;
    Ok(describe_kinds(builder)
        .state(Mailer::open(settings)?)
        .state(Images::open(settings, outbound.clone())?)
        .state(Webhooks::open(settings, outbound)?)
        .function(SendEmail::NAME, email::send)
        .function(ResizeImage::NAME, image::resize)
        .function(SummarizeText::NAME, summary::summarize)
        .function(WebhookDelivery::NAME, webhook::deliver))
}

/// Checks a payload for a built-in kind. Returns `None` for any other kind. For
/// [`Client::check_payloads`](crate::Client::check_payloads).
pub fn check_payload(kind: &str, payload: &str) -> Option<Result<(), String>> {
    built_in(kind).map(|kind| (kind.check)(payload))
}

/// Whether this is a built-in kind, which every `longshore worker` handles.
pub fn is_built_in(kind: &str) -> bool {
    built_in(kind).is_some()
}

/// The names of the built-in kinds.
pub fn names() -> impl Iterator<Item = &'static str> {
    KINDS.iter().map(|kind| kind.name)
}

/// Declares the payload schemas of the built-in kinds.
fn describe_kinds(builder: Builder) -> Builder {
    KINDS.iter().fold(builder, |builder, kind| builder.describe(kind.name, (kind.schema)()))
}

/// A kind with its type erased.
struct BuiltIn {
    name: &'static str,
    check: fn(&str) -> Result<(), String>,
    schema: fn() -> Value,
}

impl BuiltIn {
    const fn of<K: Kind>() -> Self {
        BuiltIn { name: K::NAME, check: parse_and_check::<K>, schema: K::schema }
    }
}

const KINDS: [BuiltIn; 4] = [
    BuiltIn::of::<SendEmail>(),
    BuiltIn::of::<ResizeImage>(),
    BuiltIn::of::<SummarizeText>(),
    BuiltIn::of::<WebhookDelivery>(),
];

fn built_in(kind: &str) -> Option<&'static BuiltIn> {
    KINDS.iter().find(|built_in| built_in.name == kind)
}

fn parse_and_check<K: Kind>(payload: &str) -> Result<(), String> {
    let payload: K = serde_json::from_str(payload).map_err(|error| {
        format!("does not match kind `{}`: {}", K::NAME, without_value(&error.to_string()))
    })?;
    payload.check()
}

/// Removes the string that the parser quotes if it expected another type. That may be
/// the whole payload: JSON inside a string is a common mistake.
fn without_value(error: &str) -> String {
    match (error.find("string \""), error.rfind("\", expected")) {
        (Some(begin), Some(end)) => format!("{}a string{}", &error[..begin], &error[end + 1..]),
        _ => error.to_owned(),
    }
}

/// Runs the work of an attempt, but returns early if the attempt is stopped.
async fn unless_stopped<S, T>(
    ctx: &Context<S>,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    match ctx.until_stopped(work).await {
        Ok(result) => result,
        Err(StopReason::Cancelled) => Err(Failure::cancelled("cancelled while running")),
        Err(reason) => Err(Failure::retry(format!("stopped while running: {reason:?}"))),
    }
}

/// Checks that this is a URL with one of the schemes. The outbound rules decide later
/// whether it may be called.
fn check_url(field: &str, url: &str, schemes: &[&str]) -> Result<(), String> {
    let has_scheme = schemes.iter().any(|scheme| url.starts_with(scheme));
    if has_scheme && !url.contains(char::is_whitespace) && url::Url::parse(url).is_ok() {
        return Ok(());
    }
    Err(format!("{field}: not a valid URL for this kind; use one that starts with {}", schemes.join(" or ")))
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use serde_json::json;

    use super::*;

    fn check<K: Kind>(payload: Value) -> Result<(), String> {
        check_payload(K::NAME, &payload.to_string()).unwrap()
    }

    #[test]
    fn documented_payloads_are_accepted() {
        check::<SendEmail>(json!({ "to": "ada@example.com", "subject": "Hi", "body": "line\nline" }))
            .unwrap();
        check::<ResizeImage>(json!({ "source_url": "https://example.com/a.png", "width": 1, "height": 2 }))
            .unwrap();
        check::<SummarizeText>(json!({ "text": "A. B." })).unwrap();
        check::<SummarizeText>(json!({ "text": "A. B.", "max_words": 1 })).unwrap();
        check::<WebhookDelivery>(json!({ "url": "https://example.com/hook", "body": [1, null] })).unwrap();
    }

    #[test]
    fn an_invalid_payload_is_refused_with_the_name_of_its_field() {
        let email = |to: &str, subject: &str| {
            check::<SendEmail>(json!({ "to": to, "subject": subject, "body": "" })).unwrap_err()
        };
        for to in ["", "ada", "@example.com", "ada@", "a b@c", "a@b\r\nBcc: c@d", "a@b,c@d", "Ada <a@b>"] {
            assert!(email(to, "Hi").starts_with("to: "), "{to:?}");
        }
        assert!(email("a@b", "Hi\r\nBcc: c@d").starts_with("subject: "));
        let image = |url: &str, width: u32, height: u32| {
            check::<ResizeImage>(json!({ "source_url": url, "width": width, "height": height })).unwrap_err()
        };
        for url in ["ftp://a/b", "https://", "https://a b/", "https://[::1/", "http://1.2.3.4.5/", "/a.png"] {
            assert!(image(url, 1, 1).starts_with("source_url: "), "{url}");
        }
        assert!(image("https://a/b", 0, 1).starts_with("width: "));
        assert!(image("https://a/b", 1, image::MAX_SIDE + 1).starts_with("height: "));
        assert!(
            check::<SummarizeText>(json!({ "text": "", "max_words": 0 })).unwrap_err().contains("max_words")
        );
        assert!(
            check::<WebhookDelivery>(json!({ "url": "file:///a", "body": 1 })).unwrap_err().contains("url: ")
        );
        let unknown = check::<SendEmail>(json!({ "to": "a@b", "subject": "", "body": "", "cc": "" }));
        assert!(unknown.unwrap_err().contains("unknown field `cc`"));
        assert!(check::<WebhookDelivery>(json!({ "url": "https://a" })).unwrap_err().contains("`body`"));
    }

    #[test]
    fn only_payloads_of_built_in_kinds_are_checked() {
        assert_eq!(check_payload("greet", "{}"), None);
        assert!(check_payload("send_email", "{").unwrap().unwrap_err().contains("send_email"));
    }

    #[tokio::test]
    async fn error_messages_do_not_quote_the_payload() {
        let json_in_string = json!(json!({ "to": "ada", "body": "s3cret\", expected s3cret" }).to_string());
        let string_as_width = json!({ "source_url": "https://a", "width": "s3cret", "height": 1 });
        let payloads = KINDS.map(|kind| (kind.name, json_in_string.clone()));
        for (kind, payload) in payloads.iter().chain(&[("resize_image", string_as_width)]) {
            let at_enqueue = check_payload(kind, &payload.to_string()).unwrap().unwrap_err();
            let job = testing::run(&Settings::default(), kind, payload).await;
            for error in [at_enqueue, job.last_error.unwrap()] {
                assert!(error.contains("invalid type: ") && error.contains("string"), "{error}");
                assert!(error.contains(", expected "), "{error}");
                assert!(!error.contains("s3cret"), "{error}");
            }
        }
    }

    /// A valid payload of each kind, with every field.
    fn valid_payload(kind: &str) -> Value {
        match kind {
            "send_email" => json!({ "to": "ada@example.com", "subject": "Hi", "body": "…" }),
            "resize_image" => json!({ "source_url": "https://a.example/b.png", "width": 3, "height": 4 }),
            "summarize_text" => json!({ "text": "A. B.", "max_words": 5 }),
            "webhook_delivery" => json!({ "url": "https://a.example/", "body": { "n": 1 } }),
            _ => unreachable!(),
        }
    }

    /// Values to try in each field: a few valid, most of them not.
    fn candidate_values() -> Vec<Value> {
        let numbers = [-1_i64, 0, 1, 16_384, 16_385, 4_294_967_295, 4_294_967_296].map(Value::from);
        let texts = [
            "",
            "x",
            "a@b",
            "ada@example.com",
            "ada@",
            "@b",
            "a b@c",
            "https://a/",
            "http://a/",
            "file:///a",
            "ftp://a/",
            "https://",
            "https://a b/",
            "two\nlines",
        ];
        let others = [json!(null), json!(true), json!(1.5), json!([]), json!({ "a": 1 })];
        numbers.into_iter().chain(texts.map(Value::from)).chain(others).collect()
    }

    #[test]
    fn schemas_and_checks_accept_the_same_payloads() {
        let mut compared = 0;
        for kind in KINDS {
            let schema = (kind.schema)();
            assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
            let accepts = |payload: &Value| (kind.check)(&payload.to_string()).is_ok();
            let mut compare = |payload: Value| {
                compared += 1;
                let (by_check, by_schema) = (accepts(&payload), testing::conforms(&schema, &payload));
                assert_eq!(by_check, by_schema, "{}: {payload}", kind.name);
            };
            let complete = valid_payload(kind.name);
            assert!(accepts(&complete), "{}", kind.name);
            for field in complete.as_object().unwrap().keys() {
                for value in candidate_values() {
                    let mut changed = complete.clone();
                    changed[field] = value;
                    compare(changed);
                }
                let mut without_field = complete.clone();
                without_field.as_object_mut().unwrap().remove(field);
                compare(without_field);
            }
            let mut with_unknown_field = complete.clone();
            with_unknown_field["unknown"] = json!(1);
            compare(with_unknown_field);
            compare(json!([]));
            compare(complete);
        }
        assert!(compared > 200, "{compared} payloads");
    }
}
