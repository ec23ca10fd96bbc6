//! `--watch`: the same answer again and again.

use std::time::Duration;

use clap::Args;

use crate::duration;

/// How often to look again, if at all.
#[derive(Debug, Default, Args)]
pub(crate) struct Watch {
    /// Look again every so often, 2s unless told; with --json a line each time. Ctrl-C ends it
    #[arg(long, value_name = "INTERVAL", num_args = 0..=1, default_missing_value = "2s", value_parser = interval)]
    pub(crate) watch: Option<Duration>,
}

/// More often than people can look only keeps the database busy.
const LEAST: Duration = Duration::from_millis(100);

fn interval(text: &str) -> Result<Duration, String> {
    match duration::parse(text)? {
        interval if interval < LEAST => Err(format!("`{text}` is too often; give 100ms or more")),
        interval => Ok(interval),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_long_enough_to_look() {
        assert_eq!(interval("100ms").unwrap(), LEAST);
        for text in ["99ms", "0s"] {
            assert!(interval(text).unwrap_err().contains("100ms or more"), "{text}");
        }
    }
}
