//! Logs and metrics of the long-running commands. `job_lines` owns the short lines about jobs
//! that `longshore dev` prints, `metrics` the metrics. Traces are in [`traces`](crate::traces).

mod job_lines;
mod metrics;

use std::io;

use tracing::{Metadata, Subscriber};
use tracing_subscriber::filter::{FilterExt, filter_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt, registry};

use crate::args::{self, LogFormat, Logging};
use crate::failure::Failure;
use crate::output::has_colours;
use crate::traces::Traces;

pub(super) use self::metrics::{record_metrics, serve_metrics};

/// Replaces the library's name of a setting with the name of its flag.
pub(super) fn by_flag(error: longshore::Error) -> Failure {
    let message = error.to_string();
    match error.field() {
        Some(field) => Failure::usage(message.replacen(field, &args::Work::flag(field), 1)),
        None => error.into(),
    }
}

/// How lines about jobs look in a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobLines {
    /// Like all other lines, with every field.
    Fields,
    /// Short, for people who try things out.
    Short,
}

/// Starts logging to standard error, and sends spans to `traces`.
pub(super) fn start_logging(
    logging: &Logging,
    job_lines: JobLines,
    traces: Option<&Traces>,
) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(&logging.log).map_err(|error| {
        Failure::usage(format_args!(
            "RUST_LOG: `{}` is not a valid filter ({error}); write a level, or targets with levels, \
             like info or longshore=debug,info",
            logging.log
        ))
    })?;
    match traces {
        None => registry()
            .with(filter)
            .with(filter_fn(is_logged))
            .with(lines(logging.log_format, job_lines))
            .init(),
        // The log's filters must not drop spans that are only traced.
        Some(traces) => registry()
            .with(lines(logging.log_format, job_lines).with_filter(filter.and(filter_fn(is_logged))))
            .with(traces.layer())
            .init(),
    }
    if logging.log_format == LogFormat::Json {
        log_panics();
    }
    Ok(())
}

/// The span of an enqueue is only for traces. Log lines do not need it, and recording it for them
/// would make every `POST /jobs` slower.
fn is_logged(item: &Metadata<'_>) -> bool {
    !(item.is_span() && item.name() == "enqueue" && item.target().starts_with("longshore"))
}

fn lines<S>(format: LogFormat, job_lines: JobLines) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let lines = fmt::layer().with_writer(io::stderr).with_target(false);
    match (format, job_lines) {
        (LogFormat::Json, _) => lines.json().boxed(),
        (LogFormat::Pretty, JobLines::Fields) => lines.with_ansi(has_colours(&io::stderr())).boxed(),
        (LogFormat::Pretty, JobLines::Short) => {
            lines.with_ansi(has_colours(&io::stderr())).event_format(job_lines::Short::default()).boxed()
        }
    }
}

/// Logs panics as JSON. The default prints text.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let message = panic.payload_as_str().unwrap_or("no message");
        let location = panic.location().map(ToString::to_string);
        tracing::error!(location, "panicked: {message}");
    }));
}
