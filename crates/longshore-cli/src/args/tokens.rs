//! What `longshore tokens` can be told.

use std::time::Duration;

use clap::{Args, Subcommand};
use uuid::Uuid;

use crate::duration;

#[derive(Debug, Subcommand)]
pub(crate) enum Tokens {
    /// Make a token and show it, once
    ///
    /// Only a hash of it is kept: whoever loses a token makes another and revokes the lost one.
    #[command(after_help = "\
Examples:
  longshore tokens create shop --scope enqueue --queue mail
  longshore tokens create grafana --scope read
  longshore tokens create deploy --scope operate --scope read --expires-in 90d
  TOKEN=$(longshore tokens create ci --scope enqueue --json | jq -r .token)

Scopes: enqueue (enqueue jobs), work (lease and settle them), read (see everything),
operate (cancel, retry, edit, delete; queues, schedules, sweeps), admin (all of it).")]
    Create(CreateToken),

    /// List tokens, newest first; never their secrets
    #[command(after_help = "\
Examples:
  longshore tokens list")]
    List,

    /// End tokens for good; servers notice within seconds
    #[command(after_help = "\
Examples:
  longshore tokens revoke 01990000-0000-7000-8000-000000000000")]
    Revoke {
        /// The tokens' ids, as `longshore tokens list` shows them
        #[arg(required = true, value_name = "ID")]
        ids: Vec<Uuid>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct CreateToken {
    /// A name for people
    pub(crate) name: String,

    /// What it allows: enqueue, work, read, operate or admin; may be repeated
    #[arg(long = "scope", value_name = "SCOPE", required = true, value_delimiter = ',')]
    pub(crate) scopes: Vec<String>,

    /// Only this queue; may be repeated [default: all]
    #[arg(long = "queue", value_name = "QUEUE", value_delimiter = ',')]
    pub(crate) queues: Vec<String>,

    /// When it ceases to be good, like 12h or 90d [default: never]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub(crate) expires_in: Option<Duration>,
}
