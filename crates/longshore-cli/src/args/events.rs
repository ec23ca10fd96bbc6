//! Arguments of `longshore events`.

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum Events {
    /// Emit an event; jobs that wait for it continue
    ///
    /// The first event with a name wins. It is kept for 7 days, so a job may also wait for an event that
    /// was emitted earlier.
    #[command(after_help = "\
Examples:
  longshore events emit approved:42
  longshore events emit approved:42 --payload '{\"by\": \"ada\"}'
  longshore events emit approved:42 --payload @approval.json")]
    Emit {
        /// The name that jobs wait for
        name: String,
        /// The payload: JSON, @FILE, or - for standard input
        #[arg(long, value_name = "JSON", default_value = "null")]
        payload: String,
    },

    /// Show an event
    #[command(after_help = "\
Examples:
  longshore events show approved:42             # exits 3 if it was not emitted")]
    Show {
        /// The name of the event
        name: String,
    },
}
