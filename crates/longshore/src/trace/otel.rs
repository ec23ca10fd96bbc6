//! Propagates trace context from enqueue to run, through the subscriber's OpenTelemetry layer.
//! It is stored with the job as a W3C `traceparent`.

use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The W3C `traceparent` of the current span, if it has one.
pub(crate) fn current() -> Option<String> {
    let span = tracing::Span::current();
    if span.is_disabled() {
        return None;
    }
    let context = span.context();
    let span = context.span().span_context().clone();
    let (trace, id, flags) = (span.trace_id(), span.span_id(), span.trace_flags().to_u8());
    span.is_valid().then(|| format!("00-{trace:032x}-{id:016x}-{flags:02x}"))
}

/// Whether the current span is part of the trace of this `traceparent`.
pub(crate) fn is_current(traceparent: &str) -> bool {
    let trace_of = |traceparent: &str| parse(traceparent).map(|span| span.trace_id());
    current().is_some_and(|current| trace_of(&current) == trace_of(traceparent))
}

/// The id of the trace that `span` is part of, if an OpenTelemetry layer is installed. Call it after
/// [`adopt`]: it fixes the span's parent.
pub(crate) fn id(span: &tracing::Span) -> Option<String> {
    let context = span.context();
    let span = context.span().span_context().clone();
    span.is_valid().then(|| format!("{:032x}", span.trace_id()))
}

/// Makes `span` a child of the span with this `traceparent`: the one that enqueued the job, or that
/// of an API request's caller. An invalid `traceparent` is ignored.
pub(crate) fn adopt(span: &tracing::Span, traceparent: &str) {
    if let Some(parent) = parse(traceparent) {
        let context = opentelemetry::Context::new().with_remote_span_context(parent);
        // Fails only if no OpenTelemetry layer is installed.
        let _ = span.set_parent(context);
    }
}

fn parse(traceparent: &str) -> Option<SpanContext> {
    let mut parts = traceparent.split('-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let has_valid_lengths = version.len() == 2 && trace.len() == 32 && span.len() == 16 && flags.len() == 2;
    // Version 00 has exactly four parts; a later version may add more.
    if !has_valid_lengths || version == "ff" || (version == "00" && parts.next().is_some()) {
        return None;
    }
    let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?);
    let (trace, span) = (TraceId::from_hex(trace).ok()?, SpanId::from_hex(span).ok()?);
    let context = SpanContext::new(trace, span, flags, true, TraceState::default());
    context.is_valid().then_some(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_valid_traceparent_is_parsed() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert!(parse(good).is_some());
        assert!(parse(&good.replacen("00", "cc", 1)).is_some(), "a later version");
        for bad in ["", "nonsense", "00-1-2-3", &format!("{good}-more"), &good.replacen("00", "ff", 1)] {
            assert!(parse(bad).is_none(), "{bad}");
        }
        assert!(parse("00-00000000000000000000000000000000-b7ad6b7169203331-01").is_none());
    }
}
