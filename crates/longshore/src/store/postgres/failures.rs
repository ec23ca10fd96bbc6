//! Groups of failures. A settle adds a row to `failure_notes`, without a lock; upkeep folds these rows into `failures`.
//! Readers add both.

use sqlx::Row;
use sqlx::postgres::PgRow;

use super::retain::takes_turn;
use super::tx::{Sql, Tx};
use crate::error::Error;
use crate::failure::Fingerprint;
use crate::job::JobId;
use crate::store::{FailureFilter, FailureRecord};

/// Notes the failures of `taken`, one row per group. Only the beginning of an error is kept
/// ([`FailureRecord::MAX_ERROR`]).
macro_rules! note_failures {
    () => {
        "
    noted_failures as (
      insert into longshore.failure_notes (fingerprint, attempts, seen_at, job, kind, error)
      select t.failure, count(*), longshore.clock(), (array_agg(t.id order by t.id desc))[1], min(t.kind),
             left((array_agg(t.error order by t.id desc))[1], 2000)
        from taken t
       where t.failure is not null
       group by t.failure)"
    };
}
pub(super) use note_failures;

/// The newest of the rows of a group has its job and its error.
const FAILURES: &str = "
    with parts as (
      select fingerprint, kind, attempts, first_seen, last_seen, job, error
        from longshore.failures
       where ($1::int8 is null or fingerprint = $1)
      union all
      select fingerprint, kind, attempts, seen_at, seen_at, job, error
        from longshore.failure_notes
       where ($1::int8 is null or fingerprint = $1)),
    groups as (
      select fingerprint, min(kind) as kind, sum(attempts)::int8 as attempts, min(first_seen) as first_seen,
             max(last_seen) as last_seen,
             (array_agg(job order by last_seen desc, job desc))[1] as job,
             (array_agg(error order by last_seen desc, job desc))[1] as error
        from parts
       where ($2::text is null or kind = $2)
       group by fingerprint),
    page as (
      select *
        from groups
       where ($3::timestamptz is null or last_seen >= $3)
         and ($4::timestamptz is null or (last_seen, fingerprint) < ($4, $5))
       order by last_seen desc, fingerprint desc
       limit $6)
    select p.*, (
             select count(*)
               from (select 1
                       from longshore.finished f
                      where f.failure = p.fingerprint
                      limit $7) as dead)
      from page p
     order by last_seen desc, fingerprint desc";

pub(super) async fn failures(tx: &mut Tx<'_>, filter: &FailureFilter) -> Sql<Vec<FailureRecord>> {
    let (before, after) = filter.after.unzip();
    let rows = sqlx::query(tx.sql(FAILURES))
        .bind(filter.fingerprint.map(|fingerprint| fingerprint.0))
        .bind(&filter.kind)
        .bind(filter.seen_after)
        .bind(before)
        .bind(after.map(|fingerprint| fingerprint.0))
        .bind(i64::from(filter.page_size()))
        .bind(FailureRecord::MAX_DEAD as i64 + 1)
        .fetch_all(&mut *tx.connection)
        .await?;
    rows.iter().map(read_failure).collect()
}

fn read_failure(row: &PgRow) -> Sql<FailureRecord> {
    let dead = row.try_get::<i64, _>(7)?.unsigned_abs();
    Ok(FailureRecord {
        fingerprint: Fingerprint(row.try_get(0)?),
        kind: row.try_get(1)?,
        attempts: row.try_get::<i64, _>(2)?.unsigned_abs(),
        dead: dead.min(FailureRecord::MAX_DEAD),
        dead_or_more: dead > FailureRecord::MAX_DEAD,
        first_seen: row.try_get(3)?,
        last_seen: row.try_get(4)?,
        job: JobId(row.try_get(5)?),
        error: row.try_get(6)?,
    })
}

const FOLD: &str = "
    with deleted as (
      delete from longshore.failure_notes
       where id = any(array(
               select id
                 from longshore.failure_notes
                order by id
                limit $1))
      returning fingerprint, attempts, seen_at, job, kind, error),
    folded as (
      insert into longshore.failures as f (fingerprint, kind, attempts, first_seen, last_seen, job, error)
      select fingerprint, min(kind), sum(attempts), min(seen_at), max(seen_at),
             (array_agg(job order by seen_at desc, job desc))[1],
             (array_agg(error order by seen_at desc, job desc))[1]
        from deleted
       group by fingerprint
          on conflict (fingerprint) do update
         set attempts = f.attempts + excluded.attempts,
             first_seen = least(f.first_seen, excluded.first_seen),
             last_seen = greatest(f.last_seen, excluded.last_seen),
             job = case when (excluded.last_seen, excluded.job) >= (f.last_seen, f.job) then excluded.job else f.job end,
             error = case when (excluded.last_seen, excluded.job) >= (f.last_seen, f.job) then excluded.error else f.error end)
    select count(*) from deleted";

const FORGET: &str = "
    delete from longshore.failures
     where fingerprint = any(array(
             select f.fingerprint
               from longshore.failures f
              where f.last_seen < longshore.clock() - $1::float8 * interval '1 day'
                and not exists (select 1 from longshore.finished d where d.failure = f.fingerprint)
              order by f.last_seen
              limit $2))
        or fingerprint = any(array(
             select f.fingerprint
               from longshore.failures f
              order by f.last_seen desc, f.fingerprint
             offset $3
              limit $2))";

pub(super) async fn fold_failures(tx: &mut Tx<'_>, step: u32) -> Sql<u64> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    if !takes_turn(tx, "failures").await? {
        return Ok(0);
    }
    let folded: i64 =
        sqlx::query_scalar(tx.sql(FOLD)).bind(i64::from(step)).fetch_one(&mut *tx.connection).await?;
    let forget = sqlx::query(tx.sql(FORGET))
        .bind(FailureRecord::KEPT_DAYS as f64)
        .bind(i64::from(step))
        .bind(FailureRecord::MAX_GROUPS);
    forget.execute(&mut *tx.connection).await?;
    transaction.commit().await?;
    Ok(u64::try_from(folded)
        .map_err(|_| Error::internal("the database returned a negative number of failures"))?)
}
