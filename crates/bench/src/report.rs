//! Reporting figures: medians, tables, JSON.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::Result;

/// One timed phase.
#[derive(Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) jobs: u64,
    pub(crate) took: Duration,
    /// The WAL written during the phase, if known.
    pub(crate) wal_bytes: Option<u64>,
    /// The CPU time of this process during the phase, if known.
    pub(crate) client_cpu: Option<Duration>,
}

impl Sample {
    /// A phase that started at `started` and ends now, without WAL and CPU time.
    pub(crate) fn since(started: Instant, jobs: u64) -> Self {
        Sample { jobs, took: started.elapsed(), wal_bytes: None, client_cpu: None }
    }

    pub(crate) fn rate(&self) -> f64 {
        rate(self.jobs, self.took)
    }

    pub(crate) fn wal_per_job(&self) -> Option<f64> {
        self.wal_bytes.map(|bytes| bytes as f64 / self.jobs.max(1) as f64)
    }
}

/// The CPU time of this process so far, with a resolution of 10 ms; Linux only.
pub(crate) fn client_cpu() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the program's name, which may contain any character.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(Duration::from_millis((user + system) * 10))
}

/// The resident memory of this process, on Linux.
pub(crate) fn resident_mb() -> Option<f64> {
    Memory::now().map(|memory| memory.resident_mb)
}

/// The resident memory of this process by its type.
#[derive(Clone, Copy, serde::Serialize)]
pub(crate) struct Memory {
    pub(crate) resident_mb: f64,
    /// Heap and stacks. The rest is mapped files: the program itself, and SQLite's index of the
    /// write-ahead log.
    pub(crate) anonymous_mb: f64,
}

impl Memory {
    /// `None` except on Linux.
    pub(crate) fn now() -> Option<Self> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let megabytes = |field: &str| {
            let kilobytes = status.lines().find_map(|line| line.strip_prefix(field))?;
            let kilobytes: f64 = kilobytes.trim().trim_end_matches(" kB").parse().ok()?;
            Some(kilobytes / 1024.0)
        };
        Some(Memory { resident_mb: megabytes("VmRSS:")?, anonymous_mb: megabytes("RssAnon:")? })
    }
}

pub(crate) fn rate(jobs: u64, took: Duration) -> f64 {
    jobs as f64 / took.as_secs_f64().max(1e-9)
}

/// One side of a comparison, with a sample for each round.
pub(crate) struct Side {
    name: String,
    /// The ratio that Longshore should reach against this side.
    target: Option<f64>,
    pub(crate) samples: Vec<Sample>,
}

impl Side {
    fn rate(&self) -> f64 {
        median(self.samples.iter().map(Sample::rate).collect()).unwrap_or(0.0)
    }

    pub(crate) fn wal_per_job(&self) -> Option<f64> {
        median(self.samples.iter().filter_map(Sample::wal_per_job).collect())
    }

    /// Over all rounds, because one round is too short for the resolution of the CPU time.
    pub(crate) fn client_micros_per_job(&self) -> Option<f64> {
        let cpu: Option<Duration> = self.samples.iter().map(|sample| sample.client_cpu).sum();
        let jobs: u64 = self.samples.iter().map(|sample| sample.jobs).sum();
        cpu.map(|cpu| cpu.as_secs_f64() * 1e6 / jobs.max(1) as f64)
    }

    fn figures(&self) -> Value {
        json!({
            "name": self.name,
            "jobs_per_second": self.rate(),
            "client_micros_per_job": self.client_micros_per_job(),
            "wal_bytes_per_job": self.wal_per_job(),
            "rounds": self.samples.iter().map(Sample::rate).collect::<Vec<_>>(),
        })
    }
}

/// One operation, measured with Longshore and with its baselines.
pub(crate) struct Cell {
    name: String,
    pub(crate) longshore: Side,
    pub(crate) baselines: Vec<Side>,
}

impl Cell {
    pub(crate) fn new(name: impl Into<String>) -> Self {
        let longshore = Side { name: "longshore".into(), target: None, samples: Vec::new() };
        Cell { name: name.into(), longshore, baselines: Vec::new() }
    }

    pub(crate) fn against(mut self, name: impl Into<String>, target: Option<f64>) -> Self {
        self.baselines.push(Side { name: name.into(), target, samples: Vec::new() });
        self
    }

    pub(crate) fn side(&mut self, name: &str) -> Option<&mut Side> {
        self.baselines.iter_mut().find(|side| side.name == name)
    }

    /// Removes the baselines that could not be measured.
    pub(crate) fn without_unmeasured(mut self) -> Self {
        self.baselines.retain(|side| !side.samples.is_empty());
        self
    }

    /// The median of each round's ratio. Both sides of a round run under the same
    /// conditions, which change from round to round.
    fn ratio(&self, baseline: &Side) -> f64 {
        let rounds = self.longshore.samples.iter().zip(&baseline.samples);
        median(rounds.map(|(ours, theirs)| ours.rate() / theirs.rate().max(1e-9)).collect()).unwrap_or(0.0)
    }

    fn figures(&self) -> Value {
        let against: Vec<Value> = self
            .baselines
            .iter()
            .map(|baseline| {
                let mut figures = baseline.figures();
                figures["ratio"] = json!(self.ratio(baseline));
                figures["bar"] = json!(baseline.target);
                figures["met"] = json!(baseline.target.map(|target| self.ratio(baseline) >= target));
                figures
            })
            .collect();
        json!({ "cell": self.name, "ours": self.longshore.figures(), "against": against })
    }

    fn rows(&self) -> Vec<[String; 8]> {
        let row = |(nth, baseline): (usize, &Side)| {
            let first = |text: String| if nth == 0 { text } else { String::new() };
            let wal = match (self.longshore.wal_per_job(), baseline.wal_per_job()) {
                (Some(ours), Some(theirs)) => format!("{ours:.0} / {theirs:.0}"),
                _ => String::new(),
            };
            let cpu = match (self.longshore.client_micros_per_job(), baseline.client_micros_per_job()) {
                (Some(ours), Some(theirs)) => format!("{ours:.1} / {theirs:.1}"),
                _ => String::new(),
            };
            let ratio = self.ratio(baseline);
            let target = baseline.target.map_or(String::new(), |target| {
                format!("≥ {target} {}", if ratio >= target { "met" } else { "MISSED" })
            });
            [
                first(self.name.clone()),
                first(thousands(self.longshore.rate())),
                baseline.name.clone(),
                thousands(baseline.rate()),
                format!("{ratio:.2}"),
                wal,
                cpu,
                target,
            ]
        };
        if self.baselines.is_empty() {
            return vec![self.row_alone()];
        }
        self.baselines.iter().enumerate().map(row).collect()
    }

    fn row_alone(&self) -> [String; 8] {
        let mut row: [String; 8] = Default::default();
        row[0] = self.name.clone();
        row[1] = thousands(self.longshore.rate());
        row[5] = self.longshore.wal_per_job().map_or(String::new(), |wal| format!("{wal:.0}"));
        row[6] = self.longshore.client_micros_per_job().map_or(String::new(), |cpu| format!("{cpu:.1}"));
        row
    }
}

/// Prints an engine's cells as a table and returns them as JSON.
pub(crate) fn compare(engine: &str, facts: Value, cells: &[Cell]) -> Value {
    println!("\n{engine} (jobs/s, medians)");
    let head =
        ["cell", "longshore", "compared with", "jobs/s", "ratio", "WAL bytes/job", "client µs/job", "target"];
    let rows: Vec<[String; 8]> = cells.iter().flat_map(Cell::rows).collect();
    table(head, &rows);
    json!({ "engine": engine, "facts": facts, "cells": cells.iter().map(Cell::figures).collect::<Vec<_>>() })
}

/// A figure that should not exceed a fixed target.
pub(crate) struct Limit {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) target: Option<f64>,
}

impl Limit {
    pub(crate) fn new(name: impl Into<String>, value: f64, target: impl Into<Option<f64>>) -> Self {
        Limit { name: name.into(), value, target: target.into() }
    }

    fn met(&self) -> Option<bool> {
        self.target.map(|target| self.value <= target)
    }
}

/// Prints figures with fixed targets as a table and returns them as JSON.
pub(crate) fn limits(limits: &[Limit]) -> Value {
    let row = |limit: &Limit| {
        let target = match (limit.target, limit.met()) {
            (Some(target), Some(true)) => format!("≤ {target} met"),
            (Some(target), _) => format!("≤ {target} MISSED"),
            _ => String::new(),
        };
        [limit.name.clone(), format!("{:.2}", limit.value), target]
    };
    if !limits.is_empty() {
        println!();
        table(["figure", "value", "target"], &limits.iter().map(row).collect::<Vec<_>>());
    }
    let figures = |limit: &Limit| json!({ "figure": limit.name, "value": limit.value, "bar": limit.target, "met": limit.met() });
    limits.iter().map(figures).collect()
}

/// Prints a table with aligned columns; columns of numbers are right-aligned.
pub(crate) fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) {
    let width = |nth: usize| {
        let cells = rows.iter().map(|row| row[nth].chars().count());
        cells.chain([head[nth].chars().count()]).max().unwrap_or(0)
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let is_number = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
    let right: [bool; N] = std::array::from_fn(|nth| {
        rows.iter().map(|row| row[nth].as_str()).filter(|text| !text.is_empty()).all(is_number)
    });
    let line = |cells: [&str; N]| {
        let cells = cells.iter().enumerate().map(|(nth, text)| {
            let gap = " ".repeat(widths[nth] - text.chars().count());
            if right[nth] { format!("{gap}{text}") } else { format!("{text}{gap}") }
        });
        println!("{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    };
    line(head);
    for row in rows {
        line(std::array::from_fn(|nth| row[nth].as_str()));
    }
}

/// Formats 12345.6 as `12,346`.
pub(crate) fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (nth, digit) in digits.chars().enumerate() {
        if nth > 0 && (digits.len() - nth).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

pub(crate) fn millis(duration: Duration) -> String {
    format!("{:.2} ms", duration.as_secs_f64() * 1000.0)
}

pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n.is_multiple_of(2) => Some((values[middle - 1] + values[middle]) / 2.0),
        _ => Some(values[middle]),
    }
}

/// The smallest sample that at least this share of the samples does not exceed.
pub(crate) fn quantile(samples: &[u64], quantile: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() as f64 * quantile).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0) as f64
}

/// A description of the machine, as far as the standard library and /proc provide it.
pub(crate) fn machine() -> Value {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpu = read("/proc/cpuinfo").lines().find_map(|line| {
        line.strip_prefix("model name").map(|name| name.trim_matches([' ', '\t', ':']).to_owned())
    });
    json!({
        "cores": std::thread::available_parallelism().map(usize::from).ok(),
        "cpu": cpu,
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
        "load_average": read("/proc/loadavg").trim(),
        "memory": read("/proc/meminfo").lines().next().map(|line| line.trim_start_matches("MemTotal:").trim()),
        "sqlite": rusqlite::version(),
        "bench_built_in_debug": cfg!(debug_assertions),
    })
}

/// Prints the number of cores and the load, and warns if the figures will be noisy.
pub(crate) fn print_machine() {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or_default();
    let cores = std::thread::available_parallelism().map(usize::from).unwrap_or(1);
    println!("{cores} cores, load average {load} at the start");
    if load.parse::<f64>().is_ok_and(|load| load > cores as f64 / 4.0) {
        println!("warning: other programs are using the machine; expect noise");
    }
    if cfg!(debug_assertions) {
        println!("warning: this is not a release build; use `cargo xtask bench`");
    }
}

pub(crate) fn write(path: &Path, figures: &Value) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(path, serde_json::to_string_pretty(figures)? + "\n")?;
    println!("\nfigures written to {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_of_values_is_between_the_middle_two() {
        assert_eq!(median(vec![4.0, 1.0, 3.0]), Some(3.0));
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(Vec::new()), None);
    }

    #[test]
    fn a_quantile_is_one_of_the_samples() {
        let samples: Vec<u64> = (1..=100).rev().collect();
        assert_eq!(quantile(&samples, 0.50), 50.0);
        assert_eq!(quantile(&samples, 0.95), 95.0);
        assert_eq!(quantile(&samples, 0.99), 99.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }

    #[test]
    fn thousands_are_grouped_from_the_right() {
        assert_eq!(thousands(7.4), "7");
        assert_eq!(thousands(123_456.0), "123,456");
        assert_eq!(thousands(1_234_567.0), "1,234,567");
    }
}
