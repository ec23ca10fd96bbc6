//! Tracing: enqueuing has a span, and the span that runs a job continues its trace.

use std::future::IntoFuture;

use longshore::testing::Queue;
use longshore::{Context, Failure, NewJob, Worker};
use opentelemetry::trace::{SpanId, SpanKind, TraceContextExt, TracerProvider as _};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use tracing::Instrument;
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::layer::SubscriberExt;

#[tokio::test]
async fn the_span_of_a_run_is_a_child_of_the_span_that_enqueued() {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));

    let queue = Queue::new().await;
    let enqueue = async { queue.enqueue(NewJob::new("greet", "Ada")).await.expect("enqueue") };
    enqueue.instrument(tracing::info_span!("request")).await;
    let done = queue.drain(|client| {
        Worker::builder(client).function("greet", |_: String, _: Context| async {
            tracing::info_span!("inside").in_scope(|| {});
            Ok::<(), Failure>(())
        })
    });
    assert_eq!(done.await.succeeded, 1);
    provider.force_flush().expect("flush");

    let spans = exporter.get_finished_spans().expect("spans");
    let span =
        |name: &str| spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no span {name}"));
    let (request, enqueue, job, inside) = (span("request"), span("enqueue"), span("job"), span("inside"));
    assert_eq!(job.span_context.trace_id(), request.span_context.trace_id());
    assert_eq!(enqueue.parent_span_id, request.span_context.span_id());
    assert_eq!(job.parent_span_id, enqueue.span_context.span_id());
    assert_eq!(enqueue.span_kind, SpanKind::Producer);
    assert_eq!(inside.parent_span_id, job.span_context.span_id());
}

#[tokio::test]
async fn an_enqueue_continues_the_trace_that_the_job_names() {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));

    let queue = Queue::new().await;
    let named = NewJob::new("greet", "Ada").trace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    queue.enqueue(named).await.expect("enqueue");
    queue.enqueue_many([NewJob::new("greet", "Bob"), NewJob::new("greet", "Eve")]).await.expect("enqueue");
    let done = queue.drain(|client| {
        Worker::builder(client).function("greet", |_: String, _: Context| async { Ok::<(), Failure>(()) })
    });
    assert_eq!(done.await.succeeded, 3);
    provider.force_flush().expect("flush");

    let spans = exporter.get_finished_spans().expect("spans");
    let named = |name: &str| spans.iter().filter(|span| span.name == name).collect::<Vec<_>>();
    let (enqueues, jobs) = (named("enqueue"), named("job"));
    assert_eq!((enqueues.len(), jobs.len()), (2, 3));
    let remote =
        |span: &&&SpanData| span.span_context.trace_id().to_string() == "0af7651916cd43dd8448eb211c80319c";
    assert_eq!(enqueues.iter().filter(remote).count(), 1);
    assert_eq!(jobs.iter().filter(remote).count(), 1);
    let batch = enqueues.iter().find(|span| !remote(span)).expect("the span of the batch");
    let children = jobs.iter().filter(|job| job.parent_span_id == batch.span_context.span_id());
    assert_eq!(children.count(), 2);
}

/// As for a request with a `traceparent` header: its own span is part of the trace.
#[tokio::test]
async fn a_job_that_names_the_trace_of_the_current_span_is_linked_to_its_enqueue() {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));

    let queue = Queue::new().await;
    let (request, caller) = (tracing::info_span!("request"), SpanId::from(7));
    let trace = request.context().span().span_context().trace_id();
    let named = NewJob::new("greet", "Ada").trace(format!("00-{trace}-{caller}-01"));
    queue.enqueue(named).into_future().instrument(request).await.expect("enqueue");
    let done = queue.drain(|client| {
        Worker::builder(client).function("greet", |_: String, _: Context| async { Ok::<(), Failure>(()) })
    });
    assert_eq!(done.await.succeeded, 1);
    provider.force_flush().expect("flush");

    let spans = exporter.get_finished_spans().expect("spans");
    let span = |name: &str| spans.iter().find(|span| span.name == name).expect("a span");
    let (request, enqueue, job) = (span("request"), span("enqueue"), span("job"));
    assert_eq!(enqueue.parent_span_id, request.span_context.span_id());
    assert_eq!(job.parent_span_id, enqueue.span_context.span_id());
}
