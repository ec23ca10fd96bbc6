//! Dead letters as Sentry events: a hook sends one event for each job that fails permanently.
//!
//! Set `SENTRY_DSN` to send the events to your project. Without it, the example starts a small
//! server in place of Sentry and prints what it receives.

use std::time::Duration;

use longshore::store::Claimed;
use longshore::worker::Hooks;
use longshore::{Client, Context, Failure, InterruptedJob, JobId, NewJob, Status, Worker};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

/// Where events go: `https://KEY@HOST/PROJECT`.
struct Sentry {
    http: reqwest::Client,
    envelopes: String,
    key: String,
}

impl Sentry {
    fn new(dsn: &str) -> Option<Self> {
        let (scheme, rest) = dsn.split_once("://")?;
        let (key, rest) = rest.split_once('@')?;
        let (host, project) = rest.rsplit_once('/')?;
        // reqwest is built without a TLS provider here; an application may enable one of its features.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder().timeout(Duration::from_secs(5)).build().ok()?;
        let envelopes = format!("{scheme}://{host}/api/{project}/envelope/");
        Some(Sentry { http, envelopes, key: key.into() })
    }

    async fn send(&self, event: Value) {
        let id = &event["event_id"];
        let body = format!("{}\n{}\n{event}\n", json!({ "event_id": id }), json!({ "type": "event" }));
        let auth = format!("Sentry sentry_version=7, sentry_client=longshore/0.1, sentry_key={}", self.key);
        let request = self
            .http
            .post(&self.envelopes)
            .header("x-sentry-auth", auth)
            .header("content-type", "application/x-sentry-envelope")
            .body(body);
        // The dead letter is stored in any case, so a lost event is only a late notice.
        match request.send().await.and_then(|response| response.error_for_status()) {
            Ok(_) => println!("sent event {id}"),
            Err(error) => eprintln!("could not send event {id}: {}", error.without_url()),
        }
    }
}

/// The event of one dead letter. It does not contain the payload, which may be confidential.
fn event(id: JobId, kind: &str, queue: &str, attempts: u16, error: &str) -> Value {
    json!({
        "event_id": JobId::new().0.simple().to_string(), // any UUID; a redriven job may fail again
        "platform": "other",
        "level": "error",
        "logger": "longshore",
        "exception": { "values": [{ "type": kind, "value": error }] },
        "tags": { "kind": kind, "queue": queue },
        "extra": { "job_id": id, "attempts": attempts },
    })
}

struct DeadLettersToSentry {
    sentry: Sentry,
    jobs: Client,
}

#[async_trait::async_trait]
impl Hooks for DeadLettersToSentry {
    /// The last attempt failed, or the handler said that a retry is useless.
    async fn on_permanent_failure(&self, job: &Claimed, error: &str) {
        self.sentry.send(event(job.lease().id, job.kind(), job.queue(), job.attempt(), error)).await;
    }

    /// A job that killed its workers too often is quarantined by a sweep, without another attempt.
    async fn on_interruption(&self, interrupted: &InterruptedJob) {
        if let Ok(job) = self.jobs.get(interrupted.record.id).await
            && job.status == Status::FailedPermanent
        {
            let error = job.last_error.unwrap_or_default();
            self.sentry.send(event(job.id, &job.kind, &job.queue, job.attempts, &error)).await;
        }
    }
}

async fn charge(card: String, _: Context) -> Result<(), Failure> {
    if card.is_empty() { Err(Failure::permanent("the card has no number")) } else { Ok(()) }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (dsn, received) = match std::env::var("SENTRY_DSN") {
        Ok(dsn) => (dsn, None),
        Err(_) => {
            let (dsn, received) = stand_in_for_sentry().await?;
            (dsn, Some(received))
        }
    };
    let sentry = Sentry::new(&dsn).ok_or("SENTRY_DSN: write it like https://KEY@HOST/PROJECT")?;

    let jobs = Client::connect("sqlite::memory:").await?;
    jobs.migrate().await?;
    jobs.enqueue(NewJob::new("charge", "4111")).await?;
    let dead = jobs.enqueue(NewJob::new("charge", "")).queue("default").await?.id;
    let hooks = DeadLettersToSentry { sentry, jobs: jobs.clone() };
    let worker = Worker::builder(jobs).hooks(hooks).function("charge", charge).build()?;
    let done = worker.drain().await?;
    assert_eq!((done.succeeded, done.failed_permanent), (1, 1));

    if let Some(mut received) = received {
        let request = received.recv().await.ok_or("no request")?;
        println!("{request}");
        assert!(request.starts_with("POST /api/42/envelope/ HTTP/1.1\r\n"));
        assert!(request.contains("sentry_key=public"));
        let body = request.split_once("\r\n\r\n").ok_or("no body")?.1;
        let lines: Vec<Value> = body.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        assert_eq!(lines[1]["type"], "event");
        assert_eq!(lines[2]["exception"]["values"][0]["value"], "the card has no number");
        assert_eq!(lines[2]["extra"]["job_id"], dead.to_string());
        assert!(received.try_recv().is_err(), "one event for one dead letter");
    }
    Ok(())
}

/// A server that accepts every request, its DSN, and the requests it receives.
async fn stand_in_for_sentry() -> std::io::Result<(String, mpsc::UnboundedReceiver<String>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let dsn = format!("http://public@{}/42", listener.local_addr()?);
    let (sender, received) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = Vec::new();
            // An envelope ends with a JSON object and a line break.
            while !request.ends_with(b"}\n") {
                let mut chunk = [0; 4096];
                match stream.read(&mut chunk).await {
                    Ok(read @ 1..) => request.extend_from_slice(&chunk[..read]),
                    _ => return,
                }
            }
            let _ = sender.send(String::from_utf8_lossy(&request).into_owned());
            let reply = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
            let _ = stream.write_all(reply.as_bytes()).await;
        }
    });
    Ok((dsn, received))
}
