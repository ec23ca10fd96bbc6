//! Wakes jobs that wait for events. The rest is in `store/events.rs`, and `steps.rs` reads the events of a
//! job that is suspended.

use sqlx::Row;

use super::operate::requeue_now;
use super::turns::add_turns;
use super::tx::{Sql, Tx};
use crate::store::events::Woken;

/// Wakes up to `$2` jobs that wait for these events. Each job is found by its primary key,
/// whatever the planner assumes about the tables. A wait that is locked by another
/// transaction, or whose job is, stays as it is.
const WAKE: &str = concat!(
    "
    with awaited as materialized (
      select p.event, p.job, w.row_id as wait_row, r.row_id as ready_row
        from (select event, job, lease_no
                from longshore.waits
               where event = any($1)
                 and not woken
               order by event, job
              offset 0) as p
       cross join lateral (
               select w.ctid as row_id
                 from longshore.waits w
                where w.event = p.event
                  and w.job = p.job
                limit 1
                  for no key update skip locked) as w
        left join lateral (
               select w.ctid as row_id
                 from longshore.ready w
                where w.id = p.job
                  and w.lease_no = p.lease_no
                  and w.held is not true   -- it waits for other tasks
                limit 1
                  for update skip locked) as r
          on true
        left join lateral (
               select true as is_waiting
                 from longshore.ready w
                where w.id = p.job
                  and w.lease_no = p.lease_no
                  and w.held is not true
                limit 1) as o
          on true
       where r.row_id is not null
          or o.is_waiting is null
       limit $2),
    deleted as (
      delete from longshore.ready
       where ctid = any(array(select ready_row from awaited))
      returning *),",
    requeue_now!(),
    ",
    marked as (
      update longshore.waits
         set woken = true
       where ctid = any(array(select wait_row from awaited)))
    select array(select queue from deleted), (select count(*) from awaited)"
);

pub(super) async fn wake(tx: &mut Tx<'_>, events: &[String], limit: u32) -> Sql<Woken> {
    let row =
        sqlx::query(tx.sql(WAKE)).bind(events).bind(i64::from(limit)).fetch_one(&mut *tx.connection).await?;
    let waits: i64 = row.try_get(1)?;
    Ok(Woken { queues: row.try_get(0)?, waits: waits as u32 })
}
