//! `longshore worker`: logs, metrics and handlers around the library's worker.

use std::io::{self, IsTerminal};
use std::net::SocketAddr;

use longshore::Client;
use longshore::worker::{Summary, Worker};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use tracing_subscriber::EnvFilter;

use crate::args::{self, LogFormat};
use crate::builtin;
use crate::failure::{Code, Failure, Outcome};
use crate::output::Out;

pub(super) async fn run(client: Client, args: args::Worker, out: Out) -> Outcome {
    log(&args)?;
    let settings = args.settings();
    let builder = Worker::builder(client).settings(settings.clone());
    let builder = match args.simulate {
        true => builtin::simulate(builder),
        false => builtin::register(builder, &args.builtin.settings())?,
    };
    let worker = builder.build().map_err(by_flag)?;
    if let Some(addr) = args.metrics_addr() {
        serve_metrics(addr)?;
    }
    tracing::info!(
        queues = settings.queues.join(","),
        concurrency = settings.concurrency,
        simulate = args.simulate,
        "working"
    );
    let summary = if args.drain { worker.run_drain().await? } else { worker.run().await? };
    tell(&summary, out);
    Ok(Code::Done)
}

/// The library names its settings; who typed a flag knows them by that.
fn by_flag(error: longshore::Error) -> Failure {
    let told = error.to_string();
    match error.field() {
        Some(field) => Failure::usage(told.replacen(field, &args::Worker::flag(field), 1)),
        None => error.into(),
    }
}

fn log(args: &args::Worker) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(&args.log).map_err(|error| {
        Failure::usage(format_args!(
            "RUST_LOG: `{}` is not a filter ({error}); write a level or targets with levels, \
             like info or longshore=debug,info",
            args.log
        ))
    })?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_target(false);
    match args.log_format {
        LogFormat::Pretty => lines.with_ansi(io::stderr().is_terminal()).init(),
        LogFormat::Json => lines.json().init(),
    }
    Ok(())
}

/// Whatever is counted from here on can be read at `addr`.
fn serve_metrics(addr: SocketAddr) -> Result<(), Failure> {
    let wrong = |error: &dyn std::fmt::Display| {
        Failure::new(
            Code::Problem,
            format_args!(
                "metrics cannot be served at {addr}: {error}; \
                 give another address with --metrics-addr (WORKER_METRICS_BIND_ADDR), or off"
            ),
        )
    };
    let (recorder, exporter) = PrometheusBuilder::new()
        .with_http_listener(addr)
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)
        .and_then(|builder| builder.set_buckets_for_metric(Matcher::Suffix("_batch_jobs".into()), JOBS))
        .and_then(PrometheusBuilder::build)
        .map_err(|error| wrong(&error))?;
    metrics::set_global_recorder(recorder).map_err(|error| wrong(&error))?;
    tokio::spawn(exporter);
    tracing::info!("metrics: http://{addr}/metrics");
    Ok(())
}

/// From a claim, a millisecond, to a job of some minutes.
const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
const JOBS: &[f64] = &[0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];

fn tell(summary: &Summary, out: Out) {
    if out.json {
        return out.document(summary);
    }
    let Summary { succeeded, retrying, failed_permanent, cancelled, put_back } = summary;
    out.line(format_args!(
        "succeeded {succeeded}, retrying {retrying}, failed_permanent {failed_permanent}, \
         cancelled {cancelled}, put back {put_back}"
    ));
}
