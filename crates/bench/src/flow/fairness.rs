//! `bench flow --only fairness`: how evenly 100 groups with very different backlogs are served,
//! until the smallest one has no more jobs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use longshore::store::{ClaimCursor, Claimed};
use serde_json::json;

use super::{BULK, Backend, Bar, Figure, GROUPS, Options, SCHEMA};
use crate::report::{median, thousands};
use crate::{Result, join_all, library};

/// The backlogs grow by the same factor from group to group.
const SMALLEST: f64 = 100.0;
const LARGEST: f64 = 10_000.0;
/// A batch of a busy worker, and one for the free slots of a worker with default settings.
const BATCHES: [u32; 2] = [500, 24];
const CLAIMERS: usize = 2;
/// How long a claimer waits if the other one serves all groups.
const PAUSE: Duration = Duration::from_millis(1);
/// Jain's index: 1 if all groups get the same, 0.01 if one of 100 groups gets everything.
const BAR: f64 = 0.97;

pub(super) async fn measure(options: &Options, backend: &mut Backend) -> Result<Vec<Figure>> {
    let mut rounds: [Vec<Outcome>; BATCHES.len()] = Default::default();
    for _ in 0..options.rounds {
        for (outcomes, batch) in rounds.iter_mut().zip(BATCHES) {
            outcomes.push(serve(options, backend, batch).await?);
        }
    }
    let figure = |(outcomes, batch): (&Vec<Outcome>, u32)| {
        let indexes: Vec<f64> = outcomes.iter().map(|outcome| jain(&outcome.served)).collect();
        // Not the median: it would hide the round in which one group got most of the jobs.
        let worst = indexes.iter().copied().fold(1.0, f64::min);
        let served = || outcomes.iter().flat_map(|outcome| outcome.served.iter().copied());
        let note = format!(
            "median {:.3}; served {} to {} jobs of backlogs of {} to {}",
            median(indexes.clone()).unwrap_or(0.0),
            served().min().unwrap_or(0),
            served().max().unwrap_or(0),
            thousands(backlog(options, 0) as f64),
            thousands(backlog(options, GROUPS - 1) as f64),
        );
        Figure::new(format!("Jain's index, {CLAIMERS} × {batch}, worst round"), worst, Bar::AtLeast(BAR))
            .note(note)
            .details(json!({
                "indexes": indexes,
                "served": outcomes.iter().map(|outcome| &outcome.served).collect::<Vec<_>>(),
            }))
    };
    Ok(rounds.iter().zip(BATCHES).map(figure).collect())
}

/// The number of jobs of a group.
fn backlog(options: &Options, group: u64) -> u64 {
    let factor = (LARGEST / SMALLEST).powf(group as f64 / (GROUPS - 1) as f64);
    // The smallest backlog stays the same: the index needs enough turns of each group.
    let largest = if options.quick { 0.1 } else { 1.0 };
    ((SMALLEST * factor * largest).max(SMALLEST)) as u64
}

fn name(group: u64) -> String {
    format!("customer-{group}")
}

#[derive(Default)]
struct Outcome {
    /// Jobs served, by group.
    served: Vec<u64>,
}

/// Counts the jobs served until one group has none left.
struct Counts {
    /// Jobs served and jobs in all, by group.
    groups: HashMap<String, (u64, u64)>,
    is_over: bool,
}

impl Counts {
    fn add(&mut self, jobs: &[Claimed]) {
        for job in jobs {
            if let Some((served, all)) = job.group().and_then(|group| self.groups.get_mut(group)) {
                *served += 1;
                self.is_over |= served == all;
            }
        }
    }
}

async fn serve(options: &Options, backend: &mut Backend, batch: u32) -> Result<Outcome> {
    let tables = backend.fresh(SCHEMA).await?;
    // The largest first, so that the jobs of the smallest are at the end of the queue.
    for group in (0..GROUPS).rev() {
        let job = |n| library::job(n).group(name(group));
        library::enqueue_bulk_of(&tables.client, backlog(options, group), BULK, job).await?;
    }
    backend.vacuum(SCHEMA).await?;
    let groups = (0..GROUPS).map(|group| (name(group), (0, backlog(options, group)))).collect();
    let counts = Arc::new(Mutex::new(Counts { groups, is_over: false }));
    let mut claimers = Vec::new();
    for _ in 0..CLAIMERS {
        let claimer = library::Claimer::register(&tables.client, None, batch, ClaimCursor::default()).await?;
        claimers.push(tokio::spawn(claim_until_over(claimer, counts.clone())));
    }
    join_all(claimers).await?;
    let counts = counts.lock().map_err(|_| "a claimer panicked")?;
    Ok(Outcome { served: counts.groups.values().map(|(served, _)| *served).collect() })
}

async fn claim_until_over(mut claimer: library::Claimer, counts: Arc<Mutex<Counts>>) -> Result<u64> {
    let mut done = 0;
    loop {
        let claims = claimer.claim().await?;
        {
            let mut counts = counts.lock().map_err(|_| "a claimer panicked")?;
            if counts.is_over {
                return Ok(done);
            }
            counts.add(&claims.jobs);
        }
        claimer.settle(&claims.jobs).await?;
        done += claims.jobs.len() as u64;
        if claims.jobs.is_empty() {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// The square of the sum, divided by the number of groups and the sum of the squares.
fn jain(served: &[u64]) -> f64 {
    let sum: f64 = served.iter().map(|jobs| *jobs as f64).sum();
    let squares: f64 = served.iter().map(|jobs| (*jobs as f64).powi(2)).sum();
    if squares == 0.0 { 0.0 } else { sum * sum / (served.len() as f64 * squares) }
}

#[cfg(test)]
mod tests {
    use super::jain;

    #[test]
    fn the_index_is_one_if_all_get_the_same_and_the_inverse_of_the_groups_if_one_gets_all() {
        assert_eq!(jain(&[7, 7, 7, 7]), 1.0);
        assert_eq!(jain(&[9, 0, 0, 0]), 0.25);
        assert_eq!(jain(&[0, 0]), 0.0);
    }
}
