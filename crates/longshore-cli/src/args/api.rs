//! The commands that ask the API, of a server or on a database.

use clap::{Args, Subcommand};

use super::*;

#[derive(Debug, Subcommand)]
pub(crate) enum ApiCommand {
    /// Put a job in the queue
    ///
    /// Prints `created` and the job's id; or `existing` or `replaced` when a key led to a job that
    /// was there before.
    ///
    /// A kind that nobody has announced is taken with a warning on a database, where the first worker
    /// may be yet to come, and refused by a server unless that allows unknown kinds.
    #[command(after_help = "\
Examples:
  longshore enqueue send_email --payload '{\"to\":\"ada@example.com\",\"subject\":\"Hi\",\"body\":\"…\"}'
  longshore enqueue report --payload @report.json --delay 5m --queue slow --priority -5
  generate | longshore enqueue import --payload - --retry list:1s,10s,1m --max-attempts 4
  longshore enqueue summarize_text --payload '{\"text\":\"Ships come. Ships go.\"}' --wait=30s --json
  longshore enqueue sync --unique-key account-7 --unique-mode replace")]
    Enqueue(Box<Enqueue>),

    /// Put many jobs in the queue, from a file of JSON lines
    ///
    /// Each line is a job as the API takes it: kind and payload, and whatever else is to be said. Those
    /// that are wrong are named by their line, the others are stored; the exit code is then 2.
    #[command(after_help = "\
Examples:
  longshore enqueue-many jobs.ndjson
  jq -c '.[] | {kind: \"import\", payload: .}' records.json | longshore enqueue-many -

A line: {\"kind\":\"import\",\"payload\":{\"id\":7},\"queue\":\"slow\",\"unique_key\":\"record 7\"}")]
    EnqueueMany(EnqueueMany),

    /// Look at jobs and change them
    #[command(subcommand)]
    Jobs(Jobs),

    /// Look at queues, pause, resume and limit them
    #[command(subcommand)]
    Queues(Queues),

    /// Look at dead letters (failed_permanent jobs) and let them run again
    #[command(subcommand)]
    Dead(Dead),

    /// Look at schedules, put, pause, resume, run and remove them
    ///
    /// Workers fire them: each tick makes one job, however many processes run.
    #[command(subcommand)]
    Cron(Cron),

    /// Look at worker processes
    #[command(subcommand)]
    Workers(Workers),

    /// Recover the jobs of dead workers and hung handlers, now
    ///
    /// Workers do this by themselves every few seconds; a manual sweep helps when none is left.
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

A number after ~ is an estimate, because very many jobs wait.")]
    Counts(Repeat),

    /// Follow what happens to jobs, queues and workers, a line for each event
    ///
    /// Looks once a second; of very many changes at once it tells the newest. A server that goes away
    /// is waited for. Ctrl-C ends it.
    #[command(after_help = "\
Examples:
  longshore events
  longshore events --json | jq -c 'select(.event == \"job\") | .data'")]
    Events,

    /// Tell whether the database answers, and the server if there is one
    #[command(after_help = "\
Examples:
  longshore health                                    # exits 5 if it does not
  longshore health --server http://127.0.0.1:8080     # where a container is asked if it is well")]
    Health,

    /// Tell how the queue does: what ended lately, how fast, and how long it took
    #[command(after_help = "\
Examples:
  longshore stats
  longshore stats --queue mail --minutes 10 --watch
  longshore stats --json | jq .per_second")]
    Stats(Stats),

    /// Look at kinds of jobs, announce and forget them
    #[command(subcommand)]
    Kinds(Kinds),

    /// Measure how fast this queue is: enqueue, run and remove jobs that do nothing
    #[command(after_help = BENCH_EXAMPLES)]
    Bench(BenchArgs),
}

const BENCH_EXAMPLES: &str = "\
Examples:
  longshore bench
  longshore bench --jobs 20000 --producers 16 --concurrency 32
  longshore bench --json | jq .run_per_second

Its jobs wait in a queue of their own name and do nothing; no other queue is touched, and they are
removed at the end. What they add to `longshore stats` stays. With a server it measures enqueueing
alone: a server runs no jobs of strangers.";

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// How many jobs
    #[arg(long, value_name = "N", default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) jobs: u32,

    /// How many enqueue at once, one job at a time each
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) producers: u32,

    /// How many jobs run at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) concurrency: u32,
}
