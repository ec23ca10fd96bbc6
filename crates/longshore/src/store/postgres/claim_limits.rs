//! Limits and rates of queues. They hold across processes: the claim that locks the row of a queue counts the queue's running jobs
//! and takes only what is left. The count is a separate statement, so that it sees the commit of the previous claim.
//! Other claims skip the queue meanwhile.

use chrono::{DateTime, Utc};
use sqlx::Row;

use super::claim_rows::rate;
use super::tx::{Sql, Tx};
use crate::store::rooms::Rooms;

const LOCK_QUEUES: &str = "
    select name, max_running, rate, rate_ms, burst, tat, longshore.clock()
      from longshore.queues
     where name = any($1)
       and (max_running is not null or rate is not null)
     order by name
       for update skip locked";

const COUNT_QUEUES: &str = "
    select queue, count(*)
      from longshore.running
     where queue = any($1)
     group by queue";

const PACE_QUEUES: &str = "
    update longshore.queues q
       set tat = i.tat
      from unnest($1::text[], $2::timestamptz[]) as i(name, tat)
     where q.name = i.name";

/// Locks those of the queues that have a limit or a rate, and adds their room. Returns the engine's time.
pub(super) async fn lock_queues(
    tx: &mut Tx<'_>,
    queues: &[String],
    rooms: &mut Rooms,
) -> Sql<Option<DateTime<Utc>>> {
    let locked = sqlx::query(tx.sql(LOCK_QUEUES)).bind(queues).fetch_all(&mut *tx.connection).await?;
    let (mut limits, mut at) = (Vec::new(), None);
    for row in &locked {
        let (name, limit): (&str, Option<i32>) = (row.try_get(0)?, row.try_get(1)?);
        at = row.try_get(6)?;
        if let Some(limit) = limit {
            limits.push((name, limit as usize));
        }
        if let Some(rate) = rate(row.try_get(2)?, row.try_get(3)?, row.try_get(4)?) {
            rooms.pace(name, rate, row.try_get(5)?, row.try_get(6)?);
        }
    }
    if limits.is_empty() {
        return Ok(at);
    }
    let names: Vec<&str> = limits.iter().map(|(name, _)| *name).collect();
    let counts = sqlx::query(tx.sql(COUNT_QUEUES)).bind(&names).fetch_all(&mut *tx.connection).await?;
    for (name, limit) in limits {
        let mut running = 0;
        for row in &counts {
            if row.try_get::<&str, _>(0)? == name {
                running = row.try_get::<i64, _>(1)? as usize;
            }
        }
        rooms.limit(name, limit, running);
    }
    Ok(at)
}

/// Stores the new state of the rates.
pub(super) async fn store_rates(tx: &mut Tx<'_>, rooms: &Rooms) -> Sql<()> {
    let (names, paced): (Vec<&str>, Vec<_>) = rooms.paced().into_iter().unzip();
    if !names.is_empty() {
        sqlx::query(tx.sql(PACE_QUEUES)).bind(&names).bind(&paced).execute(&mut *tx.connection).await?;
    }
    Ok(())
}
