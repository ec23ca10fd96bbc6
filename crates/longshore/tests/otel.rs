//! Tracing: the span that runs a job continues the trace of the span that enqueued it.

use longshore::testing::Queue;
use longshore::{Context, Failure, NewJob, Worker};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider};
use tracing::Instrument;
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
    let (request, job, inside) = (span("request"), span("job"), span("inside"));
    assert_eq!(job.span_context.trace_id(), request.span_context.trace_id());
    assert_eq!(job.parent_span_id, request.span_context.span_id());
    assert_eq!(inside.parent_span_id, job.span_context.span_id());
}
