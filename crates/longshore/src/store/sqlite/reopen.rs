//! Reopening finished members of flows: when the failed part of a flow is retried, and when a task that others were
//! skipped for is retried. [`flow`] decides.

use std::collections::BTreeSet;

use chrono::{DateTime, Utc};
use rusqlite::params;
use uuid::Uuid;

use super::advance::note_reopened;
use super::enqueue::Ready;
use super::settle::tally;
use super::tx::{Columns, Sql, Tx};
use crate::job::{FlowId, JobId, Outcome};
use crate::rules::flow::{self, Candidate, ParentLink, Reopened};
use crate::rules::lifecycle::FAR_FUTURE;

/// The finished ones of these members that did not succeed. A member whose end was stored a moment ago is left
/// out: its end is followed first.
pub(super) fn candidates(tx: &Tx<'_>, ids: &[JobId], before: DateTime<Utc>) -> Sql<Vec<Candidate>> {
    const FINISHED: &str = "
        select 1
          from finished
         where id = ?1
           and outcome <> 'succeeded'
           and (finished_at <= ?2 or skipped)
           and flow is not null
           and not exists (
                 select 1
                   from flow_changes c
                  where c.flow = finished.flow
                    and c.job = finished.id)";
    let mut candidates = Vec::new();
    for id in ids {
        let finished = tx.row(FINISHED, params![id.0.as_bytes(), before.timestamp_micros()], |_| Ok(()))?;
        if finished.is_some() {
            candidates.push(Candidate { job: id.0, links: links_of(tx, *id)? });
        }
    }
    Ok(candidates)
}

fn links_of(tx: &Tx<'_>, child: JobId) -> Sql<Vec<ParentLink>> {
    const LINKS: &str = "
        select parent,
               met
          from links
         where child = ?1";
    tx.rows(LINKS, [child.0.as_bytes()], |row| Ok(ParentLink { parent: row.uuid(0)?, met: row.get(1)? }))
}

/// Returns how many members of the flow were reopened, how many of them counted as failures, and the
/// queues of those that are due. The caller counts them. `advance` opens the links from them to others later, and lets
/// what was skipped because of them wait again.
pub(super) fn reopen_members(tx: &Tx<'_>, reopened: &[Reopened]) -> Sql<(i64, i64, BTreeSet<String>)> {
    const LEAVE: &str = "
        delete from finished
         where id = ?1
        returning lease_no, outcome, flow, skipped";
    const REQUEST: &str = "
        select timeout_ms,
               priority,
               max_attempts,
               kind,
               queue,
               flags,
               grp
          from jobs
         where id = ?1";
    // A child must not start because of what a parent was before.
    const OPEN_LINK: &str = "
        update links
           set met = null
         where parent = ?1
           and child = ?2
           and met is not null";
    let ids: BTreeSet<Uuid> = reopened.iter().map(|reopened| reopened.job).collect();
    for child in &ids {
        for link in links_of(tx, JobId(*child))?.iter().filter(|link| ids.contains(&link.parent)) {
            tx.execute(OPEN_LINK, [link.parent.as_bytes(), child.as_bytes()])?;
        }
    }
    let now = tx.now()?;
    let (mut members, mut failures, mut queues) = (0, 0, BTreeSet::new());
    for Reopened { job, is_held } in reopened {
        let left = tx.row(LEAVE, [job.as_bytes()], |row| {
            let is_skipped = row.get::<_, Option<bool>>(3)?.unwrap_or(false);
            Ok((row.get::<_, i32>(0)?, row.outcome(1)?, row.get::<_, Option<[u8; 16]>>(2)?, is_skipped))
        })?;
        let Some((lease_no, outcome, flow, is_skipped)) = left else { continue };
        let mut request = tx.prepare(REQUEST)?;
        let mut rows = request.query([job.as_bytes()])?;
        let Some(row) = rows.next()? else { continue };
        let (kind, queue, flags, group): (String, String, Option<String>, Option<String>) =
            (row.get(3)?, row.get(4)?, row.get(5)?, row.get(6)?);
        let ready = Ready {
            id: JobId(*job),
            run_at: if *is_held { FAR_FUTURE.timestamp_micros() } else { now },
            timeout_ms: row.get(0)?,
            lease_no,
            priority: row.get(1)?,
            attempt: 0,
            max_attempts: row.get(2)?,
            interruptions: 0,
            keyed: false,
            kind: &kind,
            queue: &queue,
            flags: flags.as_deref(),
            group: group.as_deref(),
            flow,
            is_held: *is_held,
        };
        ready.store(tx)?;
        tally(tx, &queue, &kind, outcome, 0, 0, -1)?;
        if let Some(flow) = flow {
            let was_failure = outcome != Outcome::Succeeded && !is_skipped;
            note_reopened(tx, flow, JobId(*job), was_failure, true)?;
        }
        members += i64::from(flow.is_some());
        failures += i64::from(flow.is_some() && !is_skipped);
        if !is_held {
            queues.insert(queue);
        }
    }
    Ok((members, failures, queues))
}

/// Lets tasks and callbacks wait again that were skipped because of a parent that is now reopened. Returns the
/// flow of each task, for the caller to count.
pub(super) fn bring_back(
    tx: &Tx<'_>,
    children: &BTreeSet<JobId>,
    is_cancelled: impl Fn(Option<FlowId>) -> bool,
) -> Sql<Vec<FlowId>> {
    const SKIPPED: &str = "
        select flow
          from finished
         where id = ?1
           and skipped";
    let (mut reopened, mut flows) = (Vec::new(), Vec::new());
    for child in children {
        let Some(flow) = tx.row(SKIPPED, [child.0.as_bytes()], |row| row.flow(0))? else { continue };
        if flow::comes_back(&links_of(tx, *child)?, is_cancelled(flow)) {
            reopened.push(Reopened { job: child.0, is_held: true });
            flows.extend(flow);
        }
    }
    reopen_members(tx, &reopened)?;
    Ok(flows)
}
