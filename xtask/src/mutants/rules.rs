//! Bugs in the rules that both engines share: the lifecycle, and what the client does
//! with leases.

use super::Mutant;

const LEASE: &str = "crates/longshore/src/client/lease.rs";
const LIFECYCLE: &str = "crates/longshore/src/lifecycle.rs";
const SETTLE: &str = "crates/longshore/src/client/settle.rs";

/// Each must be caught on both engines.
pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "rules: charge an attempt for a release",
        file: LIFECYCLE,
        anchor: "fn requeue_uncharged(",
        find: "attempts: job.attempt - 1,",
        replace: "attempts: job.attempt,",
        caught_by: &[
            "settle::postgres::a_release_is_not_charged_and_is_due_at_once",
            "settle::sqlite::a_release_is_not_charged_and_is_due_at_once",
        ],
    },
    Mutant {
        name: "rules: do not recognise a repeated settle by lease",
        file: SETTLE,
        anchor: "async fn settle_leases",
        find: "settled == Settled::Stored",
        replace: "settled == Settled::LeaseLost",
        caught_by: &[
            "settle_by_lease::postgres::settling_a_lease_again_returns_held_and_changes_nothing",
            "settle_by_lease::sqlite::settling_a_lease_again_returns_held_and_changes_nothing",
        ],
    },
    Mutant {
        name: "rules: do not recognise a repeated settle by lease of a superseded job",
        file: SETTLE,
        anchor: "fn possible_settlements(",
        find: "superseded: true",
        replace: "superseded: false",
        caught_by: &[
            "settle_by_lease::postgres::settling_a_lease_again_returns_held_and_changes_nothing",
            "settle_by_lease::sqlite::settling_a_lease_again_returns_held_and_changes_nothing",
        ],
    },
    // ---- leases that their worker does not have --------------------------------
    Mutant {
        name: "rules: release leases that their worker lists",
        file: LEASE,
        anchor: "pub async fn release_unknown(",
        find: "!held.contains(lease)",
        replace: "!held.contains(lease) || held.len() < usize::MAX",
        caught_by: &[
            "workers::postgres::leases_that_a_worker_does_not_know_are_released_uncharged",
            "workers::sqlite::leases_that_a_worker_does_not_know_are_released_uncharged",
            "http::leases::postgres::a_renewal_releases_an_unnamed_lease_after_half_a_minute",
            "http::leases::sqlite::a_renewal_releases_an_unnamed_lease_after_half_a_minute",
        ],
    },
];
