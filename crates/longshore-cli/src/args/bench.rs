//! What `longshore bench` can be told.

use clap::Args;

pub(super) const EXAMPLES: &str = "\
Examples:
  longshore bench
  longshore bench --jobs 20000 --producers 16 --concurrency 32
  longshore bench --json | jq .run_per_second

Its jobs wait in a queue of their own name and do nothing; no other queue is touched, and they are
removed at the end. What they add to `longshore stats` stays. With a server it measures enqueueing
alone: a server runs no jobs of strangers.";

#[derive(Debug, Args)]
pub(crate) struct LoadTest {
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
