//! Logs and metrics of the long-running commands.

use std::io::{self, IsTerminal};
use std::net::SocketAddr;
use std::time::Duration;

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

use crate::args::{self, LogFormat, Logging};
use crate::failure::{Code, Failure};

/// Replaces the library's name of a setting with the name of its flag.
pub(super) fn by_flag(error: longshore::Error) -> Failure {
    let message = error.to_string();
    match error.field() {
        Some(field) => Failure::usage(message.replacen(field, &args::Work::flag(field), 1)),
        None => error.into(),
    }
}

/// Starts logging to standard error.
pub(super) fn start_logging(logging: &Logging) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(&logging.log).map_err(|error| {
        Failure::usage(format_args!(
            "RUST_LOG: `{}` is not a valid filter ({error}); write a level, or targets with levels, \
             like info or longshore=debug,info",
            logging.log
        ))
    })?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_target(false);
    match logging.log_format {
        LogFormat::Pretty => lines.with_ansi(io::stderr().is_terminal()).init(),
        LogFormat::Json => lines.json().init(),
    }
    Ok(())
}

/// Histogram buckets for durations: from a claim (about a millisecond) to a job that takes
/// minutes.
const DURATION_BUCKETS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
/// Histogram buckets for batch sizes.
const BATCH_SIZE_BUCKETS: &[f64] = &[0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];
/// How often to run the recorder's own upkeep, which its documentation requires.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

fn prometheus() -> Result<PrometheusBuilder, BuildError> {
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), DURATION_BUCKETS)?
        .set_buckets_for_metric(Matcher::Suffix("_batch_jobs".into()), BATCH_SIZE_BUCKETS)
}

/// Starts recording metrics and serves them at `addr`.
pub(super) fn serve_metrics(addr: SocketAddr) -> Result<(), Failure> {
    let failed = |error: &dyn std::fmt::Display| {
        Failure::new(
            Code::Problem,
            format_args!(
                "cannot serve metrics at {addr}: {error}; \
                 choose another address with --metrics-addr (WORKER_METRICS_BIND_ADDR), or off"
            ),
        )
    };
    let (recorder, exporter) = prometheus()
        .and_then(|builder| builder.with_http_listener(addr).build())
        .map_err(|error| failed(&error))?;
    metrics::set_global_recorder(recorder).map_err(|error| failed(&error))?;
    tokio::spawn(exporter);
    tracing::info!("serving metrics at http://{addr}/metrics");
    Ok(())
}

/// Starts recording metrics and returns a handle that renders them.
pub(super) fn record_metrics() -> Result<PrometheusHandle, Failure> {
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
    Ok(handle)
}
