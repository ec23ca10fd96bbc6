//! Trace context without the feature `otel`: a job has one only if the caller sets it.

/// The W3C `traceparent` of the current span; without `otel` there is none.
pub(crate) fn current() -> Option<String> {
    None
}

/// Whether the current span is part of the trace of this `traceparent`; without `otel` it is not.
pub(crate) fn is_current(_traceparent: &str) -> bool {
    false
}

/// Makes `span` a child of the span with this `traceparent`; without `otel` it does nothing.
pub(crate) fn adopt(_span: &tracing::Span, _traceparent: &str) {}

/// The id of the trace that `span` is part of; without `otel` there is none.
#[cfg(feature = "worker")]
pub(crate) fn id(_span: &tracing::Span) -> Option<String> {
    None
}
