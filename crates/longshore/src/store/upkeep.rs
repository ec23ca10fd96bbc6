//! The passes of upkeep: one process at a time does each.

use super::db::{Db, Sql, Statement, args};

static LOCK_PASS: Statement = Statement::new(
    "
    select name
      from longshore.upkeep
     where name = $1
       for update skip locked",
);

/// Locks the row of a pass until the transaction ends. Returns whether this process does the work; another one that
/// calls this does nothing.
pub(crate) async fn lock_pass(db: &mut dyn Db, name: &str) -> Sql<bool> {
    db.has_row(&LOCK_PASS, args![name]).await
}
