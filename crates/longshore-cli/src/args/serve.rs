//! The arguments of `longshore dev` and `longshore serve`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::builtin::Builtin;
use super::worker::Recovery;
use super::{Logging, Work};
use crate::duration;

pub(super) const DEV_EXAMPLES: &str = "\
Examples:
  longshore dev
  longshore dev --bind 9000 --data-dir /tmp/try
  longshore dev --simulate            # simulate the built-in kinds
  longshore dev --allow-http --allow-outbound 127.0.0.1    # webhooks to this machine

All data is in the data folder. Delete the folder to start over. --outbox and --image-output are
inside it, unless they are absolute paths.";

pub(super) const SERVE_EXAMPLES: &str = "\
Examples:
  export DATABASE_URL=postgres://longshore@db/app
  longshore migrate && longshore serve
  longshore serve --with-worker --concurrency 16
  longshore tokens create ci --scope enqueue --scope read
  longshore serve --bind 0.0.0.0:8080 --auth tokens
  longshore serve --rate-limit 100 --queue-depth-limit 100000    # more gets status 429";

#[derive(Debug, Args)]
pub(crate) struct Dev {
    /// The folder for all data
    #[arg(long, value_name = "FOLDER", default_value = "./.longshore", env = "LONGSHORE_DATA_DIR")]
    pub(crate) data_dir: PathBuf,

    /// Simulate the built-in kinds: they do short steps, and some first attempts fail
    #[arg(long, env = "LONGSHORE_SIMULATE", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) simulate: bool,

    /// The queues to claim from; * for every queue
    #[arg(long, value_name = "A,B|*", value_delimiter = ',', default_value = longshore::ALL_QUEUES,
          env = "LONGSHORE_QUEUES")]
    pub(crate) queues: Vec<String>,

    /// How long running jobs may continue after a signal
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = duration::parse,
          env = "LONGSHORE_SHUTDOWN_GRACE")]
    pub(crate) shutdown_grace: Duration,

    #[command(flatten)]
    pub(crate) recovery: Recovery,

    #[command(flatten)]
    pub(crate) listen: Listen,

    #[command(flatten)]
    pub(crate) logging: Logging,

    #[command(flatten)]
    pub(crate) builtin: Builtin,
}

#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// Run a worker with the built-in kinds in the same process
    #[arg(long, env = "LONGSHORE_WITH_WORKER", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) with_worker: bool,

    /// Create the tables or bring them up to date before starting
    #[arg(long)]
    pub(crate) migrate: bool,

    #[command(flatten)]
    pub(crate) listen: Listen,

    #[command(flatten, next_help_heading = "Worker and upkeep")]
    pub(crate) work: Work,
}

/// Where the API listens, who may use it, and its limits.
#[derive(Debug, Args)]
pub(crate) struct Listen {
    /// The address the API listens on; a port alone means 127.0.0.1
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080", value_parser = bind_address,
          env = "API_BIND_ADDR")]
    pub(crate) bind: SocketAddr,

    /// Who may use the API
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Auth::Off, env = "LONGSHORE_AUTH")]
    pub(crate) auth: Auth,

    /// Host names to accept in addition to the server's own address; * for any. On loopback, requests
    /// for other host names are rejected
    #[arg(long = "host", value_name = "NAME", value_delimiter = ',', env = "LONGSHORE_HOSTS")]
    pub(crate) hosts: Vec<String>,

    /// Accept jobs of unregistered kinds
    #[arg(long, env = "LONGSHORE_ALLOW_UNKNOWN_KINDS",
          value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) allow_unknown_kinds: bool,

    /// What may be read without a token, in addition to /health
    #[arg(long, value_enum, value_name = "WHAT", value_delimiter = ',', env = "LONGSHORE_PUBLIC")]
    pub(crate) public: Vec<Public>,

    /// How long a request may take
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse,
          env = "LONGSHORE_REQUEST_TIMEOUT")]
    pub(crate) request_timeout: Duration,

    /// How long a request body may take to arrive, plus its length divided by 64 KiB per second. After
    /// that, the request gets status 408
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse,
          env = "LONGSHORE_BODY_TIMEOUT")]
    pub(crate) body_timeout: Duration,

    /// How many bytes of request bodies over 64 KiB the server keeps at once. A request above that gets status 503
    /// before its body is read
    #[arg(long, value_name = "BYTES", default_value_t = 256 * 1024 * 1024, env = "LONGSHORE_MAX_BODY_BYTES")]
    pub(crate) max_body_bytes: usize,

    /// How many connections may be open at once. For one more, the server closes the connection that has
    /// waited for its client the longest. Calls that wait for work may use half of them
    #[arg(long, value_name = "N", default_value_t = 1024, env = "LONGSHORE_MAX_CONNECTIONS")]
    pub(crate) max_connections: usize,

    /// The addresses or networks of proxies in front of the server. They may use all connections; another
    /// address may use three quarters
    #[arg(long, value_name = "CIDR,…", value_delimiter = ',', env = "LONGSHORE_TRUSTED_PROXIES")]
    pub(crate) trusted_proxies: Vec<longshore::Network>,

    /// How many requests per second each token may make. All callers without a token share one limit
    #[arg(long, value_name = "N|none", default_value = "none", value_parser = limit,
          env = "LONGSHORE_RATE_LIMIT")]
    pub(crate) rate_limit: Limit,

    /// How many jobs may wait in a queue before the API accepts no more for it
    #[arg(long, value_name = "N|none", default_value = "none", value_parser = limit,
          env = "LONGSHORE_QUEUE_DEPTH_LIMIT")]
    pub(crate) queue_depth_limit: Limit,

    /// Show no payloads and results on the dashboard
    #[arg(long, env = "LONGSHORE_HIDE_PAYLOADS", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) hide_payloads: bool,

    /// Values that the dashboard hides, like `send_email:password` or `pay:cards.*.number`; may be repeated
    #[arg(long, value_name = "KIND:PATH", value_delimiter = ',', value_parser = redaction,
          env = "LONGSHORE_REDACT")]
    pub(crate) redact: Vec<Redaction>,

    /// The path under which browsers see the server, if a proxy removes it, like /queue
    #[arg(long, value_name = "PATH", env = "LONGSHORE_BASE_PATH")]
    pub(crate) base_path: Option<String>,
}

/// A value of the payloads of a kind that the dashboard hides.
#[derive(Clone, Debug)]
pub(crate) struct Redaction {
    pub(crate) kind: String,
    pub(crate) path: String,
}

fn redaction(text: &str) -> Result<Redaction, String> {
    match text.rsplit_once(':') {
        Some((kind, path)) if !kind.is_empty() && !path.is_empty() => {
            Ok(Redaction { kind: kind.to_owned(), path: path.to_owned() })
        }
        _ => Err("write the kind, a colon and the path of the value, like send_email:password".into()),
    }
}

/// Parses `9000`, `:9000`, `localhost:9000` or an IP address with a port. Without an address it is
/// loopback, because an address that other machines can reach must be a choice.
fn bind_address(text: &str) -> Result<SocketAddr, String> {
    let invalid = || {
        format!(
            "`{text}` is not an address; write a port, like 9000, or an IP address and a port, like 0.0.0.0:9000 \
             or [::1]:9000"
        )
    };
    let text = text.trim();
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let port = text.strip_prefix("localhost:").or_else(|| text.strip_prefix(':')).unwrap_or(text);
    let port = port.parse().map_err(|_| invalid())?;
    Ok(SocketAddr::from(([127, 0, 0, 1], port)))
}

/// A limit of the API; `None` is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit(pub(crate) Option<u32>);

fn limit(text: &str) -> Result<Limit, String> {
    match text {
        "none" => Ok(Limit(None)),
        _ => text
            .parse::<std::num::NonZeroU32>()
            .map(|limit| Limit(Some(limit.get())))
            .map_err(|_| format!("`{text}` is not a limit; write a whole number of at least 1, or none")),
    }
}

/// Who may use the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Auth {
    /// Everyone who can reach it; allowed only on loopback
    Off,
    /// Callers with a token (`longshore tokens create`)
    Tokens,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Public {
    /// GET /metrics
    Metrics,
    /// GET /docs and the OpenAPI document
    Docs,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_be_a_port_alone() {
        for (text, expected) in [
            ("9000", "127.0.0.1:9000"),
            (":9000", "127.0.0.1:9000"),
            ("localhost:9000", "127.0.0.1:9000"),
            ("127.0.0.1:0", "127.0.0.1:0"),
            ("0.0.0.0:9000", "0.0.0.0:9000"),
            ("[::1]:9000", "[::1]:9000"),
        ] {
            assert_eq!(bind_address(text).unwrap().to_string(), expected, "{text}");
        }
        for text in ["", "localhost", "127.0.0.1", "queue.example.com:9000", "99999", ":", "::1"] {
            assert!(bind_address(text).unwrap_err().contains("like 0.0.0.0:9000"), "{text}");
        }
    }
}
