//! The conformance cases that mutants name: whether they exist, and what a run of them
//! says about a mutant.

use std::{fmt, fs};

use super::lab::{Ended, LIBRARY};
use crate::run::workspace;

/// Whether the conformance suite has this case, given as `module::engine::case`.
pub(super) fn exists(case: &str) -> bool {
    let mut parts = case.rsplitn(3, "::");
    let (Some(name), Some(engine), Some(module)) = (parts.next(), parts.next(), parts.next()) else {
        return false;
    };
    let file = format!("{LIBRARY}/tests/conformance/{}.rs", module.replace("::", "/"));
    let text = fs::read_to_string(workspace().join(file)).unwrap_or_default();
    is_registered(&text, engine, name)
}

/// Whether a module's invocations of `cases!` register the case for this engine.
fn is_registered(module: &str, engine: &str, name: &str) -> bool {
    let lists = module.split("\ncases! {").skip(1).filter_map(|rest| rest.split_once("\n}"));
    lists.map(|(list, _)| list).any(|list| {
        let is_for_engine = match engine {
            "postgres" | "sqlite" => !list.contains("only on "),
            "postgres_only" => list.contains("only on postgres:"),
            "sqlite_only" => list.contains("only on sqlite:"),
            _ => false,
        };
        is_for_engine && list.lines().any(|line| line.trim() == format!("{name},"))
    })
}

/// What became of a mutant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Outcome {
    /// Every test case that it names failed.
    Caught,
    /// At least one of them passed.
    Survived,
    /// At least one of them did not execute its code.
    NotReached,
    /// At least one of them was killed after the time limit.
    TimedOut,
    /// At least one of them ended without a result.
    Crashed,
    /// The bug does not compile, so nothing is known about the suite.
    DidNotBuild,
    /// The code has changed, so the mutant has to be adapted.
    Stale,
}

impl Outcome {
    pub(super) const ALL: [Outcome; 7] = [
        Outcome::Caught,
        Outcome::Survived,
        Outcome::NotReached,
        Outcome::TimedOut,
        Outcome::Crashed,
        Outcome::DidNotBuild,
        Outcome::Stale,
    ];

    /// Judges a mutant by all the cases that it names.
    pub(super) fn of(cases: &[Ended]) -> Outcome {
        let any = |ended| cases.contains(&ended);
        match () {
            () if any(Ended::TimedOut) => Outcome::TimedOut,
            () if any(Ended::Crashed) => Outcome::Crashed,
            () if any(Ended::NotReached) => Outcome::NotReached,
            () if any(Ended::Passed) => Outcome::Survived,
            () => Outcome::Caught,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Outcome::Caught => "caught",
            Outcome::Survived => "SURVIVED",
            Outcome::NotReached => "NOT REACHED",
            Outcome::TimedOut => "TIMED OUT",
            Outcome::Crashed => "CRASHED",
            Outcome::DidNotBuild => "DID NOT BUILD",
            Outcome::Stale => "STALE",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_registered_only_in_its_module_and_for_its_engines() {
        let module =
            "use x;\n\ncases! {\n    one,\n}\n\ncases! {\n    only on sqlite:\n    two,\n}\n\nthree,\n";
        let is_registered = |engine, name| super::is_registered(module, engine, name);
        assert!(is_registered("postgres", "one") && is_registered("sqlite", "one"));
        assert!(is_registered("sqlite_only", "two"));
        assert!(!is_registered("sqlite", "two") && !is_registered("postgres_only", "two"));
        assert!(!is_registered("postgres", "on") && !is_registered("postgres", "three"));
        assert!(exists("wake::postgres::an_enqueue_notifies_subscribers"));
        assert!(!exists("wake_paths::postgres::an_enqueue_notifies_subscribers"));
    }

    #[test]
    fn a_mutant_is_caught_only_if_all_its_cases_fail() {
        use Ended::{Crashed, Failed, NotReached, Passed, TimedOut};
        assert_eq!(Outcome::of(&[Failed, Failed]), Outcome::Caught);
        assert_eq!(Outcome::of(&[Failed, Passed]), Outcome::Survived);
        assert_eq!(Outcome::of(&[Failed, NotReached]), Outcome::NotReached);
        assert_eq!(Outcome::of(&[Failed, TimedOut]), Outcome::TimedOut);
        assert_eq!(Outcome::of(&[Crashed, Failed]), Outcome::Crashed);
    }
}
