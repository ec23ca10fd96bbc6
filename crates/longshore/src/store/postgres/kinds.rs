//! Kinds of jobs: their JSON schemas and default options.

use serde_json::value::RawValue;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::inspect::raw;
use super::tx::{Sql, Tx};
use crate::store::{ExistingKinds, KindRecord, NewKind, by_name};

const PUT_KINDS: &str = "
    insert into longshore.kinds as k (name, schema, defaults, updated_at)
    select i.name, i.schema::json, i.defaults::json, longshore.clock()
      from unnest($1::text[], $2::text[], $3::text[]) as i(name, schema, defaults)
        on conflict (name) do update
       set schema = coalesce(excluded.schema, k.schema),
           defaults = coalesce(excluded.defaults, k.defaults),
           updated_at = excluded.updated_at
     where $4";

pub(super) async fn put_kinds(tx: &mut Tx<'_>, kinds: &[NewKind], existing: ExistingKinds) -> Sql<()> {
    let merged = by_name(kinds);
    sqlx::query(tx.sql(PUT_KINDS))
        .bind(merged.keys().copied().collect::<Vec<_>>())
        .bind(merged.values().map(|(schema, _)| *schema).collect::<Vec<_>>())
        .bind(merged.values().map(|(_, defaults)| *defaults).collect::<Vec<_>>())
        .bind(existing == ExistingKinds::Update)
        .execute(&mut *tx.connection)
        .await?;
    Ok(())
}

const KINDS: &str = "
    select name, schema::text as schema, defaults::text as defaults, updated_at
      from longshore.kinds
     order by name collate \"C\"";

pub(super) async fn kinds(tx: &mut Tx<'_>) -> Sql<Vec<KindRecord>> {
    let rows = sqlx::query(tx.sql(KINDS)).fetch_all(&mut *tx.connection).await?;
    rows.iter().map(read_kind).collect()
}

pub(super) async fn remove_kind(tx: &mut Tx<'_>, name: &str) -> Sql<bool> {
    let deleted = sqlx::query(tx.sql("delete from longshore.kinds where name = $1"))
        .bind(name)
        .execute(&mut *tx.connection)
        .await?;
    Ok(deleted.rows_affected() > 0)
}

fn read_kind(row: &PgRow) -> Sql<KindRecord> {
    let json = |column: &str| -> Sql<Option<Box<RawValue>>> {
        Ok(row.try_get::<Option<String>, _>(column)?.map(raw).transpose()?)
    };
    Ok(KindRecord {
        name: row.try_get("name")?,
        schema: json("schema")?,
        defaults: json("defaults")?,
        updated_at: row.try_get("updated_at")?,
    })
}
