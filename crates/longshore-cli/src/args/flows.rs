//! The arguments of `longshore flows`.

use clap::{Args, Subcommand};
use longshore::FlowId;

use super::Repeat;

#[derive(Debug, Subcommand)]
pub(crate) enum Flows {
    /// List flows, newest first
    #[command(after_help = "\
Examples:
  longshore flows list --open
  longshore flows list --name import --watch
  longshore flows list --json | jq -r '.flows[] | select(.failed > 0) | .id'")]
    List(FlowList),

    /// Show a flow and draw its tasks
    ///
    /// Tasks are drawn in layers: each one is below the tasks that it waits for. Above 40 tasks, those
    /// whose names differ only in a number are one line. The id of a job shows the job's children.
    #[command(after_help = "\
Examples:
  longshore flows show 01990000-0000-7000-8000-000000000000
  longshore flows show 01990000-0000-7000-8000-000000000000 --watch
  longshore flows show 01990000-0000-7000-8000-000000000000 --json | jq '.tasks[] | .status'

What it looks like:
  TASK         STATUS     ID                                    AFTER
  ┌ ✓ fetch    succeeded  01990a2b-c3d4-7abc-8def-01234501c4e2
  │
  ├ ▶ parse    running    01990a2b-c3d4-7abc-8def-01234501c4e3  fetch
  ├ ▶ count    running    01990a2b-c3d4-7abc-8def-01234501c4e4  fetch (ended)
  │
  └ ◌ store    waiting    01990a2b-c3d4-7abc-8def-01234501c4e5  parse, count")]
    Show {
        /// The id of the flow, or of a job with children
        id: FlowId,
        #[command(flatten)]
        every: Repeat,
    },

    /// Enqueue a flow from a JSON file
    ///
    /// The file is the body of the API's `POST /flows`: a name, and tasks with what they wait for. Nothing
    /// is stored if a task is invalid or tasks wait for each other.
    #[command(after_help = "\
Examples:
  longshore flows enqueue import.json
  generate | longshore flows enqueue -

A file looks like this:
  {\"name\": \"import\",
   \"tasks\": [
     {\"task\": \"fetch\", \"kind\": \"fetch\", \"payload\": 7},
     {\"task\": \"parse\", \"kind\": \"parse\", \"payload\": 7, \"after\": [\"fetch\"]},
     {\"task\": \"alert\", \"kind\": \"alert\", \"payload\": 7,
      \"after\": [{\"task\": \"parse\", \"condition\": \"failed\"}]}],
   \"on_success\": {\"kind\": \"report\", \"payload\": 7}}")]
    Enqueue {
        /// A file with one JSON object, or - for standard input
        #[arg(value_name = "FILE|-", value_hint = clap::ValueHint::FilePath)]
        file: String,
    },

    /// Add jobs to a flow that is not sealed
    ///
    /// The file is the body of the API's `POST /flows/ID/jobs`. The jobs start at once. `flows seal` lets
    /// the flow end.
    #[command(after_help = "\
Examples:
  longshore flows add 01990000-0000-7000-8000-000000000000 part.json
  jq -s '{jobs: .}' jobs.ndjson | longshore flows add 01990000-0000-7000-8000-000000000000 -

A file looks like this:
  {\"jobs\": [{\"kind\": \"send\", \"payload\": 1}, {\"kind\": \"send\", \"payload\": 2}]}")]
    Add {
        /// The id of the flow
        id: FlowId,
        /// A file with one JSON object, or - for standard input
        #[arg(value_name = "FILE|-", value_hint = clap::ValueHint::FilePath)]
        file: String,
    },

    /// Let a flow end when all of its jobs have ended: no more can be added
    #[command(after_help = "\
Examples:
  longshore flows seal 01990000-0000-7000-8000-000000000000")]
    Seal(FlowArg),

    /// Cancel a flow
    ///
    /// Waiting jobs are cancelled, running ones receive a cancel request, and nothing else starts. The
    /// flow's callbacks run when it has ended.
    #[command(after_help = "\
Examples:
  longshore flows cancel 01990000-0000-7000-8000-000000000000   # exits 4 if it has ended")]
    Cancel(FlowArg),

    /// Run the failed part of a flow again
    ///
    /// Jobs that failed, were cancelled or skipped wait again, with a new set of attempts. What succeeded is
    /// not repeated.
    #[command(after_help = "\
Examples:
  longshore flows retry 01990000-0000-7000-8000-000000000000")]
    Retry(FlowArg),
}

#[derive(Debug, Args)]
pub(crate) struct FlowArg {
    /// The id of the flow
    pub(crate) id: FlowId,
}

#[derive(Debug, Args)]
pub(crate) struct FlowList {
    /// Only flows with this name
    #[arg(long)]
    pub(crate) name: Option<String>,

    /// Only flows that have not ended
    #[arg(long)]
    pub(crate) open: bool,

    /// The number of flows per page, 1 to 200
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub(crate) limit: u32,

    /// Only flows older than this one, the last flow of the previous page
    #[arg(long, value_name = "ID")]
    pub(crate) cursor: Option<FlowId>,

    #[command(flatten)]
    pub(crate) every: Repeat,
}
