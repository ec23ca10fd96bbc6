//! The commands that call the HTTP API, over the network or in this process, and the
//! flags of `longshore bench`.

use clap::{Args, Subcommand};

use super::*;

#[derive(Debug, Subcommand)]
pub(crate) enum ApiCommand {
    /// Enqueue a job
    ///
    /// Prints `created` and the job's id. If a key matches a job that already exists, prints
    /// `existing` or `replaced` and that job's id.
    ///
    /// Kinds are registered by the workers that handle them, or with `longshore kinds put`. With a
    /// database URL, a job of an unregistered kind is accepted with a warning, because the first worker
    /// may not have started yet. A server rejects it unless it runs with --allow-unknown-kinds.
    #[command(after_help = "\
Examples:
  longshore enqueue send_email --payload '{\"to\":\"ada@example.com\",\"subject\":\"Hi\",\"body\":\"…\"}'
  longshore enqueue report --payload @report.json --delay 5m --queue slow --priority -5
  generate | longshore enqueue import --payload - --retry list:1s,10s,1m --max-attempts 4
  longshore enqueue summarize_text --payload '{\"text\":\"Ships come. Ships go.\"}' --wait=30s --json
  longshore enqueue sync --unique-key account-7 --unique-mode replace")]
    Enqueue(Box<Enqueue>),

    /// Enqueue many jobs from a file of JSON lines
    ///
    /// Each line is one job in the format of the API's `POST /jobs`: kind, payload and any other
    /// fields. Invalid lines are reported by line number and skipped; the exit code is then 2.
    #[command(after_help = "\
Examples:
  longshore enqueue-many jobs.ndjson
  jq -c '.[] | {kind: \"import\", payload: .}' records.json | longshore enqueue-many -

A line looks like this:
  {\"kind\":\"import\",\"payload\":{\"id\":7},\"queue\":\"slow\",\"unique_key\":\"record 7\"}")]
    EnqueueMany(EnqueueMany),

    /// List, show, cancel, retry, delete and edit jobs
    #[command(subcommand)]
    Jobs(Jobs),

    /// Enqueue, list, show, cancel and retry flows: graphs of jobs
    ///
    /// In a flow, some jobs wait until others have succeeded, ended or failed. The children of a job are a
    /// flow too, with the id of the job.
    #[command(subcommand)]
    Flows(Flows),

    /// List, show, stop and resume operations: changes of any number of jobs in the background
    ///
    /// An operation cancels, retries or deletes the jobs that match a filter, or a list of jobs. It is started with
    /// the API's `POST /operations` or `Client::start_operation`. Workers and servers execute it.
    #[command(subcommand)]
    Operations(Operations),

    /// List, pause, resume and limit queues
    #[command(subcommand)]
    Queues(Queues),

    /// List, pause, resume and limit the groups of a queue
    ///
    /// A job joins a group when it is enqueued (`--group acme`). Groups take fair turns, however many jobs
    /// each has. Each can have a limit of running jobs and a rate.
    #[command(subcommand)]
    Groups(Groups),

    /// List, redrive and purge dead letters (failed_permanent jobs)
    #[command(subcommand)]
    Dead(Dead),

    /// List, add, pause, resume, run and remove cron schedules
    ///
    /// Workers and servers run the schedules. Each tick enqueues one job, no matter how many processes
    /// run.
    #[command(subcommand)]
    Cron(Cron),

    /// List worker processes
    #[command(subcommand)]
    Workers(Workers),

    /// Recover the jobs of dead workers and hung handlers now
    ///
    /// Workers and servers do this by themselves every few seconds. A manual sweep helps when none of
    /// them is running.
    #[command(after_help = "\
Examples:
  longshore sweep --dry-run                     # which workers, how many jobs
  longshore sweep
  longshore sweep --threshold 30s --recovery-delay 0s")]
    Sweep(Sweep),

    /// Count jobs by queue, kind and status
    #[command(after_help = "\
Examples:
  longshore counts
  longshore counts --watch
  longshore counts --json

A ~ marks an estimate. Large numbers of waiting jobs are estimated, not counted.")]
    Counts(Repeat),

    /// Follow changes to jobs, queues and workers; emit and show the events that jobs wait for
    ///
    /// Without a subcommand, prints one line per change. Changes are collected once a second. If there
    /// are very many at once, only the newest are shown. If the server goes away, the command reconnects.
    /// Stop it with Ctrl-C.
    #[command(after_help = "\
Examples:
  longshore events                              # follow changes
  longshore events --json | jq -c 'select(.event == \"job\") | .data'
  longshore events emit approved:42 --payload '{\"by\": \"ada\"}'
  longshore events show approved:42")]
    Events {
        #[command(subcommand)]
        command: Option<Events>,
    },

    /// Check that the database, and the server if one is used, respond
    #[command(after_help = "\
Examples:
  longshore health                                    # exits 5 if they do not
  longshore health --server http://127.0.0.1:8080     # as a container's health check")]
    Health,

    /// Show throughput: how many jobs finished recently, at what rate, and their run times
    #[command(after_help = "\
Examples:
  longshore stats
  longshore stats --queue mail --minutes 10 --watch
  longshore stats --json | jq .per_second")]
    Stats(Stats),

    /// List, register and remove kinds of jobs
    #[command(subcommand)]
    Kinds(Kinds),

    /// Measure the speed of this queue with jobs that do nothing
    #[command(after_help = BENCH_EXAMPLES)]
    Bench(BenchArgs),
}

const BENCH_EXAMPLES: &str = "\
Examples:
  longshore bench
  longshore bench --jobs 20000 --producers 16 --concurrency 32
  longshore bench --json | jq .run_per_second

The jobs do nothing. They go into a new queue that no other worker takes jobs from, and are removed
at the end; other queues are not touched. They remain visible in `longshore stats`. With a server, only
enqueueing is measured, because running the jobs needs the database itself.";

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// How many jobs to enqueue and run
    #[arg(long, value_name = "N", default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) jobs: u32,

    /// How many producers enqueue at once, each one job at a time
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) producers: u32,

    /// How many jobs run at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) concurrency: u32,
}
