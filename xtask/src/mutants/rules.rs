//! Bugs in the rules, which both engines follow.

use super::Mutant;

const LIFECYCLE: &str = "crates/longshore/src/lifecycle.rs";
const SETTLE: &str = "crates/longshore/src/client/settle.rs";

/// Each must be noticed on both engines.
pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "a release is charged",
        file: LIFECYCLE,
        after: "fn uncharged(",
        old: "attempts: job.attempt - 1,",
        new: "attempts: job.attempt,",
        red: &[
            "settle::postgres::a_release_is_not_charged_and_is_due_at_once",
            "settle::sqlite::a_release_is_not_charged_and_is_due_at_once",
        ],
    },
    Mutant {
        name: "an end by lease alone is not known again",
        file: SETTLE,
        after: "async fn settle_leases",
        old: "settled == Settled::Stored",
        new: "settled == Settled::LeaseLost",
        red: &[
            "settle_by_lease::postgres::settling_a_lease_again_returns_held_and_changes_nothing",
            "settle_by_lease::sqlite::settling_a_lease_again_returns_held_and_changes_nothing",
        ],
    },
    Mutant {
        name: "a superseded end by lease alone is not known again",
        file: SETTLE,
        after: "fn may_have_been",
        old: "superseded: true",
        new: "superseded: false",
        red: &[
            "settle_by_lease::postgres::settling_a_lease_again_returns_held_and_changes_nothing",
            "settle_by_lease::sqlite::settling_a_lease_again_returns_held_and_changes_nothing",
        ],
    },
];
