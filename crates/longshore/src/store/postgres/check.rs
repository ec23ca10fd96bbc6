//! The consistency check on this engine, and the check whether commits are durable. The faults that it
//! looks for are in `store/check.rs`.

use async_trait::async_trait;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row, ValueRef};
use uuid::Uuid;

use super::run::Mode;
use super::tx::{Sql, Tx};
use super::{PostgresStore, RequiredDurability};
use crate::error::Result;
use crate::store::Checks;
use crate::store::check::{CheckReport, Dialect, Durability, OPTIONS, faults, unreadable_options};

/// The maximum number of jobs listed whose options cannot be read.
const MAX_PROBLEMS: usize = 100;

#[async_trait]
impl Checks for PostgresStore {
    async fn check(&self) -> Result<CheckReport> {
        self.run_as(Mode::ALL_TABLES, (), |tx, ()| Box::pin(check(tx))).await
    }

    async fn durability(&self) -> Result<Durability> {
        self.run_read((), |tx, ()| Box::pin(durability(tx))).await
    }
}

async fn check(tx: &mut Tx<'_>) -> Sql<CheckReport> {
    let schema = &tx.store.schema;
    let tables = |text: &str| schema.fill(text);
    let dialect = Dialect {
        tables: &tables,
        now: tables("longshore.clock()"),
        ten_seconds: "interval '10 seconds'",
        seven_days: "interval '7 days'",
        never: "timestamptz '9999-12-31 23:59:59+00'".into(),
        id: |id| format!("'{id}'"),
    };
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    // All statements need the same snapshot: a job that moves between two of them would
    // be seen twice or not at all.
    sqlx::query("set transaction isolation level repeatable read, read only")
        .execute(&mut *tx.connection)
        .await?;
    let jobs: i64 = sqlx::query_scalar(tx.sql("select count(*) from longshore.jobs"))
        .fetch_one(&mut *tx.connection)
        .await?;
    let mut report = CheckReport { jobs: jobs as u64, problems: Vec::new() };
    for fault in faults() {
        let found = rows(tx, dialect.sql(fault.find, &[])).await?;
        report.problems.extend(found.iter().map(|values| dialect.problem(fault, values)));
    }
    let mut unreadable = Vec::new();
    let mut after = Uuid::nil().to_string();
    loop {
        let page = rows(tx, dialect.sql(OPTIONS, &[after])).await?;
        let Some(last) = page.last() else { break };
        after = last[0].clone();
        unreadable.extend(page.iter().filter_map(|row| unreadable_options(&dialect, &row[0], &row[1])));
        unreadable.truncate(MAX_PROBLEMS);
    }
    report.problems.extend(unreadable);
    transaction.commit().await?;
    Ok(report)
}

/// The rows of a statement without parameters. The server sends their values as text.
async fn rows(tx: &mut Tx<'_>, statement: String) -> Sql<Vec<Vec<String>>> {
    let rows = sqlx::raw_sql(AssertSqlSafe(statement)).fetch_all(&mut *tx.connection).await?;
    rows.iter().map(texts).collect()
}

fn texts(row: &PgRow) -> Sql<Vec<String>> {
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

async fn durability(tx: &mut Tx<'_>) -> Sql<Durability> {
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
