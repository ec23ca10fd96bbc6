//! The parts of the consistency check that only SQLite has. The rest is in `store/check.rs`.

use rusqlite::Row;
use rusqlite::types::ValueRef;
use uuid::Uuid;

use super::tx::{Sql, Tx};
use crate::rules::lifecycle::FAR_FUTURE;
use crate::store::check::Dialect;

pub(super) fn dialect(tx: &Tx<'_>) -> Sql<Dialect> {
    Ok(Dialect {
        schema: String::new(),
        // Odd, so that the row that corrects the tallies does not collide with one of a minute.
        now: (tx.now()? | 1).to_string(),
        ten_seconds: "10000000",
        seven_days: "604800000000",
        never: FAR_FUTURE.timestamp_micros().to_string(),
        id: |id| format!("x'{}'", id.replace('-', "")),
    })
}

/// The rows of a statement without parameters.
pub(super) fn texts(tx: &Tx<'_>, statement: &str) -> Sql<Vec<Vec<String>>> {
    tx.rows(statement, [], texts_of)
}

fn texts_of(row: &Row<'_>) -> rusqlite::Result<Vec<String>> {
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
