//! What is logged by the commands that stay, and how.

use clap::{Args, ValueEnum};

/// What is logged, and how.
#[derive(Debug, Args)]
pub(crate) struct Logging {
    /// What is logged, to standard error: info, debug, longshore=debug,info …
    #[arg(long = "log", value_name = "FILTER", default_value = "info", env = "RUST_LOG")]
    pub(crate) log: String,

    /// How it is logged
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = LogFormat::Pretty,
          env = "RUST_LOG_FORMAT")]
    pub(crate) log_format: LogFormat,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Pretty,
    /// One JSON object a line
    Json,
}
