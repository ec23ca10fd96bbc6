//! The arguments of `longshore cron`.

use clap::{Args, Subcommand};
use longshore::Missed;

use super::Repeat;

#[derive(Debug, Subcommand)]
pub(crate) enum Cron {
    /// List schedules with their next and last tick
    #[command(after_help = "\
Examples:
  longshore cron list --watch 10s
  longshore cron list --json | jq -r '.[] | select(.paused) | .name'")]
    List(Repeat),

    /// Show one schedule
    #[command(after_help = "\
Examples:
  longshore cron show nightly
  longshore cron show nightly --json | jq .job")]
    Show(ScheduleName),

    /// Add a schedule, or change the schedule of that name
    ///
    /// Adding an unchanged schedule again keeps its next tick. With a database URL, an unregistered kind
    /// is accepted with a warning. A server rejects it unless it runs with --allow-unknown-kinds.
    #[command(after_help = "\
Examples:
  longshore cron add nightly '30 2 * * *' report --zone Europe/Berlin
  longshore cron add pulse '*/10 * * * * *' ping --missed skip           # six fields: seconds first
  longshore cron add backfill '0 * * * *' import --missed all:24 --payload @import.json")]
    Add(Box<CronAdd>),

    /// Pause a schedule: it enqueues no jobs until it is resumed
    #[command(after_help = "\
Examples:
  longshore cron pause nightly")]
    Pause(ScheduleName),

    /// Resume a schedule, starting with its next tick
    #[command(after_help = "\
Examples:
  longshore cron resume nightly")]
    Resume(ScheduleName),

    /// Enqueue a schedule's job now, in addition to its ticks
    #[command(after_help = "\
Examples:
  longshore cron run nightly")]
    Run(ScheduleName),

    /// Remove a schedule. The jobs it has already enqueued remain
    #[command(after_help = "\
Examples:
  longshore cron remove nightly")]
    Remove(ScheduleName),
}

#[derive(Debug, Args)]
pub(crate) struct ScheduleName {
    /// The name of the schedule
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct CronAdd {
    /// A name for the schedule
    pub(crate) name: String,

    /// The cron expression: five fields, or six with seconds first
    #[arg(value_name = "EXPRESSION")]
    pub(crate) line: String,

    /// The kind of the job that each tick enqueues
    pub(crate) kind: String,

    /// The job's payload: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "JSON|@FILE|-", default_value = "{}", allow_hyphen_values = true)]
    pub(crate) payload: String,

    /// The time zone of the cron expression, like Europe/Berlin
    #[arg(long, default_value = "UTC")]
    pub(crate) zone: String,

    /// What to do about missed ticks: skip them, enqueue one job for all of them, or one job for each
    /// of the N newest
    #[arg(long, default_value = "one", value_name = "skip|one|all:N")]
    pub(crate) missed: Missed,

    /// The queue of the jobs [default: the kind's default, else `default`]
    #[arg(long)]
    pub(crate) queue: Option<String>,

    /// The group of the jobs, within their queue
    #[arg(long, value_name = "NAME")]
    pub(crate) group: Option<String>,

    /// The priority of the jobs; higher runs first [default: the kind's default, else 0]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) priority: Option<i64>,

    /// How many attempts each job has [default: the kind's default, else 3]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) max_attempts: Option<i64>,
}
