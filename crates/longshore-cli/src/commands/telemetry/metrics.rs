//! Metrics of the long-running commands: recording them, serving them on a worker's own port, and
//! the metrics of the process itself.

use std::fmt::Write;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder};
use tokio::net::TcpListener;

use crate::args::MetricsPort;
use crate::failure::{Code, Failure};

/// Histogram buckets for durations: from a claim (about a millisecond) to a job that takes
/// minutes.
const DURATION_BUCKETS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
/// Histogram buckets for batch sizes.
const BATCH_SIZE_BUCKETS: &[f64] = &[0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];
/// How often to run the recorder's own upkeep, which its documentation requires.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);
/// How many ports `--metrics-port auto` tries.
const MAX_PORTS: u16 = 100;
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

fn prometheus() -> Result<PrometheusBuilder, BuildError> {
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), DURATION_BUCKETS)?
        .set_buckets_for_metric(Matcher::Suffix("_batch_jobs".into()), BATCH_SIZE_BUCKETS)
}

/// Starts recording metrics. The returned function renders them in the Prometheus text format.
pub(in crate::commands) fn record_metrics()
-> Result<impl Fn() -> String + Clone + Send + Sync + 'static, Failure> {
    let failed = |error: &dyn std::fmt::Display| {
        Failure::new(Code::Problem, format_args!("cannot record metrics: {error}"))
    };
    let recorder = prometheus().map_err(|error| failed(&error))?.build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).map_err(|error| failed(&error))?;
    let upkeep = handle.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(UPKEEP_INTERVAL).await;
            upkeep.run_upkeep();
        }
    });
    let started_at = SystemTime::now();
    Ok(move || handle.render() + &process_metrics(started_at))
}

/// Starts recording metrics and serves them at `addr`. If its port is in use, another process
/// probably serves its own metrics there, and this one runs without.
pub(in crate::commands) async fn serve_metrics(addr: SocketAddr, port: MetricsPort) -> Result<(), Failure> {
    let listener = match bind(addr, port).await {
        Ok(listener) => listener,
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            tracing::warn!(
                "{addr} is in use, so this worker serves no metrics; choose another port with \
                 --metrics-port N (LONGSHORE_METRICS_PORT), or a free one with --metrics-port auto"
            );
            return Ok(());
        }
        Err(error) => return Err(unusable(addr, &error)),
    };
    let addr = listener.local_addr().map_err(|error| unusable(addr, &error))?;
    let render = record_metrics()?;
    let respond = move || {
        let text = render();
        async move { ([(header::CONTENT_TYPE, TEXT_FORMAT)], text) }
    };
    let router = Router::new()
        .route("/metrics", get(respond))
        .route("/health", get(|| async { "ok\n" }))
        .fallback(|| async { (StatusCode::NOT_FOUND, "the metrics are at /metrics\n") });
    let limits = longshore::api::Limits::default();
    tokio::spawn(longshore::api::serve(listener, router, limits, std::future::pending()));
    tracing::info!("serving metrics at http://{addr}/metrics");
    Ok(())
}

fn unusable(addr: SocketAddr, error: &io::Error) -> Failure {
    Failure::new(
        Code::Problem,
        format_args!(
            "cannot serve metrics at {addr}: {error}; \
             choose another address with --metrics-addr (WORKER_METRICS_BIND_ADDR), or off"
        ),
    )
}

async fn bind(addr: SocketAddr, port: MetricsPort) -> io::Result<TcpListener> {
    let mut ports = match port {
        MetricsPort::Fixed => addr.port()..=addr.port(),
        // Not a random port: with ports in a row, Prometheus can be told which to scrape.
        MetricsPort::Auto => addr.port()..=addr.port().saturating_add(MAX_PORTS - 1),
    };
    loop {
        let Some(port) = ports.next() else { return Err(io::ErrorKind::AddrInUse.into()) };
        match TcpListener::bind(SocketAddr::new(addr.ip(), port)).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            bound => return bound,
        }
    }
}

/// The metrics of this process that every Prometheus client library has, under the same names.
fn process_metrics(started_at: SystemTime) -> String {
    let started = started_at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let mut text = String::new();
    let mut add = |name: &str, kind: &str, help: &str, value: Option<f64>| {
        if let Some(value) = value {
            // Writing to a string cannot fail.
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n\n");
        }
    };
    add(
        "process_start_time_seconds",
        "gauge",
        "Start time of the process since the Unix epoch in seconds.",
        Some(started),
    );
    let usage = Usage::read();
    add("process_cpu_seconds_total", "counter", "User and system CPU time in seconds.", usage.cpu_seconds);
    add("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", usage.resident_bytes);
    add("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", usage.virtual_bytes);
    add("process_open_fds", "gauge", "Number of open file descriptors.", usage.open_fds);
    add("process_max_fds", "gauge", "Maximum number of open file descriptors.", usage.max_fds);
    add("process_threads", "gauge", "Number of threads of the process.", usage.threads);
    text
}

/// What the process uses; nothing where the system has no `/proc`.
#[derive(Debug, Default)]
struct Usage {
    cpu_seconds: Option<f64>,
    resident_bytes: Option<f64>,
    virtual_bytes: Option<f64>,
    open_fds: Option<f64>,
    max_fds: Option<f64>,
    threads: Option<f64>,
}

impl Usage {
    fn read() -> Self {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default();
        let (status, limits) = (read("status"), read("limits"));
        let of = |text: &str, name: &str| number_after(text, name);
        Usage {
            cpu_seconds: cpu_seconds(&read("stat")),
            resident_bytes: of(&status, "VmRSS:").map(|kibibytes| kibibytes * 1024.0),
            virtual_bytes: of(&status, "VmSize:").map(|kibibytes| kibibytes * 1024.0),
            // Reading the folder opens one more.
            open_fds: std::fs::read_dir("/proc/self/fd").ok().map(|fds| fds.count().saturating_sub(1) as f64),
            max_fds: of(&limits, "Max open files"),
            threads: of(&status, "Threads:"),
        }
    }
}

/// The first number after `name` at the start of a line.
fn number_after(text: &str, name: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

/// User and system time from `/proc/self/stat`, which counts in hundredths of a second on every
/// architecture that we build for.
fn cpu_seconds(stat: &str) -> Option<f64> {
    // The name of the program is in parentheses and may contain spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks: Vec<f64> =
        fields.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse().ok()).collect();
    (ticks.len() == 2).then(|| ticks.iter().sum::<f64>() / 100.0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_after_the_name_of_the_program() {
        let stat = "7 (a b) 9) S 1 2 3 4 5 6 7 8 9 10 250 50 1 1 20 0 4 0 99 0";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(cpu_seconds(""), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_uses_memory_files_and_threads() {
        let usage = Usage::read();
        assert!(
            usage.resident_bytes.unwrap() > 1e5 && usage.resident_bytes < usage.virtual_bytes,
            "{usage:?}"
        );
        assert!(usage.open_fds.unwrap() >= 3.0 && usage.threads.unwrap() >= 1.0, "{usage:?}");
        assert!(usage.cpu_seconds.is_some(), "{usage:?}");
    }

    #[tokio::test]
    async fn auto_takes_the_next_free_port() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = taken.local_addr().unwrap();
        let error = bind(addr, MetricsPort::Fixed).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        let bound = bind(addr, MetricsPort::Auto).await.unwrap().local_addr().unwrap();
        assert!(bound.port() > addr.port() && bound.port() < addr.port() + MAX_PORTS, "{bound}");
    }
}
