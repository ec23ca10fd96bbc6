//! The kinds that come with the command: what their payloads hold and when one
//! is right. Their real work is not here yet; [`simulate`](simulate()) rehearses it.

mod simulate;

use serde::Deserialize;
use serde::de::DeserializeOwned;

pub(crate) use simulate::simulate;

/// Every built-in kind.
pub(crate) const KINDS: [&str; 4] =
    [SendEmail::NAME, ResizeImage::NAME, SummarizeText::NAME, WebhookDelivery::NAME];

/// A built-in kind, by its payload.
pub(crate) trait Kind: DeserializeOwned + Send + 'static {
    const NAME: &'static str;

    /// What the shape alone does not say. The error names the field and what
    /// would be right.
    fn check(&self) -> Result<(), String>;
}

/// `send_email`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SendEmail {
    pub(crate) to: String,
    pub(crate) subject: String,
    pub(crate) body: String,
}

/// `resize_image`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResizeImage {
    pub(crate) source_url: String,
    pub(crate) width: u32,
    pub(crate) height: u32,
}

/// `summarize_text`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SummarizeText {
    pub(crate) text: String,
    pub(crate) max_words: Option<u32>,
}

/// `webhook_delivery`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WebhookDelivery {
    pub(crate) url: String,
    /// Any JSON.
    pub(crate) body: serde_json::Value,
}

/// The largest side of a picture.
const LARGEST_SIDE: u32 = 16_384;

impl Kind for SendEmail {
    const NAME: &'static str = "send_email";

    fn check(&self) -> Result<(), String> {
        let (name, host) = self.to.rsplit_once('@').unwrap_or_default();
        let odd = |c: char| c.is_whitespace() || c.is_control();
        if name.is_empty() || host.is_empty() || self.to.contains(odd) {
            return Err("to: not an address; write it like ada@example.com".into());
        }
        // A line break would end the header and begin another.
        if self.subject.contains(char::is_control) {
            return Err("subject: holds a line break or another control character; leave it out".into());
        }
        Ok(())
    }
}

impl Kind for ResizeImage {
    const NAME: &'static str = "resize_image";

    fn check(&self) -> Result<(), String> {
        check_url("source_url", &self.source_url, &["https://", "http://", "file://"])?;
        for (field, side) in [("width", self.width), ("height", self.height)] {
            if side == 0 || side > LARGEST_SIDE {
                return Err(format!("{field}: {side} is not from 1 to {LARGEST_SIDE}"));
            }
        }
        Ok(())
    }
}

impl Kind for SummarizeText {
    const NAME: &'static str = "summarize_text";

    fn check(&self) -> Result<(), String> {
        match self.max_words {
            Some(0) => Err("max_words: must be at least 1; leave it out for the default".into()),
            _ => Ok(()),
        }
    }
}

impl Kind for WebhookDelivery {
    const NAME: &'static str = "webhook_delivery";

    fn check(&self) -> Result<(), String> {
        check_url("url", &self.url, &["https://", "http://"])
    }
}

/// The start of a URL; whether it may be called is for the outbound rules.
fn check_url(field: &str, url: &str, schemes: &[&str]) -> Result<(), String> {
    let rest = schemes.iter().find_map(|scheme| url.strip_prefix(scheme));
    match rest {
        Some(rest) if !rest.is_empty() && !url.contains(char::is_whitespace) => Ok(()),
        _ => Err(format!("{field}: not a URL this kind takes; it begins with {}", schemes.join(" or "))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check<K: Kind>(payload: Value) -> Result<(), String> {
        serde_json::from_value::<K>(payload).map_err(|error| error.to_string())?.check()
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
        for to in ["", "ada", "@example.com", "ada@", "a b@c", "a@b\r\nBcc: c@d"] {
            assert!(email(to, "Hi").starts_with("to: "), "{to:?}");
        }
        assert!(email("a@b", "Hi\r\nBcc: c@d").starts_with("subject: "));
        let image = |url: &str, width: u32, height: u32| {
            check::<ResizeImage>(json!({ "source_url": url, "width": width, "height": height })).unwrap_err()
        };
        assert!(image("ftp://a/b", 1, 1).starts_with("source_url: "));
        assert!(image("https://", 1, 1).starts_with("source_url: "));
        assert!(image("https://a/b", 0, 1).starts_with("width: "));
        assert!(image("https://a/b", 1, LARGEST_SIDE + 1).starts_with("height: "));
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
}
