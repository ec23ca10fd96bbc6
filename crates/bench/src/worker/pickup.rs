//! Pick-up times of several systems and how they are told.

use serde_json::{Value, json};

use crate::report::{median, table};

/// One system's samples, round by round, in microseconds.
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
        self.rounds.iter().map(|samples| self::quantile(samples, quantile) / 1000.0).collect()
    }

    fn of(&self, quantile: f64) -> f64 {
        median(self.each_round(quantile)).unwrap_or(0.0)
    }

    /// Ours against theirs, round by round.
    fn ratio(&self, ours: &Pickups, quantile: f64) -> f64 {
        let (ours, theirs) = (ours.each_round(quantile), self.each_round(quantile));
        median(ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs.max(1e-9)).collect())
            .unwrap_or(0.0)
    }
}

/// The value that this share of the samples does not exceed.
fn quantile(samples: &[u64], quantile: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() as f64 * quantile).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0) as f64
}

/// Tells pick-ups as a table and as JSON; `bar` is what p50 and p95 must stay
/// below, as a share of each peer's.
pub(super) fn report(ours: &Pickups, peers: &[Pickups], bar: Option<f64>) -> Value {
    println!("\npick-up on an idle worker (ms from the enqueue call to the handler, medians of rounds)");
    let figure = |pickups: &Pickups, nth: usize| format!("{:.2}", pickups.of(QUANTILES[nth].1));
    let row = |pickups: &Pickups, ratios: String, bar: String| {
        [pickups.system.into(), figure(pickups, 0), figure(pickups, 1), figure(pickups, 2), ratios, bar]
    };
    let mut rows = vec![row(ours, String::new(), String::new())];
    let mut figures = vec![json!({
        "system": ours.system,
        "p50_ms": ours.of(0.50),
        "p95_ms": ours.of(0.95),
        "p99_ms": ours.of(0.99),
    })];
    for peer in peers {
        let (p50, p95) = (peer.ratio(ours, 0.50), peer.ratio(ours, 0.95));
        let met = bar.map(|bar| p50 < bar && p95 < bar);
        let told = match (bar, met) {
            (Some(bar), Some(true)) => format!("< {bar} met"),
            (Some(bar), _) => format!("< {bar} MISSED"),
            _ => String::new(),
        };
        rows.push(row(peer, format!("{p50:.2} / {p95:.2}"), told));
        figures.push(json!({
            "system": peer.system,
            "p50_ms": peer.of(0.50),
            "p95_ms": peer.of(0.95),
            "p99_ms": peer.of(0.99),
            "ours_to_this_p50": p50,
            "ours_to_this_p95": p95,
            "bar": bar,
            "met": met,
        }));
    }
    table(["system", "p50", "p95", "p99", "ours / this (p50 / p95)", "bar"], &rows);
    Value::Array(figures)
}

#[cfg(test)]
mod tests {
    use super::quantile;

    #[test]
    fn a_quantile_is_a_sample() {
        let samples: Vec<u64> = (1..=100).rev().collect();
        assert_eq!(quantile(&samples, 0.50), 50.0);
        assert_eq!(quantile(&samples, 0.95), 95.0);
        assert_eq!(quantile(&samples, 0.99), 99.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }
}
