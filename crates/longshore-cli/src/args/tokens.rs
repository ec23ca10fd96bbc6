//! The arguments of `longshore tokens`.

use std::time::Duration;

use clap::{Args, Subcommand};
use uuid::Uuid;

use super::values;
use crate::duration;

#[derive(Debug, Subcommand)]
pub(crate) enum Tokens {
    /// Create a token and print it, once
    ///
    /// Only a hash of the token is stored. If you lose a token, revoke it and create another.
    #[command(after_help = "\
Examples:
  longshore tokens create shop --scope enqueue --queue mail
  longshore tokens create grafana --scope read
  longshore tokens create deploy --scope operate --scope read --expires-in 90d
  TOKEN=$(longshore tokens create ci --scope enqueue --json | jq -r .token)

Scopes: enqueue (enqueue jobs), work (lease and settle jobs), read (see everything),
operate (cancel, retry, edit and delete jobs; queues, schedules, sweeps), admin (all of these).")]
    Create(CreateToken),

    /// List tokens, newest first, without their secrets
    #[command(after_help = "\
Examples:
  longshore tokens list")]
    List,

    /// Revoke tokens permanently. Servers stop accepting them within seconds
    #[command(after_help = "\
Examples:
  longshore tokens revoke 01990000-0000-7000-8000-000000000000")]
    Revoke {
        /// The ids of the tokens, as shown by `longshore tokens list`
        #[arg(required = true, value_name = "ID")]
        ids: Vec<Uuid>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct CreateToken {
    /// A name to recognise the token by
    pub(crate) name: String,

    /// What the token allows; may be repeated
    #[arg(long = "scope", value_name = "SCOPE", required = true, value_delimiter = ',',
          value_parser = values::scope())]
    pub(crate) scopes: Vec<String>,

    /// Only this queue; may be repeated [default: all]
    #[arg(long = "queue", value_name = "QUEUE", value_delimiter = ',')]
    pub(crate) queues: Vec<String>,

    /// When the token expires, like 12h or 90d from now [default: never]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub(crate) expires_in: Option<Duration>,
}
