//! Charts as SVG, with the same numbers as a table. Without inline styles, which the policy of the pages
//! forbids: positions are attributes, colours are classes, and labels are HTML next to the picture.

use std::fmt::Write;

use chrono::{DateTime, TimeDelta, Utc};
use maud::{Markup, html};

use super::format;

/// The size of the picture; browsers stretch it.
const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 120.0;
/// The share of a bucket that its bar takes.
const BAR: f64 = 0.72;
/// The number of labels below a chart.
const LABELS: usize = 5;

/// A part of a chart: its name, and the class that has its colour.
#[derive(Clone, Copy, Debug)]
pub(super) struct Series {
    pub(super) name: &'static str,
    pub(super) class: &'static str,
}

/// The values of one period, one per series. A period without a value leaves a gap.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    pub(super) from: DateTime<Utc>,
    pub(super) values: Vec<Option<f64>>,
    /// The page that lists the jobs of this period.
    pub(super) href: Option<String>,
}

/// A chart of buckets of equal length.
pub(super) struct Chart<'a> {
    /// Unique on the page.
    pub(super) id: &'a str,
    pub(super) title: &'a str,
    pub(super) series: &'a [Series],
    pub(super) buckets: &'a [Bucket],
    pub(super) width: TimeDelta,
    /// How a value is written.
    pub(super) value: fn(f64) -> String,
    /// The end of the axis for the highest value.
    pub(super) scale: fn(f64) -> f64,
    pub(super) look: Look,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// The series are parts of a whole.
    StackedBars,
    /// Each series is a line of steps.
    Steps,
}

impl Chart<'_> {
    pub(super) fn render(&self) -> Markup {
        let highest = (self.scale)(self.highest());
        let labels = [highest, highest / 2.0, 0.0].map(self.value);
        html! {
            figure #(self.id) .panel .chart {
                figcaption .panel-head {
                    h2 { (self.title) }
                    p .key { @for series in self.series { span .(series.class) { i {} (series.name) } } }
                }
                div .plot {
                    div .y aria-hidden="true" { @for label in &labels { span { (label) } } }
                    svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) preserveAspectRatio="none" role="group"
                        aria-label=(format!("{}; the data is in the table below", self.title)) {
                        path .grid d=(format!("M0 .5H{WIDTH}M0 {0}H{WIDTH}M0 {1}H{WIDTH}", HEIGHT / 2.0, HEIGHT - 0.5)) {}
                        @match self.look {
                            Look::StackedBars => (self.bars(highest)),
                            Look::Steps => (self.steps(highest)),
                        }
                        (self.links())
                    }
                    div .x aria-hidden="true" { @for label in self.time_labels() { span { (label) } } }
                }
                (self.table())
            }
        }
    }

    fn highest(&self) -> f64 {
        let of_bucket = |bucket: &Bucket| {
            let values = bucket.values.iter().flatten();
            match self.look {
                Look::StackedBars => values.sum::<f64>(),
                Look::Steps => values.copied().fold(0.0, f64::max),
            }
        };
        self.buckets.iter().map(of_bucket).fold(0.0, f64::max)
    }

    /// The left edge of a bucket.
    fn x(&self, i: usize) -> f64 {
        WIDTH * i as f64 / self.buckets.len().max(1) as f64
    }

    fn bars(&self, highest: f64) -> Markup {
        let width = self.x(1) * BAR;
        html! {
            @for (j, series) in self.series.iter().enumerate() {
                path .bar .(series.class) d=(self.bar_path(j, width, highest)) {}
            }
        }
    }

    /// All bars of one series as one path, above those of the series before it.
    fn bar_path(&self, j: usize, width: f64, highest: f64) -> String {
        let mut path = String::new();
        for (i, bucket) in self.buckets.iter().enumerate() {
            let below: f64 = bucket.values.iter().take(j).flatten().sum();
            let value = bucket.values.get(j).copied().flatten().unwrap_or_default();
            if value > 0.0 {
                let scale = HEIGHT / highest;
                // A single failure among many jobs must be visible.
                let height = (value * scale).max(2.0);
                let (x, bottom) = (self.x(i) + self.x(1) * (1.0 - BAR) / 2.0, HEIGHT - below * scale);
                // Writing to a string cannot fail.
                let _ = write!(path, "M{x:.1} {bottom:.1}v-{height:.1}h{width:.1}v{height:.1}z");
            }
        }
        path
    }

    fn steps(&self, highest: f64) -> Markup {
        html! {
            @for (j, series) in self.series.iter().enumerate() {
                path .line .(series.class) d=(self.step_path(j, highest)) {}
            }
        }
    }

    fn step_path(&self, j: usize, highest: f64) -> String {
        let mut path = String::new();
        let mut is_drawing = false;
        for (i, bucket) in self.buckets.iter().enumerate() {
            match bucket.values.get(j).copied().flatten() {
                Some(value) => {
                    let (x, y, next) = (self.x(i), HEIGHT * (1.0 - value / highest), self.x(i + 1));
                    let _ = if is_drawing {
                        write!(path, "V{y:.1}H{next:.1}")
                    } else {
                        write!(path, "M{x:.1} {y:.1}H{next:.1}")
                    };
                    is_drawing = true;
                }
                None => is_drawing = false,
            }
        }
        path
    }

    /// An area per bucket with a tooltip, which links to the jobs of the bucket. Not reachable with the
    /// keyboard: the table has the same links.
    fn links(&self) -> Markup {
        let area = |i: usize, bucket: &Bucket| {
            html! {
                rect .hit x=(format!("{:.1}", self.x(i))) y="0" width=(format!("{:.1}", self.x(1))) height=(HEIGHT) {
                    title { (self.summary(bucket)) }
                }
            }
        };
        html! {
            @for (i, bucket) in self.buckets.iter().enumerate() {
                @match &bucket.href {
                    Some(href) => a href=(href) tabindex="-1" { (area(i, bucket)) },
                    None => (area(i, bucket)),
                }
            }
        }
    }

    fn summary(&self, bucket: &Bucket) -> String {
        let values = self.series.iter().zip(&bucket.values);
        let values =
            values.filter_map(|(series, value)| Some(format!("{} {}", (self.value)((*value)?), series.name)));
        format!("{}: {}", self.period(bucket), values.collect::<Vec<_>>().join(", "))
    }

    fn period(&self, bucket: &Bucket) -> String {
        let format = if self.width >= TimeDelta::hours(1) { "%a %d %b %H:%M" } else { "%H:%M" };
        format!("{}–{} UTC", bucket.from.format(format), (bucket.from + self.width).format("%H:%M"))
    }

    fn time_labels(&self) -> Vec<String> {
        let Some((first, last)) = self.buckets.first().zip(self.buckets.last()) else { return Vec::new() };
        let end = last.from + self.width;
        let total = end - first.from;
        let format = if total > TimeDelta::days(2) { "%a %d" } else { "%H:%M" };
        let label = |i: usize| first.from + total * i as i32 / (LABELS as i32 - 1);
        (0..LABELS).map(|i| label(i).format(format).to_string()).collect()
    }

    /// The numbers as a table, newest first. Periods without any are left out.
    fn table(&self) -> Markup {
        let has_value = |bucket: &&Bucket| bucket.values.iter().flatten().any(|value| *value > 0.0);
        let rows: Vec<&Bucket> = self.buckets.iter().rev().filter(has_value).collect();
        html! {
            details #(format!("{}-data", self.id)) {
                summary { "Data" }
                @if rows.is_empty() { p .faint { "Nothing happened in this time." } } @else {
                    table .list .numbers {
                        thead { tr { th { "Period" } @for series in self.series { th .c-number { (series.name) } } } }
                        tbody { @for bucket in rows { tr {
                            td { @match &bucket.href {
                                Some(href) => a .quiet href=(href) { (self.period(bucket)) },
                                None => (self.period(bucket)),
                            } }
                            @for value in &bucket.values {
                                td .c-number { @if let Some(value) = value { ((self.value)(*value)) } @else { "–" } }
                            }
                        } } }
                    }
                }
            }
        }
    }
}

/// The end of an axis of numbers of jobs. Its half is a whole number.
pub(super) fn of_jobs(highest: f64) -> f64 {
    match nice(highest.max(2.0)) {
        end if end < 10.0 && end % 2.0 != 0.0 => end + 1.0,
        end => end,
    }
}

/// The end of an axis of seconds. Its half is round, too: minutes and hours are not multiples of ten.
pub(super) fn of_seconds(highest: f64) -> f64 {
    const MINUTES: [f64; 9] = [1.0, 2.0, 4.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0];
    match highest {
        ..=10.0 => nice(highest),
        ..=20.0 => 20.0,
        _ => {
            let days = (highest / 86_400.0 / 2.0).ceil() * 2.0 * 86_400.0;
            let hours = [8.0, 12.0, 24.0].map(|hours| hours * 60.0);
            let ends = MINUTES.into_iter().chain(hours).map(|minutes| minutes * 60.0);
            ends.into_iter().find(|end| *end >= highest).unwrap_or(days)
        }
    }
}

/// The next round number: 1, 2 or 5 times a power of ten.
fn nice(highest: f64) -> f64 {
    if highest <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf(highest.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|step| step * power)
        .find(|step| *step >= highest)
        .unwrap_or(highest)
}

/// A number of jobs.
pub(super) fn jobs(value: f64) -> String {
    format::compact(value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERIES: [Series; 2] =
        [Series { name: "succeeded", class: "ok" }, Series { name: "failed", class: "bad" }];

    fn buckets(values: &[[Option<f64>; 2]]) -> Vec<Bucket> {
        let start: DateTime<Utc> = "2031-05-06T07:00:00Z".parse().unwrap();
        let bucket = |(i, values): (usize, &[Option<f64>; 2])| Bucket {
            from: start + TimeDelta::minutes(i as i64),
            values: values.to_vec(),
            href: Some("/ui/jobs?a=\"1\"".into()),
        };
        values.iter().enumerate().map(bucket).collect()
    }

    fn chart(buckets: &[Bucket], look: Look) -> String {
        let width = TimeDelta::minutes(1);
        Chart { id: "c", title: "Ends", series: &SERIES, buckets, width, value: jobs, scale: nice, look }
            .render()
            .0
    }

    #[test]
    fn a_chart_has_a_tooltip_a_link_and_a_table_row_per_period() {
        let chart = chart(&buckets(&[[Some(3.0), Some(1.0)], [None, None]]), Look::StackedBars);
        assert!(chart.contains("07:00–07:01 UTC: 3 succeeded, 1 failed"), "{chart}");
        assert_eq!(chart.matches("<tr>").count(), 2, "the header and one period: {chart}");
        assert!(chart.contains("a=&quot;1&quot;") && !chart.contains("style"), "{chart}");
    }

    #[test]
    fn bars_are_stacked_and_lines_have_gaps() {
        let buckets = buckets(&[[Some(5.0), Some(5.0)], [None, Some(10.0)], [Some(1.0), None]]);
        let bars = chart(&buckets, Look::StackedBars);
        assert!(bars.contains("M28.0 60.0v-60.0"), "the second bar starts where the first ends: {bars}");
        let lines = chart(&buckets, Look::Steps);
        assert!(lines.contains("M0.0 60.0H200.0M400.0 108.0H600.0"), "{lines}");
    }

    #[test]
    fn an_empty_chart_says_so() {
        assert!(chart(&buckets(&[[None, None]]), Look::Steps).contains("Nothing happened"));
    }

    #[test]
    fn axes_end_at_round_numbers() {
        for (highest, end) in [(0.0, 1.0), (0.03, 0.05), (1.0, 1.0), (7.0, 10.0), (120.0, 200.0)] {
            assert!((nice(highest) - end).abs() < 1e-9, "{highest}");
        }
        for (highest, end) in
            [(0.0, 2.0), (1.0, 2.0), (3.0, 6.0), (7.0, 10.0), (45.0, 50.0), (600.0, 1_000.0)]
        {
            assert!((of_jobs(highest) - end).abs() < 1e-9, "{highest}");
        }
        for (highest, end) in [
            (0.3, "500 ms"),
            (12.0, "20 s"),
            (45.0, "1 min"),
            (130.0, "4 min"),
            (500.0, "10 min"),
            (700.0, "20 min"),
            (1_900.0, "1 h"),
            (30_000.0, "12 h"),
            (200_000.0, "4 d"),
        ] {
            assert_eq!(format::seconds(of_seconds(highest)), end, "{highest}");
        }
    }
}
