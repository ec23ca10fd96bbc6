//! `webhook_delivery`: posts a JSON body. The signature lets the receiver verify the
//! sender and detect replays.

use chrono::Utc;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::outbound::Outbound;
use super::signature::Keys;
use super::{Kind, Settings, check_url, unless_stopped};
use crate::error::{Error, Result};
use crate::worker::{Context, Failure};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WebhookDelivery {
    pub(super) url: String,
    /// Any JSON, sent exactly as it was enqueued.
    pub(super) body: Box<RawValue>,
}

impl Kind for WebhookDelivery {
    const NAME: &'static str = "webhook_delivery";

    fn check(&self) -> Result<(), String> {
        check_url("url", &self.url, &["https://", "http://"])
    }

    fn schema() -> Value {
        json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "webhook_delivery",
            "type": "object",
            "properties": {
                "url": {
                    "type": "string",
                    "pattern": "^https?://\\S+$",
                    "description": "The URL to call. http and internal addresses only if the worker allows them.",
                },
                "body": { "description": "Any JSON; posted unchanged." },
            },
            "required": ["url", "body"],
            "additionalProperties": false,
        })
    }
}

/// Signs and delivers webhooks.
pub(super) struct Webhooks {
    outbound: Outbound,
    keys: Keys,
}

impl Webhooks {
    pub(super) fn open(settings: &Settings, outbound: Outbound) -> Result<Self> {
        let keys = Keys::parse(&settings.webhook_secrets)
            .map_err(|error| Error::invalid("webhook_secrets", format!("webhook_secrets: {error}")))?;
        if keys.is_empty() {
            tracing::info!(
                "webhooks are sent unsigned, because `webhook_secrets` (--webhook-secret, \
                 LONGSHORE_WEBHOOK_SECRETS) is not set"
            );
        }
        Ok(Webhooks { outbound, keys })
    }
}

pub(super) async fn deliver(webhook: WebhookDelivery, ctx: Context<Webhooks>) -> Result<(), Failure> {
    webhook.check().map_err(Failure::permanent)?;
    let Webhooks { outbound, keys } = ctx.state();
    let target = outbound.target("url", &webhook.url)?;
    let body = webhook.body.get().as_bytes().to_vec();
    // The id is the same for all attempts, so that the receiver can recognise a repeated
    // delivery. The timestamp is that of this attempt; otherwise the receiver would
    // reject a late attempt as a replay.
    let (id, timestamp) = (ctx.id().to_string(), Utc::now().timestamp());
    let signature = keys.sign(&id, timestamp, &body);
    let headers = headers([
        ("webhook-id", Some(id)),
        ("webhook-timestamp", Some(timestamp.to_string())),
        ("webhook-signature", signature),
    ])?;
    let status = unless_stopped(&ctx, outbound.post(&target, headers, body)).await?;
    ctx.set_result(&json!({ "status": status.as_u16() }))?;
    Ok(())
}

fn headers<const N: usize>(fields: [(&'static str, Option<String>); N]) -> Result<HeaderMap, Failure> {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        if let Some(value) = value {
            headers.insert(HeaderName::from_static(name), HeaderValue::try_from(value)?);
        }
    }
    Ok(headers)
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use super::*;
    use crate::Status;
    use crate::builtin::Secret;
    use crate::builtin::testing::{Server, run, run_without_backoff};

    const SECRETS: [&str; 2] =
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc="];

    fn settings(secrets: &[&str]) -> Settings {
        Settings {
            webhook_secrets: secrets.iter().map(|secret| Secret::new(secret)).collect(),
            allow_http: true,
            allow_outbound: vec!["127.0.0.1".parse().unwrap()],
            ..Settings::default()
        }
    }

    fn payload(server: &Server, body: &Value) -> Value {
        json!({ "url": format!("http://127.0.0.1:{}/hooks?to=ada", server.port()), "body": body })
    }

    fn header<'a>(request: &'a str, name: &str) -> Option<&'a str> {
        let head = request.split_once("\r\n\r\n").unwrap().0;
        head.lines()
            .filter_map(|line| line.split_once(": "))
            .find(|(found, _)| *found == name)
            .map(|(_, value)| value)
    }

    #[tokio::test]
    async fn a_webhook_is_signed_with_each_secret() {
        let mut server = Server::responding(&["HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"]).await;
        let began = Utc::now().timestamp();
        let job =
            run(&settings(&SECRETS), "webhook_delivery", &payload(&server, &json!({ "b": 1, "a": [null] })))
                .await;
        assert_eq!(job.status, Status::Succeeded, "{:?}", job.last_error);
        assert_eq!(job.result.unwrap().get(), r#"{"status":202}"#);

        let request = server.next_request().await;
        assert!(request.starts_with("POST /hooks?to=ada HTTP/1.1\r\n"), "{request}");
        assert_eq!(header(&request, "content-type"), Some("application/json"));
        assert_eq!(header(&request, "webhook-id").unwrap(), job.id.to_string());
        let timestamp = header(&request, "webhook-timestamp").unwrap().parse().unwrap();
        assert!((began..=Utc::now().timestamp()).contains(&timestamp));
        let body = request.split_once("\r\n\r\n").unwrap().1;
        assert_eq!(serde_json::from_str::<Value>(body).unwrap(), json!({ "b": 1, "a": [null] }));
        let keys = Keys::parse(&settings(&SECRETS).webhook_secrets).unwrap();
        let signature = keys.sign(job.id, timestamp, body.as_bytes()).unwrap();
        assert_eq!(signature.matches("v1,").count(), 2);
        assert_eq!(header(&request, "webhook-signature").unwrap(), signature);
        assert_eq!(header(&request, "referer"), None);
    }

    #[tokio::test]
    async fn without_a_secret_a_webhook_is_unsigned() {
        let mut server = Server::responding(&["HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]).await;
        run(&settings(&[]), "webhook_delivery", &payload(&server, &json!(1))).await;
        let request = server.next_request().await;
        assert!(header(&request, "webhook-id").is_some());
        assert_eq!(header(&request, "webhook-signature"), None);
    }

    #[tokio::test]
    async fn all_attempts_have_the_same_id() {
        let failure = "HTTP/1.1 500 Oops\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
        let mut server =
            Server::responding(&[failure, failure, "HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"])
                .await;
        let job =
            run_without_backoff(&settings(&[]), "webhook_delivery", &payload(&server, &json!({}))).await;
        assert_eq!((job.status, job.attempts), (Status::Succeeded, 3), "{:?}", job.last_error);
        for _ in 0..3 {
            let request = server.next_request().await;
            assert_eq!(header(&request, "webhook-id").unwrap(), job.id.to_string());
        }
    }

    #[tokio::test]
    async fn status_410_fails_the_job_permanently() {
        let server = Server::responding(&["HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n"]).await;
        let job =
            run_without_backoff(&settings(&[]), "webhook_delivery", &payload(&server, &json!({}))).await;
        assert_eq!((job.status, job.attempts), (Status::FailedPermanent, 1));
        assert!(job.last_error.unwrap().contains("410 Gone"));
    }

    #[tokio::test]
    async fn retry_after_delays_the_next_attempt() {
        let server = Server::responding(&[
            "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 4000\r\nContent-Length: 0\r\n\r\n",
        ])
        .await;
        let began = Utc::now();
        let job =
            run_without_backoff(&settings(&[]), "webhook_delivery", &payload(&server, &json!({}))).await;
        assert_eq!((job.status, job.attempts), (Status::Retrying, 1), "{:?}", job.last_error);
        let delay = (job.run_at - began).num_seconds();
        assert!((3999..4030).contains(&delay), "{delay} s");
    }

    #[tokio::test]
    async fn an_internal_address_fails_the_job_permanently() {
        let settings = Settings { allow_outbound: Vec::new(), ..settings(&[]) };
        let mut server = Server::responding(&["HTTP/1.1 200 OK\r\n\r\n"]).await;
        let job =
            run_without_backoff(&settings, "webhook_delivery", &payload(&server, &json!("s3cret"))).await;
        assert_eq!((job.status, job.attempts), (Status::FailedPermanent, 1));
        let error = job.last_error.unwrap();
        assert!(error.contains("127.0.0.1") && error.contains("--allow-outbound"), "{error}");
        assert!(!error.contains("s3cret") && !error.contains("to=ada"), "{error}");
        assert_eq!(server.pending_request(), None);
    }

    #[test]
    fn the_body_keeps_its_exact_text() {
        let text = r#"{ "z": 1.0, "a": 12345678901234567890123, "z2": "\u00e4" }"#;
        let webhook: WebhookDelivery =
            serde_json::from_str(&format!(r#"{{"url":"https://a","body":{text}}}"#)).unwrap();
        assert_eq!(webhook.body.get(), text);
    }

    #[test]
    fn an_invalid_secret_is_refused_with_the_name_of_its_setting() {
        let outbound = Outbound::new(super::super::Rules::of(&Settings::default())).unwrap();
        let error = Webhooks::open(&settings(&["s3cret"]), outbound).err().unwrap().to_string();
        assert!(error.starts_with("webhook_secrets: secret number 1"), "{error}");
        assert!(!error.contains("s3cret"), "{error}");
    }
}
