//! `longshore health`, `longshore counts` and `longshore stats`: whether the queue responds,
//! how many jobs it has, and its throughput.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use longshore::Status;
use serde::Deserialize;

use crate::args;
use crate::endpoint::{Endpoint, Reply};
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Fit, Out, RawObject, Table, instant};

/// Prints `ok` if the queue responds; otherwise the request fails.
pub(super) async fn health(endpoint: &Endpoint, out: &Out) -> Outcome {
    let reply = endpoint.get(&["health"]).send().await?;
    if out.json {
        out.document(&reply.read::<RawObject>()?);
    } else {
        out.line("ok");
    }
    Ok(Code::Done)
}

// ---- counts ----------------------------------------------------------------------

/// The number of jobs of a queue and kind in a status.
#[derive(Deserialize)]
pub(super) struct Count {
    status: Status,
    pub(super) queue: String,
    pub(super) kind: String,
    pub(super) jobs: u64,
    estimated: bool,
}

#[derive(Deserialize)]
struct Counts<C> {
    counts: Vec<C>,
}

pub(super) async fn counts(endpoint: &Endpoint, out: &Out) -> Outcome {
    let reply = get_counts(endpoint).await?;
    if out.json {
        out.document(&reply.read::<Counts<RawObject>>()?.counts);
    } else {
        out.table(&counts_table(&reply.read::<Counts<Count>>()?.counts), "no jobs");
    }
    Ok(Code::Done)
}

/// The number of jobs of every queue, kind and status, finished jobs included.
pub(super) async fn all_counts(endpoint: &Endpoint) -> Result<Vec<Count>, Failure> {
    Ok(get_counts(endpoint).await?.read::<Counts<Count>>()?.counts)
}

async fn get_counts(endpoint: &Endpoint) -> Result<Reply, Failure> {
    // Request the shortest series, because only the counts are used.
    endpoint.get(&["stats"]).query("minutes", Some(1)).send().await
}

/// One row per queue and kind, one column per status.
fn counts_table(counts: &[Count]) -> Table {
    let mut rows: BTreeMap<(&str, &str), [String; Status::ALL.len()]> = BTreeMap::new();
    for count in counts {
        let row = rows.entry((&count.queue, &count.kind)).or_insert_with(|| Status::ALL.map(|_| "0".into()));
        for (cell, status) in row.iter_mut().zip(Status::ALL) {
            if status == count.status {
                *cell = total(std::iter::once(count));
            }
        }
    }
    let is_zero = |status: Status| counts.iter().all(|count| count.status != status || count.jobs == 0);
    let statuses = Status::ALL.map(|status| {
        let fit = match status {
            // That nothing waits or runs is worth knowing.
            Status::Queued | Status::Running => Fit::Whole,
            _ if is_zero(status) => Fit::WholeOrOmittedFirst,
            Status::Cancelled => Fit::WholeOrOmitted,
            _ => Fit::Whole,
        };
        (status.as_str(), fit)
    });
    let mut table = Table::new([("queue", Fit::Cut), ("kind", Fit::Cut)].into_iter().chain(statuses));
    for ((queue, kind), cells) in rows {
        table.row([queue.to_owned(), kind.to_owned()].into_iter().chain(cells));
    }
    table
}

/// The number of jobs in all of these counts. One estimate makes it an estimate, marked `~`.
fn total<'a>(counts: impl Iterator<Item = &'a Count> + Clone) -> String {
    let about = if counts.clone().any(|count| count.estimated) { "~" } else { "" };
    format!("{about}{}", counts.map(|count| count.jobs).sum::<u64>())
}

// ---- stats -----------------------------------------------------------------------

#[derive(Deserialize)]
struct Stats {
    counts: Vec<Count>,
    series: Vec<Point>,
    run_seconds: Percentiles,
    per_second: f64,
}

/// The jobs that ended in one minute.
#[derive(Deserialize)]
struct Point {
    minute: DateTime<Utc>,
    succeeded: u64,
    failed_permanent: u64,
    cancelled: u64,
    run_seconds: Percentiles,
}

#[derive(Deserialize)]
struct Percentiles {
    p50: Option<f64>,
    p95: Option<f64>,
    p99: Option<f64>,
}

/// How many minutes the table shows.
const TABLE_MINUTES: usize = 15;

pub(super) async fn stats(endpoint: &Endpoint, args: &args::Stats, out: &Out) -> Outcome {
    let request = endpoint
        .get(&["stats"])
        .query("minutes", Some(args.minutes))
        .query("queue", args.queue.as_ref())
        .query("kind", args.kind.as_ref());
    let reply = request.send().await?;
    if out.json {
        out.document(&reply.read::<RawObject>()?);
    } else {
        print(&reply.read()?, args.minutes, out);
    }
    Ok(Code::Done)
}

fn print(stats: &Stats, minutes: u32, out: &Out) {
    let jobs = |status: Status| total(stats.counts.iter().filter(move |count| count.status == status));
    let ended = |of: fn(&Point) -> u64| -> u64 { stats.series.iter().map(of).sum() };
    let lines = [
        (
            "now",
            format!(
                "{} queued, {} retrying, {} running",
                jobs(Status::Queued),
                jobs(Status::Retrying),
                jobs(Status::Running)
            ),
        ),
        (
            "ended",
            format!(
                "{} succeeded, {} failed_permanent, {} cancelled in {minutes} minutes",
                ended(|point| point.succeeded),
                ended(|point| point.failed_permanent),
                ended(|point| point.cancelled)
            ),
        ),
        ("rate", format!("{:.1} per second over the last five minutes", stats.per_second)),
        (
            "run time",
            format!(
                "p50 {}, p95 {}, p99 {}",
                seconds(stats.run_seconds.p50),
                seconds(stats.run_seconds.p95),
                seconds(stats.run_seconds.p99)
            ),
        ),
    ];
    for (name, value) in lines {
        out.line(format_args!("{name:<10}{value}"));
    }
    if stats.series.is_empty() {
        return;
    }
    let mut table = Table::new([
        ("minute", Fit::Whole),
        ("succeeded", Fit::Whole),
        ("failed_permanent", Fit::Whole),
        ("cancelled", Fit::Whole),
        ("p50", Fit::WholeOrOmitted),
        ("p95", Fit::WholeOrOmitted),
        ("p99", Fit::WholeOrOmitted),
    ]);
    for point in stats.series.iter().rev().take(TABLE_MINUTES) {
        table.row([
            instant(point.minute),
            point.succeeded.to_string(),
            point.failed_permanent.to_string(),
            point.cancelled.to_string(),
            seconds(point.run_seconds.p50),
            seconds(point.run_seconds.p95),
            seconds(point.run_seconds.p99),
        ]);
    }
    out.line("");
    out.table(&table, "");
}

/// A duration with about two significant digits.
pub(super) fn seconds(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".into(),
        Some(s) if s < 0.001 => format!("{:.0}µs", s * 1e6),
        Some(s) if s < 0.01 => format!("{:.1}ms", s * 1e3),
        Some(s) if s < 1.0 => format!("{:.0}ms", s * 1e3),
        Some(s) if s < 100.0 => format!("{s:.1}s"),
        Some(s) => format!("{s:.0}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_about_two_significant_digits() {
        let cases = [
            (None, "-"),
            (Some(0.000_25), "250µs"),
            (Some(0.0012), "1.2ms"),
            (Some(0.25), "250ms"),
            (Some(1.26), "1.3s"),
            (Some(3600.0), "3600s"),
        ];
        for (given, shown) in cases {
            assert_eq!(seconds(given), shown);
        }
    }
}
