//! What a worker costs that has nothing to do.

use std::time::Duration;

use serde_json::{Value, json};

use super::scenarios;
use crate::Result;
use crate::postgres_server::Admin;
use crate::report::Limit;

/// Until the poll has slowed down to its idle pace.
const COME_TO_REST: Duration = Duration::from_secs(4);
/// Readings between the two that count.
const OUR_OWN_COMMITS: u64 = 2;
const STATEMENTS_PER_SECOND: f64 = 2.0;
const RESIDENT_MB: f64 = 30.0;

/// Statements and memory of one idle worker. Call this before anything else:
/// memory that was once used is not given back.
pub(super) async fn measure(admin: &mut Admin, schema: &str, time: Duration) -> Result<(Vec<Limit>, Value)> {
    drop(admin.fresh_schema(schema).await?);
    let counts_statements = admin.count_statements().await;
    let client = admin.client(schema).await?;
    let running = scenarios::start(&client).await?;
    tokio::time::sleep(COME_TO_REST).await;
    let (statements, commits) = (admin.statements().await?, admin.commits_so_far().await?);
    tokio::time::sleep(time).await;
    let resident = resident_mb();
    let (statements_after, commits_after) = (admin.statements().await?, admin.commits_so_far().await?);
    running.stop().await;
    drop(client);
    // The second reading sees what the first one committed.
    let commits = commits_after.saturating_sub(commits + OUR_OWN_COMMITS);
    let per_second = |count: f64| count / time.as_secs_f64();
    if !counts_statements {
        // A transaction of several statements counts once here.
        let facts = json!({ "counted_by": "xact_commit", "commits": commits });
        return Ok((limits("transactions", per_second(commits as f64), resident), facts));
    }
    let more = |(query, calls): (String, i64)| {
        let more = calls - statements.get(&query).copied().unwrap_or(0);
        (more > 0).then_some((query, more))
    };
    let mut which: Vec<(String, i64)> = statements_after.into_iter().filter_map(more).collect();
    which.sort_by_key(|(_, calls)| -calls);
    let count: i64 = which.iter().map(|(_, calls)| calls).sum();
    let facts = json!({ "counted_by": "pg_stat_statements", "statements": which });
    Ok((limits("statements", per_second(count as f64), resident), facts))
}

fn limits(what: &str, per_second: f64, resident: Option<f64>) -> Vec<Limit> {
    let name = format!("idle worker, {what} per second");
    let mut limits = vec![Limit::new(name, per_second, STATEMENTS_PER_SECOND)];
    if let Some(resident) = resident {
        limits.push(Limit::new("idle worker, resident MB", resident, RESIDENT_MB));
    }
    limits
}

/// What this process holds in memory, where that can be told.
fn resident_mb() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: f64 = kilobytes.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kilobytes / 1024.0)
}
