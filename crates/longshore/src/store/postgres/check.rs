//! The parts of the consistency check, and of the check whether commits are durable, that only Postgres has.
//! The rest is in `store/check.rs`.

use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row, ValueRef};

use super::RequiredDurability;
use super::tx::{Sql, Tx};
use crate::store::Durability;
use crate::store::check::Dialect;

pub(super) fn dialect(tx: &Tx<'_>) -> Dialect {
    Dialect {
        schema: tx.fill("longshore."),
        now: tx.fill("longshore.clock()"),
        ten_seconds: "interval '10 seconds'",
        seven_days: "interval '7 days'",
        never: "timestamptz '9999-12-31 23:59:59+00'".into(),
        id: |id| format!("'{id}'"),
    }
}

/// The rows of a statement without parameters. The server sends their values as text.
pub(super) async fn texts(tx: &mut Tx<'_>, statement: String) -> Sql<Vec<Vec<String>>> {
    let rows = sqlx::raw_sql(AssertSqlSafe(statement)).fetch_all(&mut *tx.connection).await?;
    rows.iter().map(texts_of).collect()
}

fn texts_of(row: &PgRow) -> Sql<Vec<String>> {
    let text = |at| {
        let value = row.try_get_raw(at)?;
        let text = if value.is_null() { "" } else { value.as_str().map_err(sqlx::Error::Decode)? };
        Ok(text.to_owned())
    };
    (0..row.len()).map(text).collect()
}

/// The settings of our own session: a role, a database or the URL may change them.
const DURABILITY: &str = "
    select coalesce(current_setting('fsync', true) = 'off', false),
           coalesce(current_setting('synchronous_commit', true) = 'off', false),
           coalesce(current_setting('full_page_writes', true) = 'off', false)";

pub(super) async fn durability(tx: &mut Tx<'_>) -> Sql<Durability> {
    let (no_fsync, no_synchronous_commit, no_full_page_writes): (bool, bool, bool) =
        sqlx::query_as(DURABILITY).fetch_one(&mut *tx.connection).await?;
    let mut durability =
        Durability { accepted: tx.store.durability == RequiredDurability::Relaxed, ..Durability::default() };
    if no_fsync {
        durability.risks.push(
            "the database has fsync = off: after a crash of its host, stored jobs may be lost and the tables damaged"
                .into(),
        );
    }
    if no_synchronous_commit {
        durability.risks.push(
            "the database has synchronous_commit = off: after a crash of the server, the jobs of the last moments \
             may be lost"
                .into(),
        );
    }
    if no_full_page_writes {
        durability.warnings.push(
            "the database has full_page_writes = off: unless its file system writes pages atomically, a crash of its \
             host may damage the tables"
                .into(),
        );
    }
    Ok(durability)
}
