//! Moves of jobs between tables, on Postgres.

use async_trait::async_trait;
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::enqueue::{INSERT_STEP, insert_any, insert_members};
use super::turns::{add_turns, add_turns_of_removed};
use super::tx::{self, Tx};
use super::{check, events, lease, operate, steps, workers};
use crate::job::{FlowId, JobId, WorkerId};
use crate::rules::enqueue::{EnqueuedBatch, ValidEdit, ValidJob};
use crate::rules::flow::{Change, Condition, End, Reopened};
use crate::rules::lifecycle::{Finished, Waiting};
use crate::store::advance::{EndedParent, LockedFlows, MadeDue, StoredChange};
use crate::store::check::Dialect;
use crate::store::db::Sql;
use crate::store::events::Woken;
use crate::store::moves::Moves;
use crate::store::operate_flows::ReopenedMembers;
use crate::store::{Beat, Claimed, Durability, Fenced, Lease, LiveLease, NewLink, NewMember, NewStep};

#[async_trait]
impl Moves for Tx<'_> {
    async fn insert_jobs(&mut self, jobs: &[ValidJob]) -> Sql<EnqueuedBatch> {
        Ok(insert_any(self, jobs).await?)
    }

    async fn wake(&mut self, events: &[String], limit: u32) -> Sql<Woken> {
        Ok(events::wake(self, events, limit).await?)
    }

    async fn cancel_waiting(&mut self, id: JobId, seen: &Waiting, attempts: u16) -> Sql<bool> {
        Ok(operate::cancel(self, id, seen, attempts).await?)
    }

    async fn run_now(&mut self, id: JobId, seen: &Waiting) -> Sql<bool> {
        Ok(operate::run_now(self, id, seen).await?)
    }

    async fn rewrite(&mut self, id: JobId, seen: &Waiting, edit: &ValidEdit) -> Sql<bool> {
        Ok(operate::rewrite(self, id, seen, edit).await?)
    }

    async fn reopen_finished(&mut self, id: JobId, seen: &Finished) -> Sql<bool> {
        Ok(operate::reopen(self, id, seen).await?)
    }

    async fn remove_finished(&mut self, id: JobId, seen: &Finished) -> Sql<bool> {
        Ok(operate::remove(self, id, seen).await?)
    }

    async fn save_steps(&mut self, steps: &[NewStep]) -> Sql<Vec<Fenced>> {
        Ok(steps::save_steps(self, steps).await?)
    }

    async fn claims(&mut self, leases: &[Lease]) -> Sql<Vec<Option<Claimed>>> {
        Ok(lease::claims(self, leases).await?)
    }

    async fn beat(&mut self, worker: WorkerId, held: &[Lease]) -> Sql<Beat> {
        Ok(workers::beat(self, worker, held).await?)
    }

    async fn beat_and_list(&mut self, worker: WorkerId) -> Sql<Option<Vec<LiveLease>>> {
        Ok(workers::beat_and_list(self, worker).await?)
    }

    fn dialect(&mut self) -> Sql<Dialect> {
        Ok(check::dialect(self))
    }

    async fn texts(&mut self, statement: String) -> Sql<Vec<Vec<String>>> {
        Ok(check::texts(self, statement).await?)
    }

    async fn durability(&mut self) -> Sql<Durability> {
        Ok(check::durability(self).await?)
    }

    // ---- flows ------------------------------------------------------------

    async fn insert_members(&mut self, flow: Option<FlowId>, members: &[NewMember]) -> Sql<()> {
        for step in members.chunks(INSERT_STEP) {
            insert_members(self, flow, step).await?;
        }
        Ok(())
    }

    async fn insert_links(&mut self, links: &[NewLink]) -> Sql<()> {
        for step in links.chunks(INSERT_STEP) {
            sqlx::query(self.sql(INSERT_LINKS))
                .bind(step.iter().map(|link| link.parent).collect::<Vec<_>>())
                .bind(step.iter().map(|link| link.child.0).collect::<Vec<_>>())
                .bind(step.iter().map(|link| link.condition.as_str()).collect::<Vec<_>>())
                .execute(&mut *self.connection)
                .await?;
        }
        Ok(())
    }

    async fn changes(&mut self, flows: &[Uuid], limit: u32) -> Sql<Vec<StoredChange>> {
        let ends = sqlx::query(self.sql(ENDS)).bind(flows).bind(i64::from(limit));
        let mut found = ends.fetch_all(&mut *self.connection).await?;
        if found.is_empty() {
            let changes = sqlx::query(self.sql(CHANGES)).bind(flows).bind(i64::from(limit));
            found = changes.fetch_all(&mut *self.connection).await?;
        }
        Ok(found.iter().map(stored_change).collect::<tx::Sql<_>>()?)
    }

    async fn close_links(&mut self, parents: &[EndedParent], limit: usize) -> Sql<Vec<(Uuid, Uuid)>> {
        let succeeded = parents.iter().filter(|parent| parent.end == End::Succeeded);
        let closed = sqlx::query_as(self.sql(CLOSE_LINKS))
            .bind(parents.iter().map(|parent| parent.id).collect::<Vec<_>>())
            .bind(limit as i64)
            .bind(succeeded.map(|parent| parent.id).collect::<Vec<_>>())
            .bind(met_by(End::Succeeded))
            .bind(met_by(End::Failed));
        Ok(closed.fetch_all(&mut *self.connection).await?)
    }

    async fn open_links(&mut self, parents: &[Uuid], limit: usize) -> Sql<Vec<(Uuid, Uuid)>> {
        let opened = sqlx::query_as(self.sql(OPEN_LINKS)).bind(parents).bind(limit as i64);
        Ok(opened.fetch_all(&mut *self.connection).await?)
    }

    async fn make_due(&mut self, jobs: &[Uuid]) -> Sql<MadeDue> {
        let (jobs, queues) =
            sqlx::query_as(self.sql(MAKE_DUE)).bind(jobs).fetch_one(&mut *self.connection).await?;
        Ok(MadeDue { jobs, queues })
    }

    async fn end_waiting(&mut self, jobs: &[Uuid], reasons: &[String]) -> Sql<Vec<Uuid>> {
        let ended = sqlx::query_scalar(self.sql(END_WAITING)).bind(jobs).bind(reasons);
        Ok(ended.fetch_all(&mut *self.connection).await?)
    }

    async fn reopen(&mut self, jobs: &[Reopened]) -> Sql<ReopenedMembers> {
        let (members, failures, queues): (i64, i64, _) = sqlx::query_as(self.sql(REOPEN_MEMBERS))
            .bind(jobs.iter().map(|reopened| reopened.job).collect::<Vec<_>>())
            .bind(jobs.iter().map(|reopened| reopened.is_held).collect::<Vec<_>>())
            .fetch_one(&mut *self.connection)
            .await?;
        Ok(ReopenedMembers { members: members as u64, failures: failures as u64, queues })
    }

    async fn store_counts(&mut self, flows: &LockedFlows, followed: &[i64]) -> Sql<()> {
        let counts = || flows.values().map(|flow| flow.counts);
        sqlx::query(self.sql(STORE_COUNTS))
            .bind(flows.keys().copied().collect::<Vec<_>>())
            .bind(counts().map(|counts| counts.open).collect::<Vec<_>>())
            .bind(counts().map(|counts| counts.failed).collect::<Vec<_>>())
            .bind(counts().map(|counts| counts.has_ended).collect::<Vec<_>>())
            .bind(followed)
            .execute(&mut *self.connection)
            .await?;
        Ok(())
    }
}

const INSERT_LINKS: &str = "
    insert into longshore.links (parent, child, condition)
    select *
      from unnest($1::uuid[], $2::uuid[], $3::text[])";

/// The first `$2` changes if no member was reopened, which is almost always the case; otherwise none.
const ENDS: &str = "
    select c.id, c.flow, c.job, c.succeeded, c.failure, c.counted, false as is_reopened
      from longshore.flow_changes c
     where c.flow = any($1)
       and not exists (
             select 1
               from longshore.flow_changes r
              where r.flow = any($1)
                and r.job is not null
                and r.succeeded is null)
     order by c.id
     limit $2";

/// Of flows with a reopened member: all changes up to the `$2`-th reopening, which may come after many ends.
/// Of the other flows: the first `$2` changes.
const CHANGES: &str = "
    with reopened as materialized (
      select i.flow
        from unnest($1::uuid[]) as i(flow)
       where exists (
               select 1
                 from longshore.flow_changes c
                where c.flow = i.flow
                  and c.job is not null
                  and c.succeeded is null)),
    returns as materialized (
      select c.id
        from longshore.flow_changes c
       where c.flow = any(array(select flow from reopened))
         and c.job is not null
         and c.succeeded is null
       order by c.id
       limit $2)
    select c.id, c.flow, c.job, c.succeeded, c.failure, c.counted, true as is_reopened
      from longshore.flow_changes c
     where c.flow = any(array(select flow from reopened))
       and c.id <= (select max(id) from returns)
     union all
    (select c.id, c.flow, c.job, c.succeeded, c.failure, c.counted, false as is_reopened
       from longshore.flow_changes c
      where c.flow = any($1)
        and c.flow <> all(array(select flow from reopened))
      order by c.id
      limit $2)
     order by id";

fn stored_change(row: &PgRow) -> tx::Sql<StoredChange> {
    let end = row.try_get::<Option<bool>, _>("succeeded")?.map(End::of);
    let (is_failure, is_counted) = (row.try_get("failure")?, row.try_get("counted")?);
    let change = |job| Change { job, end, is_failure, is_counted };
    Ok(StoredChange {
        id: row.try_get("id")?,
        flow: row.try_get("flow")?,
        change: row.try_get::<Option<Uuid>, _>("job")?.map(change),
        is_of_reopened: row.try_get("is_reopened")?,
    })
}

/// The conditions that are met by a parent that ended in this way.
fn met_by(end: End) -> Vec<&'static str> {
    Condition::ALL.into_iter().filter(|condition| condition.is_met(end)).map(Condition::as_str).collect()
}

/// Finds each link by its `ctid`, whatever the planner assumes about the table.
const CLOSE_LINKS: &str = "
    update longshore.links
       set met = condition = any(case when parent = any($3) then $4::text[] else $5::text[] end)
     where ctid = any(array(
             select ctid
               from longshore.links
              where parent = any($1)
                and met is null
              limit $2))
    returning parent, child";

const OPEN_LINKS: &str = "
    update longshore.links
       set met = null
     where ctid = any(array(
             select ctid
               from longshore.links
              where parent = any($1)
                and met is not null
              limit $2))
    returning parent, child";

const MAKE_DUE: &str = concat!(
    "
    with deleted as (
      delete from longshore.ready
       where ctid = any(array(
               select w.row_id
                 from unnest((select $1::uuid[])) as i(id)
                cross join lateral (
                        select r.ctid as row_id
                          from longshore.ready r
                         where r.id = i.id
                           and r.held
                         limit 1
                           for update skip locked) as w))
      returning *),
    requeued as (
      insert into longshore.ready
             (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags, grp, flow)
      select d.id, greatest(j.run_at, longshore.clock()), longshore.clock(), d.timeout_ms, d.lease_no, d.priority,
             d.attempt, d.max_attempts, d.interruptions, d.keyed, d.kind, d.queue, d.flags, d.grp, d.flow
        from deleted d
       cross join lateral (
               select run_at
                 from longshore.jobs
                where id = d.id
                limit 1) as j
      returning run_at, priority, queue, grp),",
    add_turns!("requeued"),
    "
    select array(select id from deleted),
           array(select distinct queue from requeued where run_at <= longshore.clock())"
);

/// Ends waiting jobs as cancelled, whatever they wait for. They do not count as failures. Skips locked jobs.
const END_WAITING: &str = concat!(
    "
    with deleted as (
      delete from longshore.ready
       where ctid = any(array(
               select w.row_id
                 from unnest((select $1::uuid[])) as i(id)
                cross join lateral (
                        select r.ctid as row_id
                          from longshore.ready r
                         where r.id = i.id
                         limit 1
                           for update skip locked) as w))
      returning *),
    finished_jobs as (
      insert into longshore.finished
             (id, finished_at, lease_no, outcome, attempts, max_attempts, interruptions, last_error, flow, skipped)
      select d.id, longshore.clock(), d.lease_no, 'cancelled', d.attempt, d.max_attempts, d.interruptions, i.reason,
             d.flow, true
        from deleted d
        join unnest((select $1::uuid[]), (select $2::text[])) as i(id, reason) using (id)),
    deleted_keys as (
      delete from longshore.keys
       where job = any(array(select id from deleted where keyed))),
    tallied as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), count(*), count(*), 'cancelled', 0, queue, kind
        from deleted
       group by queue, kind),",
    add_turns_of_removed!("deleted"),
    ",
    noted_ends as (
      insert into longshore.flow_changes (flow, job, succeeded, failure)
      select flow, id, false, false
        from deleted
       where flow is not null
       order by id)
    select id from deleted"
);

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

const STORE_COUNTS: &str = "
    with followed as (
      delete from longshore.flow_changes
       where id = any((select $5::int8[])::int8[]))
    update longshore.flows f
       set open = i.open,
           failed = i.failed,
           ended_at = case when not i.has_ended then null else coalesce(f.ended_at, longshore.clock()) end,
           cancelling_at = case when not i.has_ended then f.cancelling_at end,   -- nothing is left to cancel
           deadline = case   -- a flow that is open again must not end because of a deadline that has passed
                        when f.ended_at is null or i.has_ended or f.deadline > longshore.clock() then f.deadline
                      end
      from unnest((select $1::uuid[]), (select $2::int8[]), (select $3::int8[]), (select $4::bool[]))
        as i(id, open, failed, has_ended)
     where f.id = i.id";
