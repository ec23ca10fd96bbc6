//! Compares both engines: random histories of requests, each taken step by step on SQLite and on Postgres. The responses
//! must be equal, and so must all records. This is what guards the pair of engines: a rule that one of them follows
//! differently is a difference in some response.
//!
//! | File | Owns |
//! |---|---|
//! | `script` | which step comes next, by the seed and by the replies so far |
//! | `side` | how a step is taken on one engine |
//! | `names` | names for ids, which differ between the engines |
//! | `history` | taking the steps on both sides, and comparing replies and records |
//! | `report` | the printed difference, and how often each kind of step had which outcome |
//!
//! The clock of both databases is pinned and only moves with the script. There is one request at a time; races have
//! cases of their own. What may differ although nothing is wrong, the script avoids:
//!
//! - A delay with jitter depends on the id of the job, so both bounds of the jitter are equal.
//! - A server remembers where the last claim of a worker stopped, for a time of its host. So each claim goes to a new
//!   server.
//! - The changes of one operation are made at once. So it retries no two jobs with one unique key, and flows follow
//!   afterwards.
//! - Which of several groups that join the line in one statement comes first is up to the engine. So claims from queues with
//!   groups take all that is due.
//!
//! One thing is not compared: the place of a group in line. A turn of a group without due jobs counts until a claim removes it, and
//! the engines remove them at different times.
//!
//! `LONGSHORE_COMPARE_SEED=17 cargo xtask test compare` repeats one history. `LONGSHORE_COMPARE_SEEDS=20` and
//! `LONGSHORE_COMPARE_REQUESTS=1000` make more and longer ones; do that after a change of an engine.

mod history;
mod names;
mod report;
mod script;
mod side;

use std::time::Instant;

use crate::fixture::{self, number_in_environment};
use history::History;
use report::Coverage;

/// How many steps a history has.
const STEPS: u64 = 500;
/// The seeds that are run. Always the same ones, so that a change is not blamed for a difference that was there before. Together
/// they have each kind of step at least once with success.
const FIXED_SEEDS: [u64; 4] = [1, 2, 3, 7];
/// With fewer steps in total, some kinds of steps may not succeed once.
const ENOUGH_STEPS: u64 = 1500;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_engines_give_the_same_responses_and_records() {
    let steps = number_in_environment("LONGSHORE_COMPARE_REQUESTS").unwrap_or(STEPS);
    let seeds = match number_in_environment("LONGSHORE_COMPARE_SEED") {
        Some(seed) => vec![seed],
        None => {
            let number = number_in_environment("LONGSHORE_COMPARE_SEEDS");
            number.map_or(FIXED_SEEDS.to_vec(), |number| (1..=number).collect())
        }
    };
    let mut coverage = Coverage::default();
    for seed in seeds.iter().copied() {
        let began = Instant::now();
        coverage = fixture::run_on_both(|sides| async move {
            History::run(seed, steps as usize, sides, &mut coverage).await;
            coverage
        })
        .await;
        println!("seed {seed}: {steps} steps in {:.1} s", began.elapsed().as_secs_f64());
    }
    println!("{}", coverage.table());
    if steps * seeds.len() as u64 >= ENOUGH_STEPS {
        let never = coverage.without_success(script::requests().iter().map(|request| request.name));
        assert_eq!(never, Vec::<&str>::new(), "these steps never succeeded, so they compare nothing");
    }
}
