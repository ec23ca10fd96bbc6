//! Kinds of jobs: their JSON schemas and default options.

use serde_json::value::RawValue;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::inspect::raw;
use super::tx::{Sql, Tx};
use crate::store::{KindRecord, NewKind, by_name};

const PUT_KINDS: &str = "
    insert into longshore.kinds as k (name, schema, defaults, updated_at)
    select i.name, i.schema::json, i.defaults::json, longshore.clock()
      from unnest($1::text[], $2::text[], $3::text[]) as i(name, schema, defaults)
        on conflict (name) do update
       set schema = coalesce(excluded.schema, k.schema),
           defaults = coalesce(excluded.defaults, k.defaults),
           updated_at = excluded.updated_at";

pub(super) async fn put_kinds(tx: &mut Tx<'_>, kinds: &[NewKind]) -> Sql<()> {
    let said = by_name(kinds);
    sqlx::query(tx.sql(PUT_KINDS))
        .bind(said.keys().copied().collect::<Vec<_>>())
        .bind(said.values().map(|(schema, _)| *schema).collect::<Vec<_>>())
        .bind(said.values().map(|(_, defaults)| *defaults).collect::<Vec<_>>())
        .execute(&mut *tx.connection)
        .await?;
    Ok(())
}

const KINDS: &str = "
    select name, schema::text, defaults::text, updated_at
      from longshore.kinds
     order by name collate \"C\"";

pub(super) async fn kinds(tx: &mut Tx<'_>) -> Sql<Vec<KindRecord>> {
    let rows = sqlx::query(tx.sql(KINDS)).fetch_all(&mut *tx.connection).await?;
    rows.iter().map(read_kind).collect()
}

pub(super) async fn remove_kind(tx: &mut Tx<'_>, name: &str) -> Sql<bool> {
    let gone = sqlx::query(tx.sql("delete from longshore.kinds where name = $1"))
        .bind(name)
        .execute(&mut *tx.connection)
        .await?;
    Ok(gone.rows_affected() > 0)
}

fn read_kind(row: &PgRow) -> Sql<KindRecord> {
    let json = |column: usize| -> Sql<Option<Box<RawValue>>> {
        Ok(row.try_get::<Option<String>, _>(column)?.map(raw).transpose()?)
    };
    Ok(KindRecord {
        name: row.try_get(0)?,
        schema: json(1)?,
        defaults: json(2)?,
        updated_at: row.try_get(3)?,
    })
}
