//! A signed incoming webhook becomes an event: the route verifies the signature, as defined by
//! Standard Webhooks, and emits. The job that waits for the payment continues.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::{Router, body::Bytes, extract::State, http::HeaderMap, http::StatusCode, routing::post};
use base64::{Engine, prelude::BASE64_STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use longshore::{Client, Context, Failure, NewJob, Worker};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

const WEEK: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// How old a request may be. Without a limit, whoever copied one could send it again at any time.
const TOLERANCE_SECONDS: u64 = 5 * 60;

#[derive(Deserialize, Serialize)]
struct Payment {
    order: u32,
    cents: u64,
}

async fn order(number: u32, ctx: Context) -> Result<(), Failure> {
    let Some(payment) = ctx.event::<Payment>(&format!("paid:{number}")).within(WEEK).await? else {
        return Err(Failure::cancelled("nobody paid"));
    };
    let ship = async || {
        println!("order {number} is paid with {} cents", payment.cents);
        Ok(())
    };
    ctx.step("ship", ship).await
}

#[derive(Clone)]
struct App {
    jobs: Client,
    key: Hmac<Sha256>,
}

async fn webhook(State(app): State<App>, headers: HeaderMap, body: Bytes) -> StatusCode {
    if !is_authentic(&app.key, &headers, &body).unwrap_or(false) {
        return StatusCode::UNAUTHORIZED;
    }
    let Ok(payment) = serde_json::from_slice::<Payment>(&body) else {
        return StatusCode::UNPROCESSABLE_ENTITY;
    };
    match app.jobs.emit(&format!("paid:{}", payment.order), &payment).await {
        Ok(_) => StatusCode::NO_CONTENT, // also for a repetition: the first event wins
        Err(_) => StatusCode::SERVICE_UNAVAILABLE, // the sender tries again
    }
}

/// `None` if a header is missing or malformed.
fn is_authentic(key: &Hmac<Sha256>, headers: &HeaderMap, body: &[u8]) -> Option<bool> {
    let header = |name| headers.get(name)?.to_str().ok();
    let (id, timestamp) = (header("webhook-id")?, header("webhook-timestamp")?);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs();
    if now.abs_diff(timestamp.parse().ok()?) > TOLERANCE_SECONDS {
        return Some(false);
    }
    let mac = key.clone().chain_update(format!("{id}.{timestamp}.")).chain_update(body);
    // While a secret is being replaced, there are two signatures.
    let signatures = header("webhook-signature")?.split(' ').filter_map(|part| part.strip_prefix("v1,"));
    let mut signatures = signatures.filter_map(|signature| BASE64_STANDARD.decode(signature).ok());
    Some(signatures.any(|signature| mac.clone().verify_slice(&signature).is_ok())) // in constant time
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let secret = std::env::var("WEBHOOK_SECRET")?; // whsec_ and the key in base64
    let key = BASE64_STANDARD.decode(secret.strip_prefix("whsec_").ok_or("not a webhook secret")?)?;
    let jobs = Client::connect("sqlite::memory:").await?;
    jobs.migrate().await?;
    jobs.enqueue(NewJob::new("order", &42)).await?;
    let _running = Worker::builder(jobs.clone()).function("order", order).build()?.start().await?;
    let app = App { jobs, key: Hmac::new_from_slice(&key)? };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    Ok(axum::serve(listener, Router::new().route("/payments", post(webhook)).with_state(app)).await?)
}
