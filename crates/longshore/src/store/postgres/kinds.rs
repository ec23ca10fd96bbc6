//! Kinds of jobs: their JSON schemas and default options.

use serde_json::value::RawValue;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::inspect::raw;
use super::tx::{Sql, Tx};
use crate::store::{KindFilter, KindQueues, KindRecord, KindUse, NewKind, QUEUE_KINDS, Schemas, by_name};

const PUT_KINDS: &str = "
    with replaced as (
         delete from longshore.queue_kinds
          where name = any($1))
    insert into longshore.kinds as k (name, schema, defaults, updated_at)
    select i.name, i.schema::json, i.defaults::json, longshore.clock()
      from unnest($1::text[], $2::text[], $3::text[]) as i(name, schema, defaults)
        on conflict (name) do update
       set schema = coalesce(excluded.schema, k.schema),
           defaults = coalesce(excluded.defaults, k.defaults),
           updated_at = excluded.updated_at";

/// The kinds to store for single queues: those that differ from what is there.
macro_rules! offered {
    () => {
        "
    select q.queue, i.name, i.schema, i.defaults
      from unnest($1::text[], $2::text[], $3::text[]) as i(name, schema, defaults)
     cross join unnest($4::text[]) as q(queue)
      left join longshore.queue_kinds k
        on k.queue = q.queue
       and k.name = i.name
     where not exists (
           select from longshore.kinds o
            where o.name = i.name)
       and (k.name is null
        or i.schema <> coalesce(k.schema::text, '')
        or i.defaults <> coalesce(k.defaults::text, ''))
     order by q.queue, i.name"
    };
}

const HAS_OFFERED: &str = concat!("select exists (", offered!(), ")");

/// One process at a time counts and adds.
const LOCK_QUEUE_KINDS: &str = "select pg_advisory_xact_lock(hashtextextended('longshore.queue_kinds', 0))";

const PUT_QUEUE_KINDS: &str = concat!(
    "
    insert into longshore.queue_kinds as k (queue, name, schema, defaults, updated_at)
    select o.queue, o.name, o.schema::json, o.defaults::json, longshore.clock()
      from (",
    offered!(),
    ") o
        on conflict (queue, name) do update
       set schema = coalesce(excluded.schema, k.schema),
           defaults = coalesce(excluded.defaults, k.defaults),
           updated_at = excluded.updated_at"
);

const USED: &str = "
    select count(*) filter (where queue = any($1)),
           coalesce(sum(bytes) filter (where queue = any($1)), 0)::bigint,
           count(*),
           coalesce(sum(bytes), 0)::bigint
      from (select queue,
                   octet_length(name) + coalesce(octet_length(schema::text), 0)
                   + coalesce(octet_length(defaults::text), 0) as bytes
              from longshore.queue_kinds) k";

pub(super) async fn put_kinds(tx: &mut Tx<'_>, kinds: &[NewKind], queues: &KindQueues) -> Sql<()> {
    let merged = by_name(kinds);
    let names: Vec<&str> = merged.keys().copied().collect();
    let schemas: Vec<Option<&str>> = merged.values().map(|(schema, _)| *schema).collect();
    let defaults: Vec<Option<&str>> = merged.values().map(|(_, defaults)| *defaults).collect();
    let bind = |statement| sqlx::query(statement).bind(&names).bind(&schemas).bind(&defaults);
    let KindQueues::Only(queues) = queues else {
        bind(tx.sql(PUT_KINDS)).execute(&mut *tx.connection).await?;
        return Ok(());
    };
    // Most workers describe what is stored already.
    if !bind(tx.sql(HAS_OFFERED)).bind(queues).fetch_one(&mut *tx.connection).await?.try_get::<bool, _>(0)? {
        return Ok(());
    }
    let mut transaction = tx.begin().await?;
    let tx = transaction.tx();
    sqlx::query(tx.sql(LOCK_QUEUE_KINDS)).execute(&mut *tx.connection).await?;
    bind(tx.sql(PUT_QUEUE_KINDS)).bind(queues).execute(&mut *tx.connection).await?;
    let used = sqlx::query(tx.sql(USED)).bind(queues).fetch_one(&mut *tx.connection).await?;
    let of_token = KindUse { kinds: used.try_get(0)?, bytes: used.try_get(1)? };
    QUEUE_KINDS.check(of_token, KindUse { kinds: used.try_get(2)?, bytes: used.try_get(3)? })?;
    transaction.commit().await
}

const KINDS: &str = "
    select name, queue, schema is not null as has_schema, case when $5 then schema::text end as schema,
           defaults::text as defaults, updated_at
      from (select name, null as queue, schema, defaults, updated_at
              from longshore.kinds
             union all
            select name, queue, schema, defaults, updated_at
              from longshore.queue_kinds) k
     where (queue is null or $1::text[] is null or queue = any($1))
       and (name collate \"C\", coalesce(queue, '') collate \"C\") > ($2, $3)
     order by name collate \"C\", coalesce(queue, '') collate \"C\"
     limit $4";

pub(super) async fn kinds(tx: &mut Tx<'_>, filter: &KindFilter) -> Sql<Vec<KindRecord>> {
    let (name, queue) = filter.after.clone().unwrap_or_default();
    let rows = sqlx::query(tx.sql(KINDS))
        .bind(&filter.queues)
        .bind(name)
        .bind(queue)
        .bind(filter.limit.map(i64::from))
        .bind(filter.schemas == Schemas::Include)
        .fetch_all(&mut *tx.connection)
        .await?;
    rows.iter().map(read_kind).collect()
}

const REMOVE_KIND: &str = "
    with of_queues as (
         delete from longshore.queue_kinds
          where name = $1
         returning 1),
         of_all as (
         delete from longshore.kinds
          where name = $1
         returning 1)
    select exists (select from of_queues) or exists (select from of_all)";

pub(super) async fn remove_kind(tx: &mut Tx<'_>, name: &str) -> Sql<bool> {
    let removed = sqlx::query(tx.sql(REMOVE_KIND)).bind(name).fetch_one(&mut *tx.connection).await?;
    Ok(removed.try_get(0)?)
}

fn read_kind(row: &PgRow) -> Sql<KindRecord> {
    let json = |column: &str| -> Sql<Option<Box<RawValue>>> {
        Ok(row.try_get::<Option<String>, _>(column)?.map(raw).transpose()?)
    };
    Ok(KindRecord {
        name: row.try_get("name")?,
        queue: row.try_get("queue")?,
        has_schema: row.try_get("has_schema")?,
        schema: json("schema")?,
        defaults: json("defaults")?,
        updated_at: row.try_get("updated_at")?,
    })
}
