//! Postgres around a run, by either version of the driver.

use sqlx::PgPool;

use crate::Result;

const WAL_POSITION: &str = "select (pg_current_wal_lsn() - '0/0'::pg_lsn)::int8";

/// A checkpoint first, so that the pages that vacuum touches again are already
/// in the log in full, as in a busy queue.
const SETTLE_STATISTICS: [&str; 2] = ["checkpoint", "vacuum (analyze)"];

pub(crate) async fn settle_statistics(pool: &PgPool) -> Result<()> {
    for statement in SETTLE_STATISTICS {
        sqlx::raw_sql(statement).execute(pool).await?;
    }
    Ok(())
}

pub(crate) async fn wal_position(pool: &PgPool) -> Result<Option<u64>> {
    let bytes: i64 = sqlx::query_scalar(WAL_POSITION).fetch_one(pool).await?;
    Ok(Some(bytes as u64))
}

pub(crate) async fn settle_statistics_0_8(pool: &sqlx_0_8::PgPool) -> Result<()> {
    for statement in SETTLE_STATISTICS {
        sqlx_0_8::raw_sql(statement).execute(pool).await?;
    }
    Ok(())
}

pub(crate) async fn wal_position_0_8(pool: &sqlx_0_8::PgPool) -> Result<Option<u64>> {
    let bytes: i64 = sqlx_0_8::query_scalar(WAL_POSITION).fetch_one(pool).await?;
    Ok(Some(bytes as u64))
}
