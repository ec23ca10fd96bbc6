//! The arguments of `longshore worker`, and the library settings they become. `longshore
//! serve` shares most of them.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use longshore::Retention;
use longshore::worker::{RecoverySettings, Settings};

use super::builtin::Builtin;
use crate::duration;

pub(super) const EXAMPLES: &str = "\
Examples:
  longshore worker                                      # run the built-in kinds
  longshore worker --queues mail,images --concurrency 16
  longshore worker --queues '*'                         # every queue
  longshore worker --outbox /var/spool/mail-out --image-output /srv/pictures
  longshore worker --allow-http --allow-outbound 127.0.0.1,10.0.0.0/8
  longshore worker --drain --json                       # run the due jobs, then exit
  longshore worker --simulate                           # simulate the built-in kinds
  longshore worker --metrics-addr 0.0.0.0:9091
  longshore worker --metrics-port auto                  # a second worker on the same machine
  LONGSHORE_SWEEP_THRESHOLD=90s RUST_LOG_FORMAT=json longshore worker

The built-in kinds are send_email, resize_image, summarize_text and webhook_delivery. For your own
kinds, write a worker with the library (`longshore::worker`).

Metrics: curl http://127.0.0.1:9091/metrics";

#[derive(Debug, Args)]
pub(crate) struct Worker {
    /// Run the jobs that are due, print a summary, and exit
    #[arg(long)]
    pub(crate) drain: bool,

    /// The address that serves GET /metrics for Prometheus, or off. With --drain the default is off
    // A drain is too short to be scraped, and may run next to a worker that already uses
    // the address.
    #[arg(long, value_name = "ADDR|off", value_parser = metrics_addr, env = "WORKER_METRICS_BIND_ADDR",
          default_value = "127.0.0.1:9091", default_value_if("drain", "true", "off"))]
    metrics_addr: MetricsAddr,

    /// The port of --metrics-addr, or auto: the first free port from there on. If the port is in use,
    /// the worker warns and serves no metrics
    #[arg(long, value_name = "PORT|auto", value_parser = metrics_port, env = "LONGSHORE_METRICS_PORT")]
    metrics_port: Option<PortArg>,

    #[command(flatten)]
    pub(crate) work: Work,
}

/// How jobs run and how upkeep is done, for `worker` and for `serve`.
#[derive(Debug, Args)]
pub(crate) struct Work {
    /// Simulate the built-in kinds: they do short steps, and some first attempts fail
    ///
    /// Nothing is sent, fetched or written. The job's id determines which attempts fail and at which
    /// step, so a run can be repeated exactly.
    #[arg(long, env = "LONGSHORE_SIMULATE", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) simulate: bool,

    /// The queues to claim from; * for every queue, including new ones
    #[arg(
        long,
        value_name = "A,B|*",
        value_delimiter = ',',
        default_value = longshore::DEFAULT_QUEUE,
        env = "LONGSHORE_QUEUES"
    )]
    queues: Vec<String>,

    /// How many jobs run at once
    #[arg(long, value_name = "N", default_value_t = 4, env = "WORKER_CONCURRENCY")]
    concurrency: u32,

    /// How often an idle worker polls for jobs it was not notified of
    #[arg(long, value_name = "DURATION", default_value = "500ms", value_parser = duration::parse,
          env = "LONGSHORE_POLL_INTERVAL")]
    poll_interval: Duration,

    /// The longest polling interval; the interval doubles up to this while there are no jobs
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = duration::parse,
          env = "LONGSHORE_MAX_POLL_INTERVAL")]
    max_poll_interval: Duration,

    /// How often the worker sends a heartbeat
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse,
          env = "LONGSHORE_HEARTBEAT_INTERVAL")]
    heartbeat_interval: Duration,

    /// How often to look for dead workers
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration::parse,
          env = "LONGSHORE_SWEEP_INTERVAL")]
    sweep_interval: Duration,

    /// How long this worker may go without a heartbeat before it counts as dead and its jobs are
    /// recovered; at least three heartbeat intervals
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration::parse,
          env = "LONGSHORE_SWEEP_THRESHOLD")]
    sweep_threshold: Duration,

    /// How long a recovered job waits before it is due again
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration::parse,
          env = "LONGSHORE_RECOVERY_DELAY")]
    recovery_delay: Duration,

    /// After this many interruptions a job ends as failed_permanent, because it may be what kills its
    /// workers
    #[arg(long, value_name = "N", default_value_t = 3, env = "LONGSHORE_MAX_INTERRUPTIONS")]
    max_interruptions: u16,

    #[command(flatten)]
    recovery: Recovery,

    /// How long running jobs may continue after a signal
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse,
          env = "LONGSHORE_SHUTDOWN_GRACE")]
    shutdown_grace: Duration,

    /// How long succeeded jobs are kept, or forever
    #[arg(long, value_name = "DURATION|forever", default_value = "7d", value_parser = keep,
          env = "LONGSHORE_KEEP_SUCCEEDED")]
    keep_succeeded: Keep,

    /// How long cancelled jobs are kept, or forever
    #[arg(long, value_name = "DURATION|forever", default_value = "7d", value_parser = keep,
          env = "LONGSHORE_KEEP_CANCELLED")]
    keep_cancelled: Keep,

    /// How long dead letters (failed_permanent) are kept, or forever
    #[arg(long, value_name = "DURATION|forever", default_value = "90d", value_parser = keep,
          env = "LONGSHORE_KEEP_DEAD")]
    keep_dead: Keep,

    /// The prefix of the worker's name
    #[arg(long, value_name = "TEXT", default_value = "worker", env = "LONGSHORE_WORKER_ID_PREFIX")]
    worker_id_prefix: String,

    #[command(flatten)]
    pub(crate) logging: Logging,

    #[command(flatten)]
    pub(crate) builtin: Builtin,
}

/// Whether this process recovers jobs, and which jobs need a longer threshold. `worker`, `serve` and
/// `dev` have these settings.
#[derive(Debug, Args)]
pub(crate) struct Recovery {
    /// Whether this process recovers the jobs of dead workers
    ///
    /// Turn it off if the hooks of your own workers decide about interrupted jobs: a process that
    /// recovers a job first does not call the hooks of another one. Some process must recover jobs.
    #[arg(long, value_enum, value_name = "on|off", default_value_t = Switch::On,
          hide_possible_values = true, env = "LONGSHORE_RECOVERY")]
    recovery: Switch,

    /// The flags of resilient jobs; '' for none. A worker that holds such a job is declared dead only
    /// after --resilient-factor times its threshold
    #[arg(long, value_name = "A,B", value_delimiter = ',',
          default_value = longshore::INFRASTRUCTURE_RESILIENT_FLAG, env = "LONGSHORE_RESILIENT_FLAGS")]
    resilient_flags: Vec<String>,

    /// The factor for workers that hold a resilient job
    #[arg(long, value_name = "N", default_value_t = 3, env = "LONGSHORE_RESILIENT_FACTOR")]
    resilient_factor: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

impl Recovery {
    /// The library's settings; the delay and the limit of interruptions are the defaults.
    pub(crate) fn settings(&self) -> RecoverySettings {
        RecoverySettings::default()
            .enabled(self.recovery == Switch::On)
            .resilient_flags(without_empty(&self.resilient_flags))
            .resilient_factor(self.resilient_factor)
    }
}

/// The items of a list. An empty string is an empty list.
fn without_empty(items: &[String]) -> impl Iterator<Item = &String> {
    items.iter().filter(|item| !item.is_empty())
}

/// What is logged, and in which format.
#[derive(Debug, Args)]
pub(crate) struct Logging {
    /// What to log to standard error, like info, debug or longshore=debug,info
    #[arg(long = "log", value_name = "FILTER", default_value = "info", env = "RUST_LOG")]
    pub(crate) log: String,

    /// The format of log lines
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = LogFormat::Pretty,
          env = "RUST_LOG_FORMAT")]
    pub(crate) log_format: LogFormat,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Text for people
    Pretty,
    /// One JSON object per line
    Json,
}

/// How long finished jobs are kept; `None` is forever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Keep(Option<Duration>);

/// The address that serves metrics; `None` is off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MetricsAddr(Option<SocketAddr>);

/// The value of `--metrics-port`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PortArg {
    Auto,
    Port(u16),
}

/// What to do if the port for metrics is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MetricsPort {
    /// Serve no metrics.
    Fixed,
    /// Take the next free port.
    Auto,
}

impl Worker {
    /// The address to serve metrics on, if any.
    pub(crate) fn metrics_addr(&self) -> Option<(SocketAddr, MetricsPort)> {
        let mut addr = self.metrics_addr.0?;
        if let Some(PortArg::Port(port)) = self.metrics_port {
            addr.set_port(port);
        }
        let is_auto = self.metrics_port == Some(PortArg::Auto);
        Some((addr, if is_auto { MetricsPort::Auto } else { MetricsPort::Fixed }))
    }
}

impl Work {
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            queues: self.queues.clone(),
            concurrency: self.concurrency,
            poll_interval: self.poll_interval,
            max_poll_interval: self.max_poll_interval,
            heartbeat_interval: self.heartbeat_interval,
            stale_after: self.sweep_threshold,
            sweep_interval: self.sweep_interval,
            recovery: self
                .recovery
                .settings()
                .delay(self.recovery_delay)
                .max_interruptions(self.max_interruptions),
            shutdown_grace: self.shutdown_grace,
            retention: Retention {
                succeeded: self.keep_succeeded.0,
                cancelled: self.keep_cancelled.0,
                failed_permanent: self.keep_dead.0,
            },
            name_prefix: self.worker_id_prefix.clone(),
            ..Settings::default()
        }
    }

    /// The name of the flag for a field of [`Settings`] or of the settings of the built-in kinds.
    pub(crate) fn flag(field: &str) -> String {
        match field {
            "stale_after" => "--sweep-threshold".into(),
            "name_prefix" => "--worker-id-prefix".into(),
            "webhook_secrets" => "--webhook-secret".into(),
            _ => format!("--{}", field.replace('_', "-")),
        }
    }
}

fn keep(text: &str) -> Result<Keep, String> {
    match text {
        "forever" => Ok(Keep(None)),
        _ => {
            duration::parse(text).map(|kept| Keep(Some(kept))).map_err(|error| format!("{error}, or forever"))
        }
    }
}

fn metrics_addr(text: &str) -> Result<MetricsAddr, String> {
    match text {
        "off" => Ok(MetricsAddr(None)),
        _ => text.parse().map(|addr| MetricsAddr(Some(addr))).map_err(|_| {
            format!("`{text}` is not an address; write an IP address and a port, like 127.0.0.1:9091, or off")
        }),
    }
}

fn metrics_port(text: &str) -> Result<PortArg, String> {
    match text {
        "auto" => Ok(PortArg::Auto),
        _ => text.parse().map(PortArg::Port).map_err(|_| {
            format!("`{text}` is not a port; write a number up to 65535, like 9092, or auto for a free one")
        }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use clap::Parser;

    use crate::args::{Cli, Command};

    use super::*;

    fn worker(line: &str) -> Worker {
        let words = ["longshore", "worker"].into_iter().chain(line.split_whitespace());
        match Cli::try_parse_from(words).unwrap().command {
            Command::Worker(worker) => *worker,
            _ => unreachable!(),
        }
    }

    #[test]
    fn the_flag_defaults_match_the_librarys_defaults() {
        let (ours, theirs) = (worker("").work.settings(), Settings::default());
        assert_eq!(format!("{ours:?}"), format!("{theirs:?}"));
    }

    #[test]
    fn every_flag_reaches_its_setting() {
        let settings = worker(
            "--queues mail,images --concurrency 7 --poll-interval 11ms --max-poll-interval 12ms \
             --heartbeat-interval 13s --sweep-interval 14s --sweep-threshold 15m --recovery-delay 16s \
             --max-interruptions 17 --shutdown-grace 18s --keep-succeeded 19h --keep-cancelled 20h \
             --keep-dead forever --worker-id-prefix crane --recovery off --resilient-flags slow,big \
             --resilient-factor 21",
        )
        .work
        .settings();
        let (milli, second) = (Duration::from_millis(1), Duration::from_secs(1));
        let expected = Settings {
            queues: vec!["mail".into(), "images".into()],
            concurrency: 7,
            poll_interval: 11 * milli,
            max_poll_interval: 12 * milli,
            heartbeat_interval: 13 * second,
            sweep_interval: 14 * second,
            stale_after: 15 * 60 * second,
            recovery: RecoverySettings {
                enabled: false,
                delay: 16 * second,
                max_interruptions: 17,
                resilient_flags: vec!["slow".into(), "big".into()],
                resilient_factor: 21,
            },
            shutdown_grace: 18 * second,
            retention: Retention {
                succeeded: Some(19 * 3600 * second),
                cancelled: Some(20 * 3600 * second),
                failed_permanent: None,
            },
            name_prefix: "crane".into(),
            ..Settings::default()
        };
        assert_eq!(format!("{settings:?}"), format!("{expected:?}"));
    }

    #[test]
    fn an_empty_list_of_resilient_flags_is_none() {
        let flags = |line: &str| worker(line).work.settings().recovery.resilient_flags;
        assert_eq!(flags(""), [longshore::INFRASTRUCTURE_RESILIENT_FLAG]);
        assert_eq!(flags("--resilient-flags="), Vec::<String>::new());
    }

    #[test]
    fn dev_has_the_recovery_settings_of_a_worker() {
        let words = "longshore dev --recovery off --resilient-flags slow --resilient-factor 4".split(' ');
        let Command::Dev(dev) = Cli::try_parse_from(words).unwrap().command else { unreachable!() };
        let expected =
            RecoverySettings::default().enabled(false).resilient_flags(["slow"]).resilient_factor(4);
        assert_eq!(format!("{:?}", dev.recovery.settings()), format!("{expected:?}"));
    }

    #[test]
    fn retention_is_a_duration_or_forever() {
        assert_eq!(
            (keep("90d"), keep("forever")),
            (Ok(Keep(Some(90 * 24 * Duration::from_secs(3600)))), Ok(Keep(None)))
        );
        assert!(keep("long").unwrap_err().ends_with("1h30m, or forever"));
    }

    #[test]
    fn the_metrics_address_is_an_address_or_off() {
        assert_eq!(worker("").metrics_addr().unwrap().0.to_string(), "127.0.0.1:9091");
        assert_eq!(worker("--metrics-addr off").metrics_addr(), None);
        assert_eq!(worker("--drain").metrics_addr(), None);
        assert_eq!(worker("--drain --metrics-addr 127.0.0.1:1").metrics_addr().unwrap().0.port(), 1);
        assert_eq!(metrics_addr("[::1]:9091").unwrap().0.unwrap().port(), 9091);
        for text in ["", "9091", "localhost", "127.0.0.1"] {
            assert!(metrics_addr(text).unwrap_err().contains("like 127.0.0.1:9091, or off"), "{text}");
        }
    }

    #[test]
    fn the_metrics_port_replaces_the_port_of_the_address() {
        let addr = |line: &str| worker(line).metrics_addr().map(|(addr, port)| (addr.to_string(), port));
        let fixed = |text: &str| Some((text.to_owned(), MetricsPort::Fixed));
        assert_eq!(addr("--metrics-port 9092"), fixed("127.0.0.1:9092"));
        assert_eq!(addr("--metrics-addr 0.0.0.0:1 --metrics-port 9092"), fixed("0.0.0.0:9092"));
        assert_eq!(addr("--metrics-port auto"), Some(("127.0.0.1:9091".into(), MetricsPort::Auto)));
        assert_eq!(addr("--metrics-addr off --metrics-port auto"), None);
        for text in ["", "many", "65536", "-1"] {
            assert!(metrics_port(text).unwrap_err().contains("like 9092, or auto"), "{text}");
        }
    }
}
