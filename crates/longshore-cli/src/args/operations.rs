//! The arguments of `longshore operations`.

use clap::{Args, Subcommand, ValueEnum};
use longshore::OperationId;

use super::Repeat;

#[derive(Debug, Subcommand)]
pub(crate) enum Operations {
    /// List operations, newest first
    ///
    /// Operations are kept for 7 days.
    #[command(after_help = "\
Examples:
  longshore operations list
  longshore operations list --state running --watch
  longshore operations list --json | jq -r '.operations[] | select(.state == \"failed\") | .error'")]
    List(OperationList),

    /// Show an operation and its progress
    ///
    /// `examined` jobs were visited; they are `changed` or `skipped`. A job is skipped if its state does not allow
    /// the change, or if it no longer exists.
    #[command(after_help = "\
Examples:
  longshore operations show 01990000-0000-7000-8000-000000000000
  longshore operations show 01990000-0000-7000-8000-000000000000 --follow   # until it ends; exits 8 if it fails or is stopped
  longshore operations show 01990000-0000-7000-8000-000000000000 --json | jq .changed")]
    Show {
        /// The id of the operation
        id: OperationId,
        /// Print a line for each progress until the operation ends
        #[arg(long)]
        follow: bool,
    },

    /// Stop an operation
    ///
    /// It stops after the jobs that it is changing now, at most 200. What it has changed stays changed.
    #[command(after_help = "\
Examples:
  longshore operations stop 01990000-0000-7000-8000-000000000000   # exits 4 if it has ended")]
    Stop(OperationArg),

    /// Let an operation continue that was stopped or has failed
    ///
    /// It continues where it was, and visits no job again. Workers and servers execute it.
    #[command(after_help = "\
Examples:
  longshore operations resume 01990000-0000-7000-8000-000000000000   # exits 4 if it is done")]
    Resume(OperationArg),
}

#[derive(Debug, Args)]
pub(crate) struct OperationArg {
    /// The id of the operation
    pub(crate) id: OperationId,
}

#[derive(Debug, Args)]
pub(crate) struct OperationList {
    /// Only operations in this state
    #[arg(long)]
    pub(crate) state: Option<State>,

    /// The number of operations per page, 1 to 200
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub(crate) limit: u32,

    /// Only operations that were started before this one, the last of the previous page
    #[arg(long, value_name = "ID")]
    pub(crate) cursor: Option<OperationId>,

    #[command(flatten)]
    pub(crate) every: Repeat,
}

/// The state of an operation.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum State {
    Running,
    Stopped,
    Done,
    Failed,
}

impl State {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            State::Running => "running",
            State::Stopped => "stopped",
            State::Done => "done",
            State::Failed => "failed",
        }
    }
}
