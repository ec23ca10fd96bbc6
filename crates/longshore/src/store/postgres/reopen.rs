//! Reopening finished members of flows: when the failed part of a flow is retried, and when a task that others were
//! skipped for is retried. The flow's row is locked. [`flow`] decides.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use sqlx::Row;
use uuid::Uuid;

use super::turns::add_turns;
use super::tx::{Sql, Tx};
use crate::rules::flow::{self, Candidate, ParentLink, Reopened};

/// The finished ones of a page of members that did not succeed. A
/// member whose end was stored a moment ago is left out: its end is followed first. The rows are locked,
/// so that nobody removes a member on which others are about to wait.
const CANDIDATES: &str = "
    select f.id
      from unnest((select $1::uuid[])) as i(id)
     cross join lateral (
             select f.id
               from longshore.finished f
              where f.id = i.id
                and f.outcome <> 'succeeded'
                and (f.finished_at <= $2 or f.skipped)
                and f.flow is not null
                and not exists (
                      select 1
                        from longshore.flow_changes c
                       where c.flow = f.flow
                         and c.job = f.id)
              limit 1
                for update) as f";

const LINKS_OF: &str = "
    select child, parent, met
      from longshore.links
     where child = any($1)";

/// The skipped ones of these jobs.
const SKIPPED: &str = "
    select f.id, f.flow
      from unnest((select $1::uuid[])) as i(id)
     cross join lateral (
             select f.id, f.flow
               from longshore.finished f
              where f.id = i.id
                and f.skipped
              limit 1
                for update) as f";

/// The skipped ones of these jobs that another transaction has locked.
const LOCKED_SKIPPED: &str = "
    select i.id
      from unnest((select $1::uuid[])) as i(id)
     cross join lateral (
             select true as is_skipped
               from longshore.finished f
              where f.id = i.id
                and f.skipped
              limit 1) as s
      left join lateral (
             select true as is_free
               from longshore.finished f
              where f.id = i.id
                and f.skipped
              limit 1
                for update skip locked) as l
        on true
     where l.is_free is null";

/// Locks the others.
pub(super) async fn locked_skipped(tx: &mut Tx<'_>, ids: &[Uuid]) -> Sql<Vec<Uuid>> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    Ok(sqlx::query_scalar(tx.sql(LOCKED_SKIPPED)).bind(ids).fetch_all(&mut *tx.connection).await?)
}

/// The caller counts the members. `advance` opens the links from them to others later, and lets what was skipped
/// because of them wait again.
const REOPEN_MEMBERS: &str = concat!(
    "
    with deleted as (
      delete from longshore.finished
       where id = any((select $1::uuid[])::uuid[])
      returning id, lease_no, outcome, flow, skipped),
    tallied as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), 0, -count(*), d.outcome, 0, j.queue, j.kind
        from deleted d
        join longshore.jobs j on j.id = d.id
       group by d.outcome, j.queue, j.kind),
    requeued as (
      insert into longshore.ready
             (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags, grp, flow, held)
      select d.id, case when i.held then '9999-12-31 23:59:59+00' else longshore.clock() end,
             longshore.clock(), j.timeout_ms, d.lease_no, j.priority, 0, j.max_attempts,
             0, false, j.kind, j.queue, j.flags, j.grp, j.flow, nullif(i.held, false)
        from deleted d
        join unnest((select $1::uuid[]), (select $2::bool[])) as i(id, held) using (id)
        join longshore.jobs j on j.id = d.id
      returning run_at, priority, queue, grp),",
    add_turns!("requeued"),
    ",
    noted as (
      insert into longshore.flow_changes (flow, job, failure, counted)
      select flow, id, outcome <> 'succeeded' and skipped is not true, true
        from deleted
       where flow is not null
       order by id),
    opened as (   -- a child must not start because of what a parent was before
      update longshore.links
         set met = null
       where parent = any((select $1::uuid[])::uuid[])
         and (child in (select id from deleted)) is true   -- looked up in a hash table, whatever the planner assumes
         and met is not null)
    select (select count(*) from deleted where flow is not null),
           (select count(*) from deleted where flow is not null and skipped is not true),
           array(select distinct queue from requeued where run_at <= longshore.clock())"
);

pub(super) async fn candidates(tx: &mut Tx<'_>, ids: &[Uuid], before: DateTime<Utc>) -> Sql<Vec<Candidate>> {
    let found: Vec<Uuid> =
        sqlx::query_scalar(tx.sql(CANDIDATES)).bind(ids).bind(before).fetch_all(&mut *tx.connection).await?;
    let mut links = links_of(tx, &found).await?;
    let candidate = |job| Candidate { job, links: links.remove(&job).unwrap_or_default() };
    Ok(found.into_iter().map(candidate).collect())
}

async fn links_of(tx: &mut Tx<'_>, children: &[Uuid]) -> Sql<BTreeMap<Uuid, Vec<ParentLink>>> {
    let mut links = BTreeMap::<Uuid, Vec<ParentLink>>::new();
    for row in sqlx::query(tx.sql(LINKS_OF)).bind(children).fetch_all(&mut *tx.connection).await? {
        let link = ParentLink { parent: row.try_get(1)?, met: row.try_get(2)? };
        links.entry(row.try_get(0)?).or_default().push(link);
    }
    Ok(links)
}

/// Returns how many members of the flow were reopened, how many of them counted as failures, and the
/// queues of those that are due.
pub(super) async fn reopen_members(tx: &mut Tx<'_>, reopened: &[Reopened]) -> Sql<(i64, i64, Vec<String>)> {
    if reopened.is_empty() {
        return Ok((0, 0, Vec::new()));
    }
    let row = sqlx::query(tx.sql(REOPEN_MEMBERS))
        .bind(reopened.iter().map(|reopened| reopened.job).collect::<Vec<_>>())
        .bind(reopened.iter().map(|reopened| reopened.is_held).collect::<Vec<_>>())
        .fetch_one(&mut *tx.connection)
        .await?;
    Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?))
}

/// Lets tasks and callbacks wait again that were skipped because of a parent that is now reopened. Returns the
/// flow of each task, for the caller to count.
pub(super) async fn bring_back(
    tx: &mut Tx<'_>,
    children: &[Uuid],
    is_cancelled: impl Fn(Option<Uuid>) -> bool,
) -> Sql<Vec<Uuid>> {
    if children.is_empty() {
        return Ok(Vec::new());
    }
    let skipped: Vec<(Uuid, Option<Uuid>)> =
        sqlx::query_as(tx.sql(SKIPPED)).bind(children).fetch_all(&mut *tx.connection).await?;
    let ids: Vec<Uuid> = skipped.iter().map(|(id, _)| *id).collect();
    let links = links_of(tx, &ids).await?;
    let comes_back = |(job, flow): &(Uuid, Option<Uuid>)| {
        let links = links.get(job).map_or(&[][..], Vec::as_slice);
        flow::comes_back(links, is_cancelled(*flow))
    };
    let back: Vec<(Uuid, Option<Uuid>)> = skipped.into_iter().filter(comes_back).collect();
    let reopened: Vec<Reopened> = back.iter().map(|(job, _)| Reopened { job: *job, is_held: true }).collect();
    reopen_members(tx, &reopened).await?;
    Ok(back.into_iter().filter_map(|(_, flow)| flow).collect())
}
