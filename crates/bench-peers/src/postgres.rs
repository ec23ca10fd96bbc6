//! Checkpoints, vacuum and the WAL position on Postgres, with both versions of the driver.

use sqlx::PgPool;

use crate::Result;

const WAL_POSITION: &str = "select (pg_current_wal_lsn() - '0/0'::pg_lsn)::int8";

/// The checkpoint comes first, so that the full images of the pages that vacuum writes are
/// already in the WAL when the measurement starts, as in a busy queue.
const CHECKPOINT_AND_VACUUM: [&str; 2] = ["checkpoint", "vacuum (analyze)"];

pub(crate) async fn checkpoint_and_vacuum(pool: &PgPool) -> Result<()> {
    for statement in CHECKPOINT_AND_VACUUM {
        sqlx::raw_sql(statement).execute(pool).await?;
    }
    Ok(())
}

pub(crate) async fn wal_position(pool: &PgPool) -> Result<Option<u64>> {
    let bytes: i64 = sqlx::query_scalar(WAL_POSITION).fetch_one(pool).await?;
    Ok(Some(bytes as u64))
}

pub(crate) async fn checkpoint_and_vacuum_0_8(pool: &sqlx_0_8::PgPool) -> Result<()> {
    for statement in CHECKPOINT_AND_VACUUM {
        sqlx_0_8::raw_sql(statement).execute(pool).await?;
    }
    Ok(())
}

pub(crate) async fn wal_position_0_8(pool: &sqlx_0_8::PgPool) -> Result<Option<u64>> {
    let bytes: i64 = sqlx_0_8::query_scalar(WAL_POSITION).fetch_one(pool).await?;
    Ok(Some(bytes as u64))
}
