//! The kinds that come with the command. Each has a file of its own: what its
//! payload holds, when one is right, and the work. Here is what they share; what
//! they may call is in [`outbound`], and [`simulate`](simulate()) rehearses them.

mod email;
mod folder;
mod image;
mod outbound;
mod signature;
mod simulate;
mod summary;
#[cfg(test)]
mod testing;
mod webhook;

use std::path::PathBuf;

use lettre::message::Mailbox;
use longshore::worker::{Builder, Context, Failure, StopReason};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::failure;
use crate::secret::Secret;

use email::{Mail, SendEmail};
use image::{ResizeImage, Studio};
use outbound::{Outbound, Rules};
use summary::SummarizeText;
use webhook::{Courier, WebhookDelivery};

pub(crate) use outbound::{Allowed, tls};
pub(crate) use simulate::simulate;

/// A built-in kind, by its payload.
trait Kind: DeserializeOwned + Send + 'static {
    const NAME: &'static str;

    /// What the shape alone does not say. The error names the field and what
    /// would be right.
    fn check(&self) -> Result<(), String>;

    /// The payload as a JSON Schema, 2020-12. It refuses nothing that `check`
    /// takes; what only code can see, it leaves to `check`.
    fn schema() -> Value;
}

/// How the built-in kinds do their work.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings {
    /// The mail server. Without one, mail goes to the outbox.
    pub(crate) smtp_url: Option<Secret>,
    /// Who mail is from; a server needs to know.
    pub(crate) mail_from: Option<Mailbox>,
    /// Where messages become files if no server is given.
    pub(crate) outbox: PathBuf,
    /// The one folder that `file://` may read from.
    pub(crate) image_root: Option<PathBuf>,
    /// Where pictures are written.
    pub(crate) image_output: PathBuf,
    /// What webhooks are signed with: one, or two while they change.
    pub(crate) webhook_secrets: Vec<Secret>,
    /// Whether `http://` is called as well as `https://`.
    pub(crate) allow_http: bool,
    /// Inner addresses that may be called all the same.
    pub(crate) allow_outbound: Vec<Allowed>,
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

/// Registers the built-in kinds with their real work. A setting that cannot be
/// right is refused by the name of its flag.
pub(crate) fn register(builder: Builder, settings: &Settings) -> Result<Builder, failure::Failure> {
    let outbound = Outbound::new(Rules::of(settings))?;
    Ok(described(builder)
        .state(Mail::open(settings)?)
        .state(Studio::open(settings, outbound.clone())?)
        .state(Courier::open(settings, outbound)?)
        .function(SendEmail::NAME, email::send)
        .function(ResizeImage::NAME, image::resize)
        .function(SummarizeText::NAME, summary::summarize)
        .function(WebhookDelivery::NAME, webhook::deliver))
}

/// Whether a payload is right for a built-in kind; `None` for any other kind.
pub(crate) fn check_payload(kind: &str, payload: &str) -> Option<Result<(), String>> {
    built_in(kind).map(|kind| (kind.check)(payload))
}

/// Whether every `longshore worker` handles it.
pub(crate) fn is_built_in(kind: &str) -> bool {
    built_in(kind).is_some()
}

/// Says what the built-in kinds carry.
fn described(builder: Builder) -> Builder {
    KINDS.iter().fold(builder, |builder, kind| builder.describe(kind.name, (kind.schema)()))
}

/// A kind without its type.
struct BuiltIn {
    name: &'static str,
    check: fn(&str) -> Result<(), String>,
    schema: fn() -> Value,
}

impl BuiltIn {
    const fn of<K: Kind>() -> Self {
        BuiltIn { name: K::NAME, check: read_and_check::<K>, schema: K::schema }
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

fn read_and_check<K: Kind>(payload: &str) -> Result<(), String> {
    let payload: K = serde_json::from_str(payload)
        .map_err(|error| format!("not what `{}` takes: {}", K::NAME, without_value(&error.to_string())))?;
    payload.check()
}

/// The parser quotes a text that stands where something else should. That may be
/// the whole payload: JSON in a string is a common mistake.
fn without_value(error: &str) -> String {
    match (error.find("string \""), error.rfind("\", expected")) {
        (Some(begin), Some(end)) => format!("{}a string{}", &error[..begin], &error[end + 1..]),
        _ => error.to_owned(),
    }
}

/// Runs the work of an attempt unless it is told to stop first.
async fn unless_stopped<S, T>(
    ctx: &Context<S>,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    match ctx.until_stopped(work).await {
        Ok(done) => done,
        Err(StopReason::Cancelled) => Err(Failure::cancelled("cancelled while it ran")),
        Err(reason) => Err(Failure::retry(format!("stopped while it ran: {reason:?}"))),
    }
}

/// Whether it is a URL of one of these schemes; whether it may be called is for
/// the outbound rules.
fn check_url(field: &str, url: &str, schemes: &[&str]) -> Result<(), String> {
    let named = schemes.iter().any(|scheme| url.starts_with(scheme));
    if named && !url.contains(char::is_whitespace) && url::Url::parse(url).is_ok() {
        return Ok(());
    }
    Err(format!("{field}: not a URL this kind takes; it begins with {}", schemes.join(" or ")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check<K: Kind>(payload: Value) -> Result<(), String> {
        check_payload(K::NAME, &payload.to_string()).unwrap()
    }

    #[test]
    fn payloads_as_documented_are_right() {
        check::<SendEmail>(json!({ "to": "ada@example.com", "subject": "Hi", "body": "line\nline" }))
            .unwrap();
        check::<ResizeImage>(json!({ "source_url": "https://example.com/a.png", "width": 1, "height": 2 }))
            .unwrap();
        check::<SummarizeText>(json!({ "text": "A. B." })).unwrap();
        check::<SummarizeText>(json!({ "text": "A. B.", "max_words": 1 })).unwrap();
        check::<WebhookDelivery>(json!({ "url": "https://example.com/hook", "body": [1, null] })).unwrap();
    }

    #[test]
    fn what_is_wrong_is_named() {
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
        assert!(image("https://a/b", 1, image::LARGEST_SIDE + 1).starts_with("height: "));
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
    fn only_built_in_kinds_are_judged() {
        assert_eq!(check_payload("greet", "{}"), None);
        assert!(check_payload("send_email", "{").unwrap().unwrap_err().contains("send_email"));
    }

    #[tokio::test]
    async fn a_payload_that_does_not_fit_is_not_repeated() {
        let twice = json!(json!({ "to": "ada", "body": "s3cret\", expected s3cret" }).to_string());
        let sized = json!({ "source_url": "https://a", "width": "s3cret", "height": 1 });
        for (kind, payload) in
            KINDS.map(|kind| (kind.name, twice.clone())).iter().chain(&[("resize_image", sized)])
        {
            let refused = check_payload(kind, &payload.to_string()).unwrap().unwrap_err();
            let job = testing::run(&Settings::default(), kind, payload).await;
            for told in [refused, job.last_error.unwrap()] {
                assert!(told.contains("invalid type: ") && told.contains("string"), "{told}");
                assert!(told.contains(", expected "), "{told}");
                assert!(!told.contains("s3cret"), "{told}");
            }
        }
    }

    /// One payload of each kind, as right as it can be.
    fn right(kind: &str) -> Value {
        match kind {
            "send_email" => json!({ "to": "ada@example.com", "subject": "Hi", "body": "…" }),
            "resize_image" => json!({ "source_url": "https://a.example/b.png", "width": 3, "height": 4 }),
            "summarize_text" => json!({ "text": "A. B.", "max_words": 5 }),
            "webhook_delivery" => json!({ "url": "https://a.example/", "body": { "n": 1 } }),
            _ => unreachable!(),
        }
    }

    /// What each field of any kind might be given: some right, most wrong.
    fn values() -> Vec<Value> {
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
    fn the_schemas_say_what_the_checks_say() {
        let mut compared = 0;
        for kind in KINDS {
            let schema = (kind.schema)();
            assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
            let accepts = |payload: &Value| (kind.check)(&payload.to_string()).is_ok();
            let mut compare = |payload: Value| {
                compared += 1;
                let (ours, schemas) = (accepts(&payload), testing::fits(&schema, &payload));
                assert_eq!(ours, schemas, "{}: {payload}", kind.name);
            };
            let whole = right(kind.name);
            assert!(accepts(&whole), "{}", kind.name);
            for field in whole.as_object().unwrap().keys() {
                for value in values() {
                    let mut changed = whole.clone();
                    changed[field] = value;
                    compare(changed);
                }
                let mut less = whole.clone();
                less.as_object_mut().unwrap().remove(field);
                compare(less);
            }
            let mut more = whole.clone();
            more["unheard_of"] = json!(1);
            compare(more);
            compare(json!([]));
            compare(whole);
        }
        assert!(compared > 200, "{compared} payloads");
    }
}
