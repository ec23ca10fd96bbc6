//! Without the feature `otel` a job carries only the trace context it is given.

/// The W3C `traceparent` of whoever enqueues.
pub(crate) fn current() -> Option<String> {
    None
}

/// Makes `span` a child of the enqueuer's.
#[cfg(feature = "worker")]
pub(crate) fn adopt(_span: &tracing::Span, _traceparent: &str) {}
