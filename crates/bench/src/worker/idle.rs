//! `bench worker --only idle`: what a worker without jobs costs.

use std::time::Duration;

use serde_json::{Value, json};

use super::scenarios;
use crate::Result;
use crate::postgres_server::Admin;
use crate::report::{Limit, resident_mb};

/// How long the worker needs to slow its polling down to the idle rate.
const SLOW_DOWN: Duration = Duration::from_secs(4);
/// Commits of the benchmark's own readings between the two commit counts.
const OWN_COMMITS: u64 = 2;
/// The targets.
const STATEMENTS_PER_SECOND: f64 = 2.0;
const RESIDENT_MB: f64 = 30.0;

/// Measures the statements and the memory of one idle worker. Call this before anything
/// else is measured: a process does not return memory that it has used.
pub(super) async fn measure(admin: &mut Admin, schema: &str, time: Duration) -> Result<(Vec<Limit>, Value)> {
    drop(admin.fresh_schema(schema).await?);
    let counts_statements = admin.enable_statement_counts().await;
    let client = admin.client(schema).await?;
    let running = scenarios::start(&client).await?;
    tokio::time::sleep(SLOW_DOWN).await;
    let (statements, commits) = (admin.statement_counts().await?, admin.commits_so_far().await?);
    tokio::time::sleep(time).await;
    let resident = resident_mb();
    let (statements_after, commits_after) = (admin.statement_counts().await?, admin.commits_so_far().await?);
    running.stop().await;
    drop(client);
    // The second count includes the commits of the first reading.
    let commits = commits_after.saturating_sub(commits + OWN_COMMITS);
    let per_second = |count: f64| count / time.as_secs_f64();
    if !counts_statements {
        // A transaction with several statements counts only once here.
        let details = json!({ "counted_by": "xact_commit", "commits": commits });
        return Ok((limits("transactions", per_second(commits as f64), resident), details));
    }
    let new_calls = |(query, calls): (String, i64)| {
        let new = calls - statements.get(&query).copied().unwrap_or(0);
        (new > 0).then_some((query, new))
    };
    let mut executed: Vec<(String, i64)> = statements_after.into_iter().filter_map(new_calls).collect();
    executed.sort_by_key(|(_, calls)| -calls);
    let count: i64 = executed.iter().map(|(_, calls)| calls).sum();
    let details = json!({ "counted_by": "pg_stat_statements", "statements": executed });
    Ok((limits("statements", per_second(count as f64), resident), details))
}

fn limits(counted: &str, per_second: f64, resident: Option<f64>) -> Vec<Limit> {
    let name = format!("idle worker, {counted} per second");
    let mut limits = vec![Limit::new(name, per_second, STATEMENTS_PER_SECOND)];
    if let Some(resident) = resident {
        limits.push(Limit::new("idle worker, resident MB", resident, RESIDENT_MB));
    }
    limits
}
