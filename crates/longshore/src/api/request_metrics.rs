//! Metrics of HTTP requests: their number and duration by method, path and status.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::http::{Method, StatusCode};
use metrics::{Key, Label, Level, Metadata};

static METADATA: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

/// The metric keys in use, by path. They are kept because building the labels costs
/// more than recording a value.
#[derive(Debug, Default)]
pub(super) struct RequestMetrics(RwLock<HashMap<String, Vec<Arc<Series>>>>);

/// The metric keys for one method, path and status.
#[derive(Debug)]
struct Series {
    method: &'static str,
    status: StatusCode,
    requests: Key,
    durations: Key,
}

impl RequestMetrics {
    /// Records one request.
    pub(super) fn record(&self, method: &Method, path: &str, status: StatusCode, took: Duration) {
        let method = method_label(method);
        let series = self.find(method, path, status).unwrap_or_else(|| self.add(method, path, status));
        metrics::with_recorder(|recorder| {
            recorder.register_counter(&series.requests, &METADATA).increment(1);
            recorder.register_histogram(&series.durations, &METADATA).record(took.as_secs_f64());
        });
    }

    fn find(&self, method: &str, path: &str, status: StatusCode) -> Option<Arc<Series>> {
        let paths = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let matches = |series: &&Arc<Series>| series.method == method && series.status == status;
        paths.get(path)?.iter().find(matches).cloned()
    }

    /// The path is that of a route, so the number of series is bounded.
    fn add(&self, method: &'static str, path: &str, status: StatusCode) -> Arc<Series> {
        let labels = || {
            vec![
                Label::from_static_parts("method", method),
                Label::new("path", path.to_owned()),
                Label::new("status", status.as_str().to_owned()),
            ]
        };
        let series = Arc::new(Series {
            method,
            status,
            requests: Key::from_parts("http_requests_total", labels()),
            durations: Key::from_parts("http_request_duration_seconds", labels()),
        });
        let mut paths = self.0.write().unwrap_or_else(PoisonError::into_inner);
        paths.entry(path.to_owned()).or_default().push(series.clone());
        series
    }
}

/// The label of a method. Unknown methods share one label, because clients can invent
/// any number of them.
fn method_label(method: &Method) -> &'static str {
    const KNOWN: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];
    KNOWN.into_iter().find(|known| method == known).unwrap_or("other")
}
