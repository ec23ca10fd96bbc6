//! For the tests of the built-in kinds: a small HTTP server, a mail server, a
//! folder, a queue to run one job, and as much of JSON Schema as the schemas use.
#![allow(clippy::unwrap_used)]

#[path = "../../tests/mail/server.rs"]
mod mail;

use std::io::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use longshore::worker::Worker;
use longshore::{Client, JobId, JobRecord, NewJob, RetryPolicy};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::{Settings, register};

pub(super) use mail::MailServer;

/// A server on every address of this machine that answers each connection with
/// the next of its answers and keeps it open.
pub(super) struct Server {
    port: u16,
    heard: mpsc::UnboundedReceiver<(IpAddr, String)>,
}

impl Server {
    pub(super) async fn answering(answers: &[&str]) -> Self {
        Self::sending(answers.iter().map(|answer| answer.as_bytes().to_vec()).collect()).await
    }

    pub(super) async fn sending(answers: Vec<Vec<u8>>) -> Self {
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (told, heard) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut open = Vec::new();
            for answer in answers {
                let Ok((mut stream, _)) = listener.accept().await else { return };
                let request = read_request(&mut stream).await;
                let _ = told.send((stream.local_addr().unwrap().ip(), request));
                // A caller who has read enough hangs up.
                let _ = stream.write_all(&answer).await;
                open.push(stream);
            }
            std::future::pending::<()>().await;
        });
        Server { port, heard }
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// The next request, head and body.
    pub(super) async fn heard(&mut self) -> String {
        self.heard.recv().await.unwrap().1
    }

    /// The address at which the next request came in.
    pub(super) async fn heard_from(&mut self) -> String {
        self.heard.recv().await.unwrap().0.to_string()
    }

    /// A request, if there was one.
    pub(super) fn heard_so_far(&mut self) -> Option<String> {
        self.heard.try_recv().ok().map(|(_, request)| request)
    }
}

async fn read_request(stream: &mut TcpStream) -> String {
    let mut request = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&request);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().unwrap())
            });
            if body.len() >= length.unwrap_or(0) {
                return text.into_owned();
            }
        }
        let mut chunk = [0; 4096];
        let read = stream.read(&mut chunk).await.unwrap();
        assert!(read > 0, "the caller hung up: {request:?}");
        request.extend_from_slice(&chunk[..read]);
    }
}

/// A folder that goes with the test.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new() -> Self {
        let path = std::env::temp_dir().join(format!("longshore-builtin-{}", JobId::new()));
        std::fs::create_dir(&path).unwrap();
        // Some systems reach their temporary folder by a link.
        Scratch(path.canonicalize().unwrap())
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs one job with one attempt after the other as long as one is due, and
/// returns what became of it.
pub(super) async fn run(settings: &Settings, kind: &str, payload: &Value) -> JobRecord {
    run_job(settings, NewJob::new(kind, payload)).await
}

/// As [`run`]; every failed attempt is due again at once.
pub(super) async fn run_to_the_end(settings: &Settings, kind: &str, payload: &Value) -> JobRecord {
    run_job(settings, NewJob::new(kind, payload).retry(RetryPolicy::fixed(std::time::Duration::ZERO))).await
}

async fn run_job(settings: &Settings, job: NewJob) -> JobRecord {
    let client = Client::connect("sqlite::memory:").await.unwrap();
    client.migrate().await.unwrap();
    let id = client.enqueue(job).await.unwrap().id;
    let builder = register(Worker::builder(client.clone()), settings).unwrap();
    builder.build().unwrap().drain().await.unwrap();
    client.get(id).await.unwrap()
}

/// What a program says to `input`; `None` where there is no such program.
pub(super) fn piped(command: &mut Command, input: &[u8]) -> Option<String> {
    let Ok(mut child) = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn() else {
        eprintln!("skipped: {:?} is not installed", command.get_program());
        return None;
    };
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Whether a value fits a schema. A keyword it does not know fails the test.
pub(super) fn fits(schema: &Value, value: &Value) -> bool {
    let Value::Object(keywords) = schema else { panic!("{schema}") };
    keywords.iter().all(|(keyword, said)| match keyword.as_str() {
        "$schema" | "title" | "description" | "default" | "examples" => true,
        "type" => match said {
            Value::Array(names) => names.iter().any(|name| is(name, value)),
            name => is(name, value),
        },
        "properties" => said
            .as_object()
            .unwrap()
            .iter()
            .all(|(name, schema)| value.get(name).is_none_or(|value| fits(schema, value))),
        "required" => said.as_array().unwrap().iter().all(|name| value.get(name.as_str().unwrap()).is_some()),
        "additionalProperties" => {
            assert_eq!(said, false);
            let known = &schema["properties"];
            value.as_object().is_none_or(|fields| fields.keys().all(|name| known.get(name).is_some()))
        }
        "minimum" => value.as_f64().is_none_or(|number| number >= said.as_f64().unwrap()),
        "maximum" => value.as_f64().is_none_or(|number| number <= said.as_f64().unwrap()),
        "pattern" => {
            let pattern = regex::Regex::new(said.as_str().unwrap()).unwrap();
            value.as_str().is_none_or(|text| pattern.is_match(text))
        }
        unknown => panic!("`{unknown}`: teach it to this function"),
    })
}

fn is(name: &Value, value: &Value) -> bool {
    match name.as_str().unwrap() {
        "object" => value.is_object(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "null" => value.is_null(),
        other => panic!("`{other}`: teach it to this function"),
    }
}
