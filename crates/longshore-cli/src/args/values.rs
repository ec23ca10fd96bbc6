//! Values that are one of a few words. clap lists them in the help, suggests the nearest one
//! for a typo, and the completion scripts offer them.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use longshore::{Scope, Status, UniqueMode};

pub(super) fn status() -> impl TypedValueParser<Value = Status> {
    PossibleValuesParser::new(Status::ALL.map(Status::as_str)).try_map(|text| text.parse::<Status>())
}

pub(super) fn unique_mode() -> impl TypedValueParser<Value = UniqueMode> {
    PossibleValuesParser::new(["dedupe", "replace", "preserve_run_at"])
        .try_map(|text| text.parse::<UniqueMode>())
}

pub(super) fn scope() -> PossibleValuesParser {
    PossibleValuesParser::new(Scope::ALL.map(Scope::as_str))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use clap::Parser;

    use crate::args::Cli;

    #[test]
    fn every_listed_word_is_accepted() {
        let modes = ["dedupe", "replace", "preserve_run_at"];
        let scopes = ["enqueue", "work", "read", "operate", "admin"];
        let statuses = ["queued", "running", "succeeded", "retrying", "failed_permanent", "cancelled"];
        for mode in modes {
            Cli::try_parse_from(["longshore", "enqueue", "x", "--unique-key", "k", "--unique-mode", mode])
                .unwrap();
        }
        for scope in scopes {
            Cli::try_parse_from(["longshore", "tokens", "create", "x", "--scope", scope]).unwrap();
        }
        for status in statuses {
            Cli::try_parse_from(["longshore", "jobs", "list", "--status", status]).unwrap();
        }
    }
}
