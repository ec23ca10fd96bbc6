//! Bugs in the lifecycle rules and the client, which both engines share.

use super::Mutant;

const LIFECYCLE: &str = "crates/longshore/src/lifecycle.rs";
const SETTLE: &str = "crates/longshore/src/client/settle.rs";

/// Each must be caught on both engines.
pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "rules: charge an attempt for a release",
        file: LIFECYCLE,
        anchor: "fn uncharged(",
        find: "attempts: job.attempt - 1,",
        replace: "attempts: job.attempt,",
        caught_by: &[
            "postgres::settle::a_release_is_not_charged_and_is_due_at_once",
            "sqlite::settle::a_release_is_not_charged_and_is_due_at_once",
        ],
    },
    Mutant {
        name: "rules: do not recognise a repeated settle by lease",
        file: SETTLE,
        anchor: "async fn settle_leases",
        find: "settled == Settled::Stored",
        replace: "settled == Settled::LeaseLost",
        caught_by: &[
            "postgres::leases::a_lease_settled_again_is_held_again_and_nothing_changes",
            "sqlite::leases::a_lease_settled_again_is_held_again_and_nothing_changes",
        ],
    },
    Mutant {
        name: "rules: do not recognise a repeated settle by lease of a superseded job",
        file: SETTLE,
        anchor: "fn may_have_been",
        find: "superseded: true",
        replace: "superseded: false",
        caught_by: &[
            "postgres::leases::a_lease_settled_again_is_held_again_and_nothing_changes",
            "sqlite::leases::a_lease_settled_again_is_held_again_and_nothing_changes",
        ],
    },
];
