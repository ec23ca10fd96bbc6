//! Kinds of jobs: their JSON schemas and default options.

use rusqlite::{Row, params};

use super::tx::{Columns, Sql, Tx};
use crate::store::{ExistingKinds, KindRecord, NewKind, by_name};

pub(super) fn put_kinds(tx: &Tx<'_>, kinds: &[NewKind], existing: ExistingKinds) -> Sql<()> {
    const PUT: &str = "
        insert into kinds (name, schema, defaults, updated_at)
        values (?1, ?2, ?3, ?4)
            on conflict (name) do update
           set schema = coalesce(excluded.schema, schema),
               defaults = coalesce(excluded.defaults, defaults),
               updated_at = excluded.updated_at
         where ?5";
    for (name, (schema, defaults)) in by_name(kinds) {
        tx.execute(PUT, params![name, schema, defaults, tx.now()?, existing == ExistingKinds::Update])?;
    }
    Ok(())
}

pub(super) fn kinds(tx: &Tx<'_>) -> Sql<Vec<KindRecord>> {
    const ALL: &str = "
        select name,
               schema,
               defaults,
               updated_at
          from kinds
         order by name";
    tx.rows(ALL, [], read_kind)
}

pub(super) fn remove_kind(tx: &Tx<'_>, name: &str) -> Sql<bool> {
    const REMOVE: &str = "
        delete from kinds
         where name = ?1";
    Ok(tx.execute(REMOVE, [name])? > 0)
}

fn read_kind(row: &Row<'_>) -> rusqlite::Result<KindRecord> {
    Ok(KindRecord {
        name: row.get("name")?,
        schema: row.json("schema")?,
        defaults: row.json("defaults")?,
        updated_at: row.time("updated_at")?,
    })
}
