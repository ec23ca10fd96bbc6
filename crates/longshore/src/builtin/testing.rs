//! Fixtures for the tests of the built-in kinds: a small HTTP server, a mail server, a
//! temporary folder, a queue that runs one job, and a JSON Schema validator with the
//! keywords that the schemas use.

#[path = "../../tests/mail/server.rs"]
mod mail;

use std::io::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::{Settings, register};
use crate::worker::Worker;
use crate::{Client, JobId, JobRecord, NewJob, RetryPolicy};

pub(super) use mail::MailServer;

/// A server on every IPv4 address of this machine. It sends the next response to each
/// connection and keeps the connection open.
pub(super) struct Server {
    port: u16,
    /// The local address of each connection, and its request.
    requests: mpsc::UnboundedReceiver<(IpAddr, String)>,
}

impl Server {
    pub(super) async fn responding(responses: &[&str]) -> Self {
        Self::responding_bytes(responses.iter().map(|response| response.as_bytes().to_vec()).collect()).await
    }

    pub(super) async fn responding_bytes(responses: Vec<Vec<u8>>) -> Self {
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sender, requests) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut open = Vec::new();
            for response in responses {
                let Ok((mut stream, _)) = listener.accept().await else { return };
                let request = read_request(&mut stream).await;
                let _ = sender.send((stream.local_addr().unwrap().ip(), request));
                // The client may close the connection before it has read everything.
                let _ = stream.write_all(&response).await;
                open.push(stream);
            }
            std::future::pending::<()>().await;
        });
        Server { port, requests }
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Waits for the next request and returns its head and body.
    pub(super) async fn next_request(&mut self) -> String {
        self.requests.recv().await.unwrap().1
    }

    /// Waits for the next request and returns the address that the client connected to.
    pub(super) async fn next_local_address(&mut self) -> String {
        self.requests.recv().await.unwrap().0.to_string()
    }

    /// The next request, if one has arrived.
    pub(super) fn pending_request(&mut self) -> Option<String> {
        self.requests.try_recv().ok().map(|(_, request)| request)
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
        assert!(read > 0, "the client closed the connection: {request:?}");
        request.extend_from_slice(&chunk[..read]);
    }
}

/// A temporary folder that is removed after the test.
pub(super) struct TempFolder(PathBuf);

impl TempFolder {
    pub(super) fn new() -> Self {
        let path = std::env::temp_dir().join(format!("longshore-builtin-{}", JobId::new()));
        std::fs::create_dir(&path).unwrap();
        // On some systems the path of temporary files contains a symbolic link.
        TempFolder(path.canonicalize().unwrap())
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs one job until no further attempt is due, and returns its record.
pub(super) async fn run(settings: &Settings, kind: &str, payload: &Value) -> JobRecord {
    run_job(settings, NewJob::new(kind, payload)).await
}

/// Like [`run`], but failed attempts are retried at once, so the job finishes unless it
/// requests a delay.
pub(super) async fn run_without_backoff(settings: &Settings, kind: &str, payload: &Value) -> JobRecord {
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

/// Runs a command with `input` and returns its output.
pub(super) fn output_of(command: &mut Command, input: &[u8]) -> String {
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = child.unwrap_or_else(|error| panic!("install {:?}: {error}", command.get_program()));
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

/// Whether a value conforms to a schema. Panics on an unknown keyword.
pub(super) fn conforms(schema: &Value, value: &Value) -> bool {
    let Value::Object(keywords) = schema else { panic!("{schema}") };
    keywords.iter().all(|(keyword, argument)| match keyword.as_str() {
        "$schema" | "title" | "description" | "default" | "examples" => true,
        "type" => match argument {
            Value::Array(names) => names.iter().any(|name| has_type(name, value)),
            name => has_type(name, value),
        },
        "properties" => argument
            .as_object()
            .unwrap()
            .iter()
            .all(|(name, schema)| value.get(name).is_none_or(|value| conforms(schema, value))),
        "required" => {
            argument.as_array().unwrap().iter().all(|name| value.get(name.as_str().unwrap()).is_some())
        }
        "additionalProperties" => {
            assert_eq!(argument, false);
            let known = &schema["properties"];
            value.as_object().is_none_or(|fields| fields.keys().all(|name| known.get(name).is_some()))
        }
        "minimum" => value.as_f64().is_none_or(|number| number >= argument.as_f64().unwrap()),
        "maximum" => value.as_f64().is_none_or(|number| number <= argument.as_f64().unwrap()),
        "pattern" => {
            let pattern = regex::Regex::new(argument.as_str().unwrap()).unwrap();
            value.as_str().is_none_or(|text| pattern.is_match(text))
        }
        unknown => panic!("keyword `{unknown}` is unknown; add it to this function"),
    })
}

fn has_type(name: &Value, value: &Value) -> bool {
    match name.as_str().unwrap() {
        "object" => value.is_object(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "null" => value.is_null(),
        other => panic!("type `{other}` is unknown; add it to this function"),
    }
}
