//! What `longshore stats` can be told.

use clap::Args;

use super::Watch;

#[derive(Debug, Args)]
pub(crate) struct Stats {
    /// How many minutes to look back, 1 to 1440
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=1440))]
    pub(crate) minutes: u32,

    /// Only of this queue
    #[arg(long)]
    pub(crate) queue: Option<String>,

    /// Only of this kind
    #[arg(long)]
    pub(crate) kind: Option<String>,

    #[command(flatten)]
    pub(crate) watch: Watch,
}
