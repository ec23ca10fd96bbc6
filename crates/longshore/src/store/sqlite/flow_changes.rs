//! What follows when a member of a flow ends, is reopened or is removed: adds rows to `flow_changes`, and
//! deletes links.

use rusqlite::params;

use super::settle::Ended;
use super::tx::{Sql, Tx};
use crate::job::{JobId, Outcome};

/// Notes that a member of a flow has ended.
pub(super) fn note_end(tx: &Tx<'_>, flow: [u8; 16], ended: &Ended<'_>) -> Sql<()> {
    const NOTE: &str = "
        insert into flow_changes (flow, job, succeeded, failure)
        values (?1, ?2, ?3, ?4)";
    let succeeded = ended.outcome == Outcome::Succeeded;
    tx.execute(NOTE, params![flow, ended.id.0.as_bytes(), succeeded, !succeeded && !ended.is_skipped])?;
    Ok(())
}

/// Notes that a member of a flow is open again.
pub(super) fn note_reopened(
    tx: &Tx<'_>,
    flow: [u8; 16],
    id: JobId,
    was_failure: bool,
    is_counted: bool,
) -> Sql<()> {
    const NOTE: &str = "
        insert into flow_changes (flow, job, failure, counted)
        values (?1, ?2, ?3, ?4)";
    tx.execute(NOTE, params![flow, id.0.as_bytes(), was_failure, is_counted])?;
    Ok(())
}

/// Deletes the links from a removed member to its parents. The links to its children stay, because they say
/// how the parent ended.
pub(super) fn delete_links(tx: &Tx<'_>, id: JobId) -> Sql<()> {
    const DELETE: &str = "
        delete from links
         where child = ?1";
    tx.execute(DELETE, [id.0.as_bytes()])?;
    Ok(())
}
