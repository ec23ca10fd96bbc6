//! What `longshore kinds` can be told.

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum Kinds {
    /// List the kinds that workers or people have announced
    #[command(after_help = "\
Examples:
  longshore kinds list
  longshore kinds list --json | jq '.[] | select(.name == \"send_email\") | .schema'")]
    List,

    /// Announce a kind: what its payloads look like, and what its jobs get when nothing is said
    ///
    /// What is not named stays as it was. A server refuses jobs of kinds that nobody has announced, and
    /// payloads that do not fit.
    #[command(after_help = "\
Examples:
  longshore kinds put report
  longshore kinds put report --schema @report.schema.json
  longshore kinds put report --defaults '{\"queue\":\"slow\",\"max_attempts\":5,\"timeout_seconds\":600}'")]
    Put(PutKind),

    /// Forget a kind; its jobs stay
    #[command(after_help = "\
Examples:
  longshore kinds remove report")]
    Remove {
        /// The kind
        kind: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct PutKind {
    /// The kind
    pub(crate) kind: String,

    /// A JSON Schema for payloads: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "JSON|@FILE|-", allow_hyphen_values = true)]
    pub(crate) schema: Option<String>,

    /// The defaults: queue, priority, max_attempts, timeout_seconds and retry, as JSON, @FILE or -
    #[arg(long, value_name = "JSON|@FILE|-", allow_hyphen_values = true)]
    pub(crate) defaults: Option<String>,
}
