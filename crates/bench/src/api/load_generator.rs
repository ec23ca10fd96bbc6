//! The load generator: keep-alive connections that send the same prepared request
//! repeatedly. It runs as a separate process, so that its cost is the same for every server
//! and is not part of the server's CPU time.

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

/// The options of the load generator's process.
#[derive(Args, Clone, Copy)]
pub(crate) struct Options {
    #[arg(long)]
    address: SocketAddr,
    #[arg(long)]
    clients: usize,
    #[arg(long)]
    seconds: f64,
    /// Jobs per request; several jobs are sent to `/jobs/batch`.
    #[arg(long)]
    jobs: u64,
}

/// The variable with the API token. Arguments would be visible in the list of processes.
const TOKEN_VARIABLE: &str = "BENCH_TOKEN";

/// What the load generator measured.
#[derive(Serialize, Deserialize)]
pub(crate) struct Outcome {
    jobs: u64,
    seconds: f64,
    /// The duration of each request, in ascending order.
    pub(crate) micros: Vec<u32>,
}

impl Outcome {
    /// `server_cpu`: the CPU time of the server during the load.
    pub(crate) fn sample(&self, server_cpu: Option<Duration>) -> Sample {
        let took = Duration::from_secs_f64(self.seconds);
        Sample { jobs: self.jobs, took, wal_bytes: None, client_cpu: server_cpu }
    }

    /// The duration that `share` percent of the requests did not exceed.
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
    /// Runs the load generator in its own process.
    pub(super) async fn run(self) -> Result<Outcome> {
        let mut program = Command::new(std::env::current_exe()?);
        program
            .arg("load")
            .args(["--address", &self.address.to_string()])
            .args(["--clients", &self.clients.to_string()])
            .args(["--seconds", &self.time.as_secs_f64().to_string()])
            .args(["--jobs", &self.jobs.to_string()])
            .env(TOKEN_VARIABLE, self.token.unwrap_or_default())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let output = program.output().await?;
        if !output.status.success() {
            return Err(format!(
                "the load generator failed: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            )
            .into());
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

/// The load generator's process: sends requests and prints the outcome as JSON.
pub(crate) async fn run(options: Options) -> Result<()> {
    let token = std::env::var(TOKEN_VARIABLE).ok().filter(|token| !token.is_empty());
    let request = request(&options, token.as_deref());
    let mut connections = Vec::new();
    for _ in 0..options.clients {
        connections.push(Connection::open(options.address).await?);
    }
    let started = Instant::now();
    let until = started + Duration::from_secs_f64(options.seconds);
    let send = |connection: Connection| tokio::spawn(connection.send_repeatedly(request.clone(), until));
    let tasks: Vec<_> = connections.into_iter().map(send).collect();
    let mut micros = Vec::new();
    for task in tasks {
        micros.extend(task.await??);
    }
    let seconds = started.elapsed().as_secs_f64();
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

/// A keep-alive connection, and the response that is being read from it.
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

    /// Sends the same request repeatedly until the given time; returns the duration of each.
    async fn send_repeatedly(mut self, request: Vec<u8>, until: Instant) -> Result<Vec<u32>> {
        let mut micros = Vec::new();
        loop {
            let started = Instant::now();
            if started >= until {
                return Ok(micros);
            }
            self.send(&request).await?;
            micros.push(started.elapsed().as_micros() as u32);
        }
    }

    /// Sends a request, reads the whole response, and returns its body.
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

/// The positions where the body of a response starts and ends, once the head has been
/// read. A response other than a success is an error.
fn response_length(read: &[u8]) -> Result<Option<(usize, usize)>> {
    let Some(head) = read.windows(4).position(|four| four == b"\r\n\r\n") else { return Ok(None) };
    let text = std::str::from_utf8(&read[..head])?;
    if !text.starts_with("HTTP/1.1 2") {
        return Err(format!("the server responded with {}", String::from_utf8_lossy(read)).into());
    }
    let length = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>())
    });
    let length = length.ok_or("the response has no content-length")??;
    Ok(Some((head + 4, head + 4 + length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_ends_where_its_content_length_says() {
        let response = b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n{}";
        assert_eq!(response_length(&response[..30]).unwrap(), None);
        assert_eq!(response_length(response).unwrap(), Some((response.len() - 2, response.len())));
        assert!(response_length(b"HTTP/1.1 500 Internal Server Error\r\n\r\n").is_err());
    }
}
