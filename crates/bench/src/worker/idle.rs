//! What a worker costs that has nothing to do.

use std::time::Duration;

use serde_json::{Value, json};

use super::scenarios;
use crate::Result;
use crate::report::Limit;
use crate::server::Admin;

/// Until the poll has slowed down to its idle pace.
const COME_TO_REST: Duration = Duration::from_secs(4);
const STATEMENTS_PER_SECOND: f64 = 2.0;
const RESIDENT_MB: f64 = 30.0;

/// Statements and memory of one idle worker. Call this before anything else:
/// memory that was once used is not given back.
pub(super) async fn measure(admin: &mut Admin, schema: &str, time: Duration) -> Result<(Vec<Limit>, Value)> {
    drop(admin.fresh(schema).await?);
    let commits_before = admin.commits().await?;
    let client = admin.client(schema).await?;
    let running = scenarios::start(&client).await?;
    tokio::time::sleep(COME_TO_REST).await;
    let before = admin.statements().await;
    tokio::time::sleep(time).await;
    let after = admin.statements().await;
    let resident = resident_mb();
    running.stop().await;
    drop(client);
    if let Some((before, after)) = before.zip(after) {
        let more = |(query, calls): (String, i64)| {
            let more = calls - before.get(&query).copied().unwrap_or(0);
            (more > 0).then_some((query, more))
        };
        let mut which: Vec<(String, i64)> = after.into_iter().filter_map(more).collect();
        which.sort_by_key(|(_, calls)| -calls);
        let statements: i64 = which.iter().map(|(_, calls)| calls).sum();
        let facts = json!({ "counted_by": "pg_stat_statements", "statements": which });
        return Ok((limits(statements as f64 / time.as_secs_f64(), resident), facts));
    }
    // The server does not count statements. Its count of transactions includes
    // those of starting and stopping: more than an idle worker's, never less.
    let commits = admin.commits().await? - commits_before;
    let per_second = commits as f64 / (COME_TO_REST + time).as_secs_f64();
    Ok((limits(per_second, resident), json!({ "counted_by": "xact_commit", "commits": commits })))
}

fn limits(per_second: f64, resident: Option<f64>) -> Vec<Limit> {
    let mut limits =
        vec![Limit::new("idle worker, statements per second", per_second, STATEMENTS_PER_SECOND)];
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
