//! Logs and metrics of the long-running commands. `job_lines` owns the short lines about jobs
//! that `longshore dev` prints, `metrics` the metrics. Traces are in [`traces`](crate::traces).

mod job_lines;
mod metrics;

use std::io::{self, Write};

use tracing::{Metadata, Subscriber};
use tracing_subscriber::filter::{FilterExt, filter_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt, registry};

use crate::args::{self, LogFormat, Logging};
use crate::failure::Failure;
use crate::output::{escape, has_colours};
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
        (LogFormat::Json, _) => lines.json().with_writer(|| EscapedJson(io::stderr())).boxed(),
        (LogFormat::Pretty, JobLines::Fields) => lines.with_ansi(has_colours(&io::stderr())).boxed(),
        (LogFormat::Pretty, JobLines::Short) => {
            lines.with_ansi(has_colours(&io::stderr())).event_format(job_lines::Short::default()).boxed()
        }
    }
}

/// Escapes what could control a terminal in lines of JSON. The formatter escapes only what JSON requires, so it keeps
/// the control characters above ASCII and those that reorder text.
struct EscapedJson<W>(W);

impl<W: Write> Write for EscapedJson<W> {
    /// The formatter writes whole lines.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.write_all(escape(&String::from_utf8_lossy(line)).as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_json_log_cannot_control_a_terminal_and_keeps_its_meaning() {
        let written = Written::default();
        let writer = written.clone();
        let lines = fmt::layer().json().with_writer(move || EscapedJson(writer.clone()));
        let hostile = "\u{1b}[31m\u{9b}2J\u{85}\u{202e}txt\u{2066}\u{2028}\u{7f}ü";
        tracing::subscriber::with_default(registry().with(lines), || {
            tracing::info!(kind = hostile, "job {hostile}");
        });
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.matches('\n').count(), 1, "{text:?}");
        assert_eq!(text.trim_end(), escape(text.trim_end()), "nothing is left to escape");
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["fields"]["kind"], hostile);
        assert_eq!(line["fields"]["message"], format!("job {hostile}"));
    }
}
