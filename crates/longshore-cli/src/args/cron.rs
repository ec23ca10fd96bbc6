//! What `longshore cron` can be told.

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

    /// Put a schedule, or change the one of that name
    ///
    /// An unchanged schedule keeps its next tick. A kind that nobody has announced is taken with a
    /// warning on a database, and refused by a server unless that allows unknown kinds.
    #[command(after_help = "\
Examples:
  longshore cron add nightly '30 2 * * *' report --zone Europe/Berlin
  longshore cron add pulse '*/10 * * * * *' ping --missed skip           # six fields: seconds first
  longshore cron add backfill '0 * * * *' import --missed all:24 --payload @import.json")]
    Add(Box<CronAdd>),

    /// Hold back a schedule's ticks
    #[command(after_help = "\
Examples:
  longshore cron pause nightly")]
    Pause(ScheduleName),

    /// Let a schedule tick again, from its next tick on
    #[command(after_help = "\
Examples:
  longshore cron resume nightly")]
    Resume(ScheduleName),

    /// Enqueue a schedule's job now, beside its ticks
    #[command(after_help = "\
Examples:
  longshore cron run nightly")]
    Run(ScheduleName),

    /// Remove a schedule; jobs it has enqueued stay
    #[command(after_help = "\
Examples:
  longshore cron remove nightly")]
    Remove(ScheduleName),
}

#[derive(Debug, Args)]
pub(crate) struct ScheduleName {
    /// The schedule
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct CronAdd {
    /// What to call it
    pub(crate) name: String,

    /// The cron line: five fields, or six with seconds first
    pub(crate) line: String,

    /// The kind of the job that each tick enqueues
    pub(crate) kind: String,

    /// The job's payload: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "JSON|@FILE|-", default_value = "{}", allow_hyphen_values = true)]
    pub(crate) payload: String,

    /// The time zone whose wall clocks the line means
    #[arg(long, default_value = "UTC")]
    pub(crate) zone: String,

    /// What becomes of missed ticks: skip, one, or all:N for the N newest
    #[arg(long, default_value = "one", value_name = "skip|one|all:N")]
    pub(crate) missed: Missed,

    /// The queue the jobs wait in [default: what the kind says, or default]
    #[arg(long)]
    pub(crate) queue: Option<String>,

    /// Their priority; higher runs first [default: what the kind says, or 0]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) priority: Option<i64>,

    /// How many attempts each may have [default: what the kind says, or 3]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) max_attempts: Option<i64>,
}
