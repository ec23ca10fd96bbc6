//! The load on a server: keep-alive connections that send one prepared request
//! after another. A program of its own, so that what it costs is the same for
//! every server and in nobody's processor time.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::Result;
use crate::library::{KIND, payload};
use crate::report::Sample;

/// What is asked of a server.
#[derive(Args, Clone, Copy)]
pub(crate) struct Options {
    #[arg(long)]
    address: SocketAddr,
    #[arg(long)]
    clients: usize,
    #[arg(long)]
    seconds: f64,
    /// In one request; more than one go to `/jobs/batch`.
    #[arg(long)]
    jobs: u64,
}

/// The secret is not for other users to see in the list of processes.
const TOKEN: &str = "BENCH_TOKEN";

/// What came of it.
#[derive(Serialize, Deserialize)]
pub(crate) struct Outcome {
    jobs: u64,
    seconds: f64,
    /// How long each request took, shortest first.
    pub(crate) micros: Vec<u32>,
}

impl Outcome {
    /// `server_cpu`: what the server computed meanwhile.
    pub(crate) fn sample(&self, server_cpu: Option<Duration>) -> Sample {
        let took = Duration::from_secs_f64(self.seconds);
        Sample { jobs: self.jobs, took, wal_bytes: None, client_cpu: server_cpu }
    }

    /// The time within which so many of a hundred requests were answered.
    pub(crate) fn percentile(&self, share: usize) -> Duration {
        let at = (self.micros.len() * share / 100).min(self.micros.len().saturating_sub(1));
        Duration::from_micros(self.micros.get(at).copied().unwrap_or_default().into())
    }
}

/// The load of one phase.
#[derive(Clone, Copy)]
pub(super) struct Load<'a> {
    pub(super) address: SocketAddr,
    pub(super) token: Option<&'a str>,
    pub(super) clients: usize,
    pub(super) jobs: u64,
    pub(super) time: Duration,
}

impl Load<'_> {
    /// Puts it on the server, from a process of its own.
    pub(super) async fn run(self) -> Result<Outcome> {
        let mut program = Command::new(std::env::current_exe()?);
        program
            .arg("load")
            .args(["--address", &self.address.to_string()])
            .args(["--clients", &self.clients.to_string()])
            .args(["--seconds", &self.time.as_secs_f64().to_string()])
            .args(["--jobs", &self.jobs.to_string()])
            .env(TOKEN, self.token.unwrap_or_default())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let output = program.output().await?;
        if !output.status.success() {
            return Err(format!("the load: {}", String::from_utf8_lossy(&output.stderr).trim()).into());
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

/// The program itself: asks, and prints what came of it.
pub(crate) async fn run(options: Options) -> Result<()> {
    let token = std::env::var(TOKEN).ok().filter(|token| !token.is_empty());
    let request = request(&options, token.as_deref());
    let mut connections = Vec::new();
    for _ in 0..options.clients {
        connections.push(Connection::open(options.address).await?);
    }
    let began = Instant::now();
    let until = began + Duration::from_secs_f64(options.seconds);
    let send = |connection: Connection| tokio::spawn(connection.send_repeatedly(request.clone(), until));
    let tasks: Vec<_> = connections.into_iter().map(send).collect();
    let mut micros = Vec::new();
    for task in tasks {
        micros.extend(task.await??);
    }
    let seconds = began.elapsed().as_secs_f64();
    micros.sort_unstable();
    let outcome = Outcome { jobs: micros.len() as u64 * options.jobs, seconds, micros };
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(())
}

fn request(options: &Options, token: Option<&str>) -> Vec<u8> {
    let job = |n: u64| json!({ "kind": KIND, "payload": payload(n) });
    let (path, body) = match options.jobs {
        1 => ("/jobs", job(1).to_string()),
        jobs => ("/jobs/batch", serde_json::Value::from_iter((0..jobs).map(job)).to_string()),
    };
    let token = token.map_or(String::new(), |token| format!("authorization: Bearer {token}\r\n"));
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {}\r\n{token}content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        options.address,
        body.len()
    );
    (head + &body).into_bytes()
}

/// A keep-alive connection, and what has been read from it.
pub(crate) struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream, read: Vec::with_capacity(16 * 1024) })
    }

    /// Asks the same again and again until the time is up; how long each took.
    async fn send_repeatedly(mut self, request: Vec<u8>, until: Instant) -> Result<Vec<u32>> {
        let mut micros = Vec::new();
        loop {
            let began = Instant::now();
            if began >= until {
                return Ok(micros);
            }
            self.send(&request).await?;
            micros.push(began.elapsed().as_micros() as u32);
        }
    }

    /// Sends a request and reads the answer to its end; its body.
    pub(crate) async fn send(&mut self, request: &[u8]) -> Result<&[u8]> {
        self.stream.write_all(request).await?;
        self.read.clear();
        let mut length = None;
        loop {
            if self.stream.read_buf(&mut self.read).await? == 0 {
                return Err("the server closed the connection".into());
            }
            if length.is_none() {
                length = response_length(&self.read)?;
            }
            if let Some((head, whole)) = length
                && self.read.len() >= whole
            {
                return Ok(&self.read[head..whole]);
            }
        }
    }
}

/// Where the head of an answer ends and where its body does, once the head is
/// there. Anything but a success ends the run.
fn response_length(read: &[u8]) -> Result<Option<(usize, usize)>> {
    let Some(head) = read.windows(4).position(|four| four == b"\r\n\r\n") else { return Ok(None) };
    let text = std::str::from_utf8(&read[..head])?;
    if !text.starts_with("HTTP/1.1 2") {
        return Err(format!("the server answered {}", String::from_utf8_lossy(read)).into());
    }
    let length = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>())
    });
    let length = length.ok_or("an answer without a content-length")??;
    Ok(Some((head + 4, head + 4 + length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_where_its_length_says() {
        let answer = b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n{}";
        assert_eq!(response_length(&answer[..30]).unwrap(), None);
        assert_eq!(response_length(answer).unwrap(), Some((answer.len() - 2, answer.len())));
        assert!(response_length(b"HTTP/1.1 500 Internal Server Error\r\n\r\n").is_err());
    }
}
