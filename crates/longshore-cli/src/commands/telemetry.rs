//! What the commands that stay share: logs and metrics.

use std::io::{self, IsTerminal};
use std::net::SocketAddr;
use std::time::Duration;

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

use crate::args::{self, LogFormat, Logging};
use crate::failure::{Code, Failure};

/// The library names its settings; who typed a flag knows them by that.
pub(super) fn by_flag(error: longshore::Error) -> Failure {
    let told = error.to_string();
    match error.field() {
        Some(field) => Failure::usage(told.replacen(field, &args::Work::flag(field), 1)),
        None => error.into(),
    }
}

/// Sends log lines to standard error from here on.
pub(super) fn log(logging: &Logging) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(&logging.log).map_err(|error| {
        Failure::usage(format_args!(
            "RUST_LOG: `{}` is not a filter ({error}); write a level or targets with levels, \
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

/// From a claim, a millisecond, to a job of some minutes.
const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
const JOBS: &[f64] = &[0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];
/// How often the recorder tidies up, as its documentation asks for.
const TIDY_EVERY: Duration = Duration::from_secs(5);

fn prometheus() -> Result<PrometheusBuilder, BuildError> {
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)?
        .set_buckets_for_metric(Matcher::Suffix("_batch_jobs".into()), JOBS)
}

/// Whatever is counted from here on can be read at `addr`.
pub(super) fn serve_metrics(addr: SocketAddr) -> Result<(), Failure> {
    let wrong = |error: &dyn std::fmt::Display| {
        Failure::new(
            Code::Problem,
            format_args!(
                "metrics cannot be served at {addr}: {error}; \
                 give another address with --metrics-addr (WORKER_METRICS_BIND_ADDR), or off"
            ),
        )
    };
    let (recorder, exporter) = prometheus()
        .and_then(|builder| builder.with_http_listener(addr).build())
        .map_err(|error| wrong(&error))?;
    metrics::set_global_recorder(recorder).map_err(|error| wrong(&error))?;
    tokio::spawn(exporter);
    tracing::info!("metrics: http://{addr}/metrics");
    Ok(())
}

/// Whatever is counted from here on can be rendered.
pub(super) fn record_metrics() -> Result<PrometheusHandle, Failure> {
    let wrong = |error: &dyn std::fmt::Display| {
        Failure::new(Code::Problem, format_args!("metrics cannot be recorded: {error}"))
    };
    let recorder = prometheus().map_err(|error| wrong(&error))?.build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).map_err(|error| wrong(&error))?;
    let tidy = handle.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(TIDY_EVERY).await;
            tidy.run_upkeep();
        }
    });
    Ok(handle)
}
