//! `longshore worker`: logs, metrics and handlers around the library's worker.

use longshore::Client;
use longshore::worker::{Summary, Worker};

use super::process::{by_flag, log, serve_metrics};
use crate::args;
use crate::builtin;
use crate::failure::{Code, Outcome};
use crate::output::Out;

pub(super) async fn run(client: Client, args: args::Worker, out: &Out) -> Outcome {
    log(&args.work.logging)?;
    let settings = args.work.settings();
    let builder = Worker::builder(client).settings(settings.clone());
    let builder = match args.work.simulate {
        true => builtin::simulate(builder),
        false => builtin::register(builder, &args.work.builtin.settings())?,
    };
    let worker = builder.build().map_err(by_flag)?;
    if let Some(addr) = args.metrics_addr() {
        serve_metrics(addr)?;
    }
    tracing::info!(
        queues = settings.queues.join(","),
        concurrency = settings.concurrency,
        simulate = args.work.simulate,
        "working"
    );
    let summary = if args.drain { worker.run_drain().await? } else { worker.run().await? };
    tell(&summary, out);
    Ok(Code::Done)
}

fn tell(summary: &Summary, out: &Out) {
    if out.json {
        return out.document(summary);
    }
    let Summary { succeeded, retrying, failed_permanent, cancelled, put_back } = summary;
    out.line(format_args!(
        "succeeded {succeeded}, retrying {retrying}, failed_permanent {failed_permanent}, \
         cancelled {cancelled}, put back {put_back}"
    ));
}
