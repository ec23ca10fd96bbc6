//! Live leases: the claims behind them, progress, checkpoints, and whether a lease is
//! still held. How leases end is in `settle`.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use sqlx::Row;
use uuid::Uuid;

use super::claim::Reader;
use super::tx::{Sql, Tx};
use crate::job::JobId;
use crate::store::{Claimed, Fenced, Lease};

/// Makes one index probe per lease, whatever the planner assumes about the table. The
/// columns are those of a claim, followed by the position of the lease in the input.
const CLAIMS: &str = "
    select r.claimed_at, r.id, r.kind, r.attempt::int4, r.max_attempts, r.lease_no, r.timeout_ms, r.flags,
           j.run_at, j.payload::text, j.options::text,
           r.flow, r.queue, r.priority, r.interruptions, i.nth, r.grp, r.gate
      from unnest((select $1::uuid[]), (select $2::int4[]), (select $3::uuid[])) with ordinality
        as i(id, lease_no, worker, nth)
     cross join lateral (
             select *
               from longshore.running h
              where h.id = i.id
                and h.lease_no = i.lease_no   -- fence: a newer lease owns the row
                and h.worker = i.worker
              limit 1) as r
     cross join lateral (
             select run_at, payload, options
               from longshore.jobs
              where id = r.id
              limit 1) as j";

pub(super) async fn claims(tx: &mut Tx<'_>, leases: &[Lease]) -> Sql<Vec<Option<Claimed>>> {
    let rows = sqlx::query(tx.sql(CLAIMS))
        .bind(leases.iter().map(|lease| lease.id.0).collect::<Vec<_>>())
        .bind(leases.iter().map(|lease| lease.lease_no).collect::<Vec<_>>())
        .bind(leases.iter().map(|lease| lease.worker.0).collect::<Vec<_>>())
        .fetch_all(&mut *tx.connection)
        .await?;
    let mut claims: Vec<_> = leases.iter().map(|_| None).collect();
    for row in &rows {
        let nth = row.try_get::<i64, _>(15)? as usize - 1;
        let Lease { id, worker, .. } = leases[nth];
        let mut claim = Reader::new(worker, row.try_get(0)?, None).read(row, id)?;
        claim.group = row.try_get::<Option<&str>, _>(16)?.map(Into::into);
        claim.gated = row.try_get::<Option<i32>, _>(17)?.is_some();
        claims[nth] = Some(claim);
    }
    Ok(claims)
}

/// Like the statements of `settle`, this waits only 2 s for a row that the user's own
/// transaction has locked: after a client gives up, its statement keeps waiting in the
/// server.
const MARK_STARTED: &str = "
    update longshore.running
       set started_at = coalesce(started_at, longshore.clock())   -- the first start counts
     where id = (select $1::uuid where set_config('lock_timeout', '2s', true) <> '')
       and lease_no = $2
       and worker = $3";

pub(super) async fn mark_started(tx: &mut Tx<'_>, lease: &Lease) -> Sql<Fenced> {
    let done = sqlx::query(tx.sql(MARK_STARTED))
        .bind(lease.id.0)
        .bind(lease.lease_no)
        .bind(lease.worker.0)
        .execute(&mut *tx.connection)
        .await?;
    Ok(fenced(done.rows_affected() > 0))
}

const PROGRESS: &str = "
    with input as (
      select *
        from unnest((select $1::uuid[] where set_config('lock_timeout', '2s', true) <> ''), (select $2::int4[]), (select $3::uuid[]), (select $4::text[])) as input(id, lease_no, worker, progress)),
    held as (
      select r.id, i.lease_no, i.progress
        from longshore.running r
        join input i
          on i.id = r.id
         and i.lease_no = r.lease_no   -- fence: a newer lease owns the row
         and i.worker = r.worker
       order by r.id
         for no key update of r)
    update longshore.running r
       set progress = h.progress::json
      from held h
     where r.id = h.id
    returning r.id, r.lease_no";

pub(super) async fn progress(tx: &mut Tx<'_>, reports: &[(Lease, Box<RawValue>)]) -> Sql<Vec<Fenced>> {
    // Only the last report of each lease: one statement can update a row only once.
    let newest: BTreeMap<Lease, &str> =
        reports.iter().map(|(lease, progress)| (*lease, progress.get())).collect();
    let rows = sqlx::query(tx.sql(PROGRESS))
        .bind(newest.keys().map(|lease| lease.id.0).collect::<Vec<_>>())
        .bind(newest.keys().map(|lease| lease.lease_no).collect::<Vec<_>>())
        .bind(newest.keys().map(|lease| lease.worker.0).collect::<Vec<_>>())
        .bind(newest.values().copied().collect::<Vec<_>>())
        .fetch_all(&mut *tx.connection)
        .await?;
    let mut held = Vec::with_capacity(rows.len());
    for row in rows {
        held.push((row.try_get::<Uuid, _>(0)?, row.try_get::<i32, _>(1)?));
    }
    Ok(reports.iter().map(|(lease, _)| fenced(held.contains(&(lease.id.0, lease.lease_no)))).collect())
}

/// Locks the lease's row so that the lease cannot be taken meanwhile. A checkpoint of a
/// lost lease cannot overwrite one of the next lease. Like the statements of `settle`, this
/// waits only 2 s for a locked row.
const SAVE_CHECKPOINTS: &str = "
    with input as (
      select *
        from unnest((select $1::uuid[] where set_config('lock_timeout', '2s', true) <> ''), (select $2::int4[]), (select $3::uuid[]), (select $4::text[]))
          as input(id, lease_no, worker, data)),
    held as (
      select r.id, r.lease_no, i.data
        from longshore.running r
        join input i
          on i.id = r.id
         and i.lease_no = r.lease_no   -- fence: a newer lease owns the row
         and i.worker = r.worker
       order by r.id
         for key share of r)
    insert into longshore.checkpoints as c (job, lease_no, data, saved_at)
    select id, lease_no, data::json, longshore.clock()
      from held
        on conflict (job) do update
       set lease_no = excluded.lease_no,
           data = excluded.data,
           saved_at = excluded.saved_at
    returning c.job, c.lease_no";

pub(super) async fn save_checkpoints(
    tx: &mut Tx<'_>,
    checkpoints: &[(Lease, Box<RawValue>)],
) -> Sql<Vec<Fenced>> {
    // One statement can store only one checkpoint of a job.
    let newest: BTreeMap<Lease, &str> =
        checkpoints.iter().map(|(lease, data)| (*lease, data.get())).collect();
    let rows: Vec<(Uuid, i32)> = sqlx::query_as(tx.sql(SAVE_CHECKPOINTS))
        .bind(newest.keys().map(|lease| lease.id.0).collect::<Vec<_>>())
        .bind(newest.keys().map(|lease| lease.lease_no).collect::<Vec<_>>())
        .bind(newest.keys().map(|lease| lease.worker.0).collect::<Vec<_>>())
        .bind(newest.values().copied().collect::<Vec<_>>())
        .fetch_all(&mut *tx.connection)
        .await?;
    // The worker is not compared: a lease number belongs to one worker.
    Ok(checkpoints.iter().map(|(lease, _)| fenced(rows.contains(&(lease.id.0, lease.lease_no)))).collect())
}

pub(super) async fn checkpoint(tx: &mut Tx<'_>, id: JobId) -> Sql<Option<Box<RawValue>>> {
    let text: Option<String> =
        sqlx::query_scalar(tx.sql("select data::text from longshore.checkpoints where job = $1"))
            .bind(id.0)
            .fetch_optional(&mut *tx.connection)
            .await?;
    Ok(text.map(super::inspect::raw).transpose()?)
}

const ASSERT_LEASE: &str = "
    select 1
      from longshore.running
     where id = $1
       and lease_no = $2
       and worker = $3
       for key share";

pub(super) async fn assert_lease(tx: &mut Tx<'_>, lease: &Lease) -> Sql<Fenced> {
    let held = sqlx::query(tx.sql(ASSERT_LEASE))
        .bind(lease.id.0)
        .bind(lease.lease_no)
        .bind(lease.worker.0)
        .fetch_optional(&mut *tx.connection)
        .await?;
    Ok(fenced(held.is_some()))
}

pub(super) fn fenced(held: bool) -> Fenced {
    if held { Fenced::Held } else { Fenced::LeaseLost }
}
