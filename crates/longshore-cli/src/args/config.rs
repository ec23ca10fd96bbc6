//! What `longshore config` can be told.

use clap::{Args, Subcommand};

use super::{Dev, Serve, Worker};

#[derive(Debug, Subcommand)]
pub(crate) enum Config {
    /// Print every setting, its value and where that comes from
    ///
    /// A flag wins over a variable, that over the configuration file, and that over the default. Passwords
    /// are masked. Without a command: the settings of worker, serve and dev together.
    #[command(after_help = "\
Examples:
  longshore config show
  longshore config show worker
  longshore config show --json | jq -r '.settings[] | select(.from != \"default\") | .key'")]
    Show(Show),

    /// Read the configuration file and the variables as every command would
    ///
    /// Exits 2 and names the line if one of them cannot be right. Touches no database.
    #[command(after_help = "\
Examples:
  longshore config check
  longshore config check --config packaging/longshore.toml    # before it is installed")]
    Check,
}

#[derive(Debug, Args)]
#[command(disable_help_subcommand = true)]
pub(crate) struct Show {
    #[command(subcommand)]
    pub(crate) command: Option<Shown>,
}

/// The command whose settings are shown, with whatever flags it takes. What is
/// shown is read from the matches, which know where it came from.
#[derive(Debug, Subcommand)]
pub(crate) enum Shown {
    /// What `longshore worker` would go by
    #[command(after_help = "\
Examples:
  longshore config show worker
  longshore config show worker --concurrency 16")]
    Worker(Box<Worker>),

    /// What `longshore serve` would go by
    #[command(after_help = "\
Examples:
  longshore config show serve
  longshore config show serve --bind 0.0.0.0:8080 --auth tokens")]
    Serve(Box<Serve>),

    /// What `longshore dev` would go by
    #[command(after_help = "\
Examples:
  longshore config show dev")]
    Dev(Box<Dev>),
}
