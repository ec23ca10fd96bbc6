//! The arguments of `longshore config`.

use clap::{Args, Subcommand};

use super::{Dev, Serve, Worker};

#[derive(Debug, Subcommand)]
pub(crate) enum Config {
    /// Print every setting with its value and where the value comes from
    ///
    /// A flag overrides an environment variable, the variable overrides the configuration file, and the
    /// file overrides the default. Passwords are masked. Without a command name, the settings of worker,
    /// serve and dev are all shown.
    #[command(after_help = "\
Examples:
  longshore config show
  longshore config show worker
  longshore config show --json | jq -r '.settings[] | select(.from != \"default\") | .key'")]
    Show(Show),

    /// Check the configuration file and the environment variables
    ///
    /// Exits 2 and names the line or variable if a value is invalid. Does not connect to a database.
    #[command(after_help = "\
Examples:
  longshore config check
  longshore config check --config packaging/longshore.toml    # before installing it")]
    Check,
}

#[derive(Debug, Args)]
#[command(disable_help_subcommand = true)]
pub(crate) struct Show {
    #[command(subcommand)]
    pub(crate) command: Option<Shown>,
}

/// The command whose settings are shown, with its own flags. The parsed values are not
/// used: `config show` reads clap's matches, which record where each value came from.
#[derive(Debug, Subcommand)]
pub(crate) enum Shown {
    /// Show the settings of `longshore worker`
    #[command(after_help = "\
Examples:
  longshore config show worker
  longshore config show worker --concurrency 16")]
    Worker(Box<Worker>),

    /// Show the settings of `longshore serve`
    #[command(after_help = "\
Examples:
  longshore config show serve
  longshore config show serve --bind 0.0.0.0:8080 --auth tokens")]
    Serve(Box<Serve>),

    /// Show the settings of `longshore dev`
    #[command(after_help = "\
Examples:
  longshore config show dev")]
    Dev(Box<Dev>),
}
