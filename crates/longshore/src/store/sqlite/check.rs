//! The consistency check on this engine, and the check whether commits are durable. The faults that it
//! looks for are in `store/check.rs`.

use rusqlite::Row;
use rusqlite::types::ValueRef;
use uuid::Uuid;

use super::tx::{Sql, Tx};
use crate::rules::lifecycle::FAR_FUTURE;
use crate::store::check::{CheckReport, Dialect, Durability, OPTIONS, faults, unreadable_options};

/// The maximum number of jobs listed whose options cannot be read.
const MAX_PROBLEMS: usize = 100;

pub(super) fn check(tx: &Tx<'_>) -> Sql<CheckReport> {
    const JOBS: &str = "
        select count(*)
          from jobs";
    let dialect = Dialect {
        tables: &|text| text.replace("longshore.", ""),
        // Odd, so that the row that corrects the tallies does not collide with one of a minute.
        now: (tx.now()? | 1).to_string(),
        ten_seconds: "10000000",
        seven_days: "604800000000",
        never: FAR_FUTURE.timestamp_micros().to_string(),
        id: |id| format!("x'{}'", id.replace('-', "")),
    };
    let jobs = tx.row(JOBS, [], |row| row.get::<_, i64>(0))?.unwrap_or(0);
    let mut report = CheckReport { jobs: jobs.unsigned_abs(), problems: Vec::new() };
    for fault in faults() {
        let found = tx.rows(&dialect.sql(fault.find, &[]), [], texts)?;
        report.problems.extend(found.iter().map(|values| dialect.problem(fault, values)));
    }
    let mut unreadable = Vec::new();
    let mut after = Uuid::nil().to_string();
    loop {
        let page = tx.rows(&dialect.sql(OPTIONS, &[after]), [], texts)?;
        let Some(last) = page.last() else { break };
        after = last[0].clone();
        unreadable.extend(page.iter().filter_map(|row| unreadable_options(&dialect, &row[0], &row[1])));
        unreadable.truncate(MAX_PROBLEMS);
    }
    report.problems.extend(unreadable);
    Ok(report)
}

/// The values of a row as text.
fn texts(row: &Row<'_>) -> rusqlite::Result<Vec<String>> {
    let text = |at| {
        Ok(match row.get_ref(at)? {
            ValueRef::Null => String::new(),
            ValueRef::Integer(number) => number.to_string(),
            ValueRef::Real(number) => number.to_string(),
            ValueRef::Text(text) => String::from_utf8_lossy(text).into_owned(),
            ValueRef::Blob(id) => Uuid::from_slice(id).unwrap_or_default().to_string(),
        })
    };
    (0..row.as_ref().column_count()).map(text).collect()
}

/// The engine itself sets `synchronous = full` on every connection, so nothing can be
/// relaxed.
pub(super) fn durability(_: &Tx<'_>) -> Sql<Durability> {
    Ok(Durability::default())
}
