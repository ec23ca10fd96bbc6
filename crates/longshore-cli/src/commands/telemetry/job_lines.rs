//! The lines about jobs that `longshore dev` prints: one short line for each end of an attempt.
//! All other lines have the usual format, with the same short times.

use std::fmt::{self, Write};

use chrono::Local;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::output::clean;

/// The target of the library's lines about jobs.
const TARGET: &str = "longshore::job";
/// Longer errors are cut, in characters; `longshore jobs show` has all of them.
const MAX_ERROR: usize = 200;

/// Formats lines about jobs.
pub(super) struct Short {
    others: Format<Full, TimeOfDay>,
}

impl Default for Short {
    fn default() -> Self {
        Short { others: tracing_subscriber::fmt::format().with_target(false).with_timer(TimeOfDay) }
    }
}

/// The local time, without the date.
struct TimeOfDay;

impl FormatTime for TimeOfDay {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        write!(writer, "{}", Local::now().format("%H:%M:%S"))
    }
}

impl<S, N> FormatEvent<S, N> for Short
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if event.metadata().target() != TARGET {
            return self.others.format_event(context, writer, event);
        }
        let mut line = JobLine::default();
        event.record(&mut line);
        let (dim, reset) = if writer.has_ansi_escapes() { ("\u{1b}[2m", "\u{1b}[0m") } else { ("", "") };
        writer.write_str(dim)?;
        TimeOfDay.format_time(&mut writer)?;
        writeln!(writer, "{reset} {}", line.text(writer.has_ansi_escapes()))
    }
}

/// The fields of a line about a job.
#[derive(Debug, Default)]
struct JobLine {
    message: String,
    outcome: String,
    kind: String,
    job_id: String,
    attempt: u64,
    max_attempts: u64,
    run_seconds: Option<f64>,
    error: Option<String>,
    next_run_in_seconds: Option<f64>,
}

impl Visit for JobLine {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "outcome" => self.outcome = value.to_owned(),
            "kind" => self.kind = clean(value),
            "error" => self.error = Some(clean(value)),
            _ => {}
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "attempt" => self.attempt = value,
            "max_attempts" => self.max_attempts = value,
            _ => {}
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        match field.name() {
            "run_seconds" => self.run_seconds = Some(value),
            "next_run_in_seconds" => self.next_run_in_seconds = Some(value),
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            "job_id" => self.job_id = format!("{value:?}"),
            _ => {}
        }
    }
}

impl JobLine {
    /// The line without its time, like
    /// `↻ send_email 01990a2b-0000-7000-8000-00003ff13c4d attempt 2 of 5, 1.2 s: refused; again in 12 s`.
    fn text(&self, has_colours: bool) -> String {
        if self.kind.is_empty() {
            // The number of suppressed lines.
            return format!("… {}", self.message);
        }
        let (mark, colour) = match self.outcome.as_str() {
            "succeeded" => ("✓", 32),
            "retrying" | "recovered" => ("↻", 33),
            "failed_permanent" => ("✗", 31),
            "lease_lost" => ("!", 33),
            _ => ("·", 36),
        };
        let mut text = match has_colours {
            true => format!("\u{1b}[{colour}m{mark}\u{1b}[0m "),
            false => format!("{mark} "),
        };
        // Writing to a string cannot fail.
        let _ =
            write!(text, "{} {} attempt {} of {}", self.kind, self.job_id, self.attempt, self.max_attempts);
        if let Some(ran) = self.run_seconds {
            let _ = write!(text, ", {}", duration(ran));
        }
        if let Some(error) = &self.error {
            let cut: String = error.chars().take(MAX_ERROR).collect();
            let dots = if cut.len() < error.len() { "…" } else { "" };
            let _ = write!(text, ": {cut}{dots}");
        }
        match self.outcome.as_str() {
            "succeeded" | "retrying" => {}
            "failed_permanent" => text.push_str("; failed permanently"),
            "lease_lost" => text.push_str("; lost the lease, another worker owns the job"),
            other => {
                let _ = write!(text, "; {other}");
            }
        }
        if let Some(delay) = self.next_run_in_seconds {
            let _ = match delay {
                ..0.001 => write!(text, "; again now"),
                delay => write!(text, "; again in {}", duration(delay)),
            };
        }
        text
    }
}

/// A duration for people: `12 ms`, `1.2 s`, `12 s`, `2 min 5 s`, `1 h 3 min`.
fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match seconds {
        ..0.9995 => format!("{:.0} ms", seconds * 1000.0),
        ..9.95 => format!("{seconds:.1} s"),
        ..59.5 => format!("{whole} s"),
        ..3599.5 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(outcome: &str) -> JobLine {
        JobLine {
            outcome: outcome.into(),
            kind: "send_email".into(),
            job_id: "01990a2b-0000-7000-8000-00003ff13c4d".into(),
            attempt: 2,
            max_attempts: 5,
            run_seconds: Some(1.23),
            ..JobLine::default()
        }
    }

    #[test]
    fn a_line_has_what_matters() {
        assert_eq!(
            line("succeeded").text(false),
            "✓ send_email 01990a2b-0000-7000-8000-00003ff13c4d attempt 2 of 5, 1.2 s"
        );
        let error = Some("refused".to_owned());
        let retrying = JobLine { error: error.clone(), next_run_in_seconds: Some(12.4), ..line("retrying") };
        let expected =
            "↻ send_email 01990a2b-0000-7000-8000-00003ff13c4d attempt 2 of 5, 1.2 s: refused; again in 12 s";
        assert_eq!(retrying.text(false), expected);
        let dead = JobLine { error, ..line("failed_permanent") };
        let expected = "✗ send_email 01990a2b-0000-7000-8000-00003ff13c4d attempt 2 of 5, 1.2 s: refused; failed permanently";
        assert_eq!(dead.text(false), expected);
        let released = JobLine { next_run_in_seconds: Some(0.0), ..line("released") };
        assert!(released.text(false).ends_with("1.2 s; released; again now"), "{released:?}");
    }

    #[test]
    fn only_the_mark_is_coloured() {
        let text = line("succeeded").text(true);
        assert_eq!(text.matches('\u{1b}').count(), 2, "{text:?}");
        assert!(text.starts_with("\u{1b}[32m✓\u{1b}[0m send_email"), "{text:?}");
    }

    #[test]
    fn a_long_error_is_cut() {
        let long = JobLine { error: Some("é".repeat(1000)), ..line("retrying") };
        assert_eq!(long.text(false).matches('é').count(), MAX_ERROR);
        assert!(long.text(false).ends_with('…'));
    }

    #[test]
    fn durations_are_readable() {
        for (seconds, text) in [
            (0.0, "0 ms"),
            (0.0124, "12 ms"),
            (0.9999, "1.0 s"),
            (9.94, "9.9 s"),
            (9.96, "10 s"),
            (125.0, "2 min 5 s"),
            (3780.0, "1 h 3 min"),
        ] {
            assert_eq!(duration(seconds), text);
        }
    }
}
