//! Kinds of jobs: their JSON schemas and default options.

use rusqlite::{Row, params};

use super::tx::{Columns, Sql, Tx, json_list};
use crate::store::{KindFilter, KindQueues, KindRecord, KindUse, NewKind, QUEUE_KINDS, Schemas, by_name};

const PUT_KIND: &str = "
    insert into kinds (name, schema, defaults, updated_at)
    values (?1, ?2, ?3, ?4)
        on conflict (name) do update
       set schema = coalesce(excluded.schema, schema),
           defaults = coalesce(excluded.defaults, defaults),
           updated_at = excluded.updated_at";

/// Stores a kind for a queue, if it differs from what is there.
const PUT_QUEUE_KIND: &str = "
    insert into queue_kinds (queue, name, schema, defaults, updated_at)
    select ?1, ?2, ?3, ?4, ?5
     where not exists (
           select 1 from kinds o
            where o.name = ?2)
        on conflict (queue, name) do update
       set schema = coalesce(excluded.schema, schema),
           defaults = coalesce(excluded.defaults, defaults),
           updated_at = excluded.updated_at
     where excluded.schema <> coalesce(schema, '')
        or excluded.defaults <> coalesce(defaults, '')";

const USED: &str = "
    select coalesce(sum(is_own), 0),
           coalesce(sum(is_own * bytes), 0),
           count(*),
           coalesce(sum(bytes), 0)
      from (select queue in (select value from json_each(?1)) as is_own,
                   length(cast(name as blob)) + coalesce(length(cast(schema as blob)), 0)
                   + coalesce(length(cast(defaults as blob)), 0) as bytes
              from queue_kinds)";

pub(super) fn put_kinds(tx: &Tx<'_>, kinds: &[NewKind], queues: &KindQueues) -> Sql<()> {
    let (merged, now) = (by_name(kinds), tx.now()?);
    let KindQueues::Only(queues) = queues else {
        for (name, (schema, defaults)) in merged {
            tx.execute("delete from queue_kinds where name = ?1", [name])?;
            tx.execute(PUT_KIND, params![name, schema, defaults, now])?;
        }
        return Ok(());
    };
    let mut changed = 0;
    for queue in queues {
        for (name, (schema, defaults)) in &merged {
            changed += tx.execute(PUT_QUEUE_KIND, params![queue, name, schema, defaults, now])?;
        }
    }
    if changed > 0 {
        let used = tx.row(USED, [json_list(queues)?], |row| {
            let of_token = KindUse { kinds: row.get(0)?, bytes: row.get(1)? };
            Ok((of_token, KindUse { kinds: row.get(2)?, bytes: row.get(3)? }))
        })?;
        if let Some((of_token, in_all)) = used {
            QUEUE_KINDS.check(of_token, in_all)?;
        }
    }
    Ok(())
}

const KINDS: &str = "
    select name,
           queue,
           schema is not null as has_schema,
           case when ?5 then schema end as schema,
           defaults,
           updated_at
      from (select name, null as queue, schema, defaults, updated_at
              from kinds
             union all
            select name, queue, schema, defaults, updated_at
              from queue_kinds)
     where (queue is null or ?1 is null or queue in (select value from json_each(?1)))
       and (name, coalesce(queue, '')) > (?2, ?3)
     order by name, coalesce(queue, '')
     limit ?4";

pub(super) fn kinds(tx: &Tx<'_>, filter: &KindFilter) -> Sql<Vec<KindRecord>> {
    let (name, queue) = filter.after.clone().unwrap_or_default();
    let queues = filter.queues.as_deref().map(json_list).transpose()?;
    // SQLite takes a negative limit as none.
    let limit = filter.limit.map_or(-1, i64::from);
    tx.rows(KINDS, params![queues, name, queue, limit, filter.schemas == Schemas::Include], read_kind)
}

pub(super) fn remove_kind(tx: &Tx<'_>, name: &str) -> Sql<bool> {
    let of_queues = tx.execute("delete from queue_kinds where name = ?1", [name])?;
    let of_all = tx.execute("delete from kinds where name = ?1", [name])?;
    Ok(of_queues + of_all > 0)
}

fn read_kind(row: &Row<'_>) -> rusqlite::Result<KindRecord> {
    Ok(KindRecord {
        name: row.get("name")?,
        queue: row.get("queue")?,
        has_schema: row.get("has_schema")?,
        schema: row.json("schema")?,
        defaults: row.json("defaults")?,
        updated_at: row.time("updated_at")?,
    })
}
