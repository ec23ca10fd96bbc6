//! Pick-up latencies of several job queues: quantiles and their report.

use serde_json::{Value, json};

use crate::report::{self, median, table};

/// The samples of one job queue for each round, in microseconds.
pub(super) struct Pickups {
    pub(super) system: &'static str,
    pub(super) rounds: Vec<Vec<u64>>,
}

const QUANTILES: [(&str, f64); 3] = [("p50", 0.50), ("p95", 0.95), ("p99", 0.99)];

impl Pickups {
    pub(super) fn new(system: &'static str) -> Self {
        Pickups { system, rounds: Vec::new() }
    }

    /// The quantile of each round, in milliseconds.
    fn each_round(&self, quantile: f64) -> Vec<f64> {
        self.rounds.iter().map(|samples| report::quantile(samples, quantile) / 1000.0).collect()
    }

    /// The median over all rounds.
    fn median_of(&self, quantile: f64) -> f64 {
        median(self.each_round(quantile)).unwrap_or(0.0)
    }

    /// The median of each round's ratio of Longshore's quantile to this one.
    fn ratio(&self, longshore: &Pickups, quantile: f64) -> f64 {
        let (ours, theirs) = (longshore.each_round(quantile), self.each_round(quantile));
        median(ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs.max(1e-9)).collect())
            .unwrap_or(0.0)
    }
}

/// Prints pick-up latencies as a table and returns them as JSON. `target` is the ratio to
/// each peer that p50 and p95 should stay below.
pub(super) fn report(longshore: &Pickups, peers: &[Pickups], target: Option<f64>) -> Value {
    println!("\npick-up on an idle worker (ms from the enqueue call to the handler, medians of the rounds)");
    let figure = |pickups: &Pickups, nth: usize| format!("{:.2}", pickups.median_of(QUANTILES[nth].1));
    let row = |pickups: &Pickups, ratios: String, target: String| {
        [pickups.system.into(), figure(pickups, 0), figure(pickups, 1), figure(pickups, 2), ratios, target]
    };
    let mut rows = vec![row(longshore, String::new(), String::new())];
    let mut figures = vec![json!({
        "system": longshore.system,
        "p50_ms": longshore.median_of(0.50),
        "p95_ms": longshore.median_of(0.95),
        "p99_ms": longshore.median_of(0.99),
    })];
    for peer in peers {
        let (p50, p95) = (peer.ratio(longshore, 0.50), peer.ratio(longshore, 0.95));
        let met = target.map(|target| p50 < target && p95 < target);
        let verdict = match (target, met) {
            (Some(target), Some(true)) => format!("< {target} met"),
            (Some(target), _) => format!("< {target} MISSED"),
            _ => String::new(),
        };
        rows.push(row(peer, format!("{p50:.2} / {p95:.2}"), verdict));
        figures.push(json!({
            "system": peer.system,
            "p50_ms": peer.median_of(0.50),
            "p95_ms": peer.median_of(0.95),
            "p99_ms": peer.median_of(0.99),
            "ours_to_this_p50": p50,
            "ours_to_this_p95": p95,
            "bar": target,
            "met": met,
        }));
    }
    table(["system", "p50", "p95", "p99", "longshore / this (p50 / p95)", "target"], &rows);
    Value::Array(figures)
}
