//! Kinds of jobs: their JSON schemas and default options.
//!
//! A kind applies to jobs of all queues, or of one queue: a worker with a token that is limited to queues describes
//! kinds for these queues only, because anybody else's jobs must not depend on it.

use std::collections::BTreeMap;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;

use super::db::{Engine, How, Row, Rows, Sql, Statement, args, one};
use crate::error::{Error, Result};
use crate::rules::enqueue::{MAX_SCHEMA, check_json, check_name};

/// The limits of the kinds that apply to single queues, counted once per queue: every process that enqueues keeps them in memory.
const QUEUE_KINDS: KindLimits = KindLimits {
    of_token: KindUse { kinds: 2_000, bytes: 1024 * 1024 },
    in_all: KindUse { kinds: 10_000, bytes: 8 * 1024 * 1024 },
};

/// The field of the error about too many kinds.
pub(crate) const TOO_MANY_KINDS: &str = "kinds";

/// How many kinds there may be.
#[derive(Clone, Copy)]
struct KindLimits {
    /// In the queues of one token.
    of_token: KindUse,
    in_all: KindUse,
}

/// A number of kinds, and the bytes of their names, schemas and defaults.
#[derive(Clone, Copy)]
struct KindUse {
    kinds: i64,
    bytes: i64,
}

impl KindLimits {
    /// Refuses more kinds than there may be.
    fn check(&self, of_token: KindUse, in_all: KindUse) -> Result<()> {
        let check = |found: KindUse, limit: KindUse, of: &str| {
            if found.kinds <= limit.kinds && found.bytes <= limit.bytes {
                return Ok(());
            }
            Err(Error::invalid(
                TOO_MANY_KINDS,
                format!(
                    "kinds: {of} would have {} kinds with {} bytes, counted once per queue; the limit is {} kinds \
                     with {} bytes. Remove some with `longshore kinds remove` or DELETE /kinds/{{kind}}, or start the \
                     worker with a token for all queues",
                    found.kinds, found.bytes, limit.kinds, limit.bytes
                ),
            ))
        };
        check(of_token, self.of_token, "the queues of this token")?;
        check(in_all, self.in_all, "all tokens that are limited to queues")
    }
}

/// A kind of job to create or update.
#[derive(Clone, Debug)]
pub struct NewKind {
    /// Its name.
    pub name: String,
    /// The JSON schema of its payload; `None` leaves the stored one unchanged.
    pub schema: Option<Box<RawValue>>,
    /// Default options for its jobs, as JSON; `None` leaves the stored ones unchanged.
    pub defaults: Option<Box<RawValue>>,
}

impl NewKind {
    /// A kind without a schema or defaults.
    pub fn new(name: impl Into<String>) -> Self {
        NewKind { name: name.into(), schema: None, defaults: None }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        check_name("name", &self.name)?;
        if let Some(schema) = &self.schema {
            check_json("schema", schema.get(), MAX_SCHEMA)?;
        }
        if let Some(defaults) = &self.defaults {
            check_json("defaults", defaults.get(), MAX_SCHEMA)?;
        }
        Ok(())
    }
}

/// Refuses kinds of single queues of which there are too many, whatever is stored already.
#[cfg(feature = "api")]
pub(crate) fn check_queue_kinds(kinds: &[NewKind], queues: &[String]) -> Result<()> {
    let bytes = |(name, (schema, defaults)): (&str, (Option<&str>, Option<&str>))| {
        name.len() + schema.map_or(0, str::len) + defaults.map_or(0, str::len)
    };
    let merged = by_name(kinds);
    let per_queue = |number: usize| i64::try_from(number.saturating_mul(queues.len())).unwrap_or(i64::MAX);
    let used = KindUse {
        kinds: per_queue(merged.len()),
        bytes: per_queue(merged.into_iter().map(bytes).fold(0, usize::saturating_add)),
    };
    QUEUE_KINDS.check(used, used)
}

/// The jobs that stored kinds apply to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KindQueues {
    /// Those of all queues. Replaces kinds of the same name that apply to single queues.
    All,
    /// Those of these queues. Changes nothing if a kind of this name applies to all queues.
    Only(Vec<String>),
}

/// Which kinds to list.
#[derive(Clone, Debug)]
pub struct KindFilter {
    /// Only kinds after this name and queue.
    pub after: Option<(String, String)>,
    /// The maximum number of kinds; all by default.
    pub limit: Option<u32>,
    /// Besides those that apply to all queues, only kinds of these queues; those of every queue by default.
    pub queues: Option<Vec<String>>,
    /// Whether the schemas are read; they are by default.
    pub schemas: Schemas,
}

impl Default for KindFilter {
    fn default() -> Self {
        KindFilter { after: None, limit: None, queues: None, schemas: Schemas::Include }
    }
}

/// Whether schemas are read with the kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schemas {
    /// With their schemas.
    Include,
    /// Only whether there is one.
    Omit,
}

/// Merges kinds by name: if one is given twice, its last schema and its last defaults
/// win. Sorted, so that every process locks the rows in the same order.
fn by_name(kinds: &[NewKind]) -> BTreeMap<&str, (Option<&str>, Option<&str>)> {
    let mut merged = BTreeMap::<&str, (Option<&str>, Option<&str>)>::new();
    for kind in kinds {
        let (schema, defaults) = merged.entry(&kind.name).or_default();
        *schema = kind.schema.as_deref().map(RawValue::get).or(*schema);
        *defaults = kind.defaults.as_deref().map(RawValue::get).or(*defaults);
    }
    merged
}

/// A stored kind of job.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct KindRecord {
    /// Its name.
    pub name: String,
    /// The queue to whose jobs it applies; `None` for jobs of all queues.
    pub queue: Option<String>,
    /// Whether it has a schema.
    pub has_schema: bool,
    /// The JSON schema of its payload, if the filter includes schemas.
    pub schema: Option<Box<RawValue>>,
    /// Default options for its jobs.
    pub defaults: Option<Box<RawValue>>,
    /// When it was last updated.
    pub updated_at: DateTime<Utc>,
}

/// Kinds of jobs.
#[async_trait]
pub trait Kinds {
    /// Creates or updates kinds. Fields that are `None` stay as they are: a worker that registers a kind without a
    /// schema must not delete the stored schema. Fails if too many kinds would apply to single queues.
    async fn put_kinds(&self, kinds: &[NewKind], queues: &KindQueues) -> Result<()>;

    /// Lists kinds, ordered by name and queue. One that applies to all queues comes before those of its name that
    /// apply to one.
    async fn kinds(&self, filter: &KindFilter) -> Result<Vec<KindRecord>>;

    /// Removes a kind, whichever queues it applies to. Returns whether it existed.
    async fn remove_kind(&self, name: &str) -> Result<bool>;
}

#[async_trait]
impl<E: Engine> Kinds for E {
    async fn put_kinds(&self, kinds: &[NewKind], queues: &KindQueues) -> Result<()> {
        kinds.iter().try_for_each(NewKind::validate)?;
        let kinds = kinds.to_vec();
        let KindQueues::Only(queues) = queues else {
            return self
                .call(How::QUICK.together(), kinds, |rows, kinds| Box::pin(put_kinds(rows, kinds)))
                .await;
        };
        let args = std::sync::Arc::new((kinds, queues.clone()));
        // Most workers describe what is stored already.
        let has_new =
            self.call(How::READ, args.clone(), |rows, args| Box::pin(has_new(rows, &args.0, &args.1)));
        if has_new.await? {
            self.call(How::QUICK.together(), args, |rows, args| {
                Box::pin(put_queue_kinds(rows, &args.0, &args.1))
            })
            .await?;
        }
        Ok(())
    }

    async fn kinds(&self, filter: &KindFilter) -> Result<Vec<KindRecord>> {
        self.call(How::READ, filter.clone(), |rows, filter| Box::pin(kinds(rows, filter))).await
    }

    async fn remove_kind(&self, name: &str) -> Result<bool> {
        self.call(How::QUICK.together(), name.to_owned(), |rows, name| Box::pin(remove_kind(rows, name)))
            .await
    }
}

static REMOVE_QUEUE_KINDS: Statement = Statement::new(
    "
    delete from longshore.queue_kinds
     where name = any($1::text[])",
);

static PUT_KINDS: Statement = Statement::new(
    "
    insert into longshore.kinds as k (name, schema, defaults, updated_at)
    select i.name, i.schema::json, i.defaults::json, longshore.clock()
      from unnest($1::text[], $2::text[], $3::text[]) as i(name, schema, defaults)
     where true
        on conflict (name) do update
       set schema = coalesce(excluded.schema, k.schema),
           defaults = coalesce(excluded.defaults, k.defaults),
           updated_at = excluded.updated_at",
);

async fn put_kinds(rows: &mut dyn Rows, kinds: &[NewKind]) -> Sql<()> {
    let merged = by_name(kinds);
    let names: Vec<String> = merged.keys().map(ToString::to_string).collect();
    // Until this is committed, no process can store a kind for one queue.
    rows.lock("queue_kinds").await?;
    rows.execute(&REMOVE_QUEUE_KINDS, args![&names]).await?;
    for part in parts(&merged) {
        rows.execute(&PUT_KINDS, args![part.names, part.schemas, part.defaults]).await?;
    }
    Ok(())
}

/// The arguments of a statement that stores several kinds.
#[derive(Default)]
struct Part<'k> {
    names: Vec<&'k str>,
    schemas: Vec<Option<&'k str>>,
    defaults: Vec<Option<&'k str>>,
}

/// As many kinds at a time as a statement stores quickly.
fn parts<'k>(merged: &BTreeMap<&'k str, (Option<&'k str>, Option<&'k str>)>) -> Vec<Part<'k>> {
    const MAX_KINDS: usize = 50;
    const MAX_BYTES: usize = 256 * 1024;
    let (mut parts, mut bytes) = (Vec::<Part<'k>>::new(), 0);
    for (name, (schema, defaults)) in merged {
        let size = schema.map_or(0, str::len) + defaults.map_or(0, str::len);
        let has_room = |part: &&mut Part<'k>| part.names.len() < MAX_KINDS && bytes + size <= MAX_BYTES;
        if parts.last_mut().filter(has_room).is_none() {
            parts.push(Part::default());
            bytes = 0;
        }
        bytes += size;
        if let Some(part) = parts.last_mut() {
            part.names.push(name);
            part.schemas.push(*schema);
            part.defaults.push(*defaults);
        }
    }
    parts
}

/// The kinds to store for single queues: those that differ from what is there.
macro_rules! new_queue_kinds {
    () => {
        "
    select q.queue, i.name, i.schema, i.defaults
      from unnest($1::text[], $2::text[], $3::text[]) as i(name, schema, defaults)
     cross join unnest($4::text[]) as q(queue)
      left join longshore.queue_kinds k
        on k.queue = q.queue
       and k.name = i.name
     where not exists (
           select 1
             from longshore.kinds o
            where o.name = i.name)
       and (k.name is null
        or i.schema <> coalesce(k.schema::text, '')
        or i.defaults <> coalesce(k.defaults::text, ''))"
    };
}

static HAS_NEW: Statement = Statement::new(concat!("select 1 where exists (", new_queue_kinds!(), ")"));

async fn has_new(rows: &mut dyn Rows, kinds: &[NewKind], queues: &[String]) -> Sql<bool> {
    for part in parts(&by_name(kinds)) {
        if rows.has_row(&HAS_NEW, args![part.names, part.schemas, part.defaults, queues]).await? {
            return Ok(true);
        }
    }
    Ok(false)
}

static PUT_QUEUE_KINDS: Statement = Statement::new(concat!(
    "
    insert into longshore.queue_kinds as k (queue, name, schema, defaults, updated_at)
    select n.queue, n.name, n.schema::json, n.defaults::json, longshore.clock()
      from (",
    new_queue_kinds!(),
    ") n
     where true
        on conflict (queue, name) do update
       set schema = coalesce(excluded.schema, k.schema),
           defaults = coalesce(excluded.defaults, k.defaults),
           updated_at = excluded.updated_at"
));

static USED: Statement = Statement::new(
    "
    select count(*) filter (where queue = any($1::text[])) as own_kinds,
           coalesce(sum(bytes) filter (where queue = any($1::text[])), 0)::int8 as own_bytes,
           count(*) as kinds,
           coalesce(sum(bytes), 0)::int8 as bytes
      from (select queue,
                   octet_length(name) + coalesce(octet_length(schema::text), 0)
                   + coalesce(octet_length(defaults::text), 0) as bytes
              from longshore.queue_kinds) k",
);

async fn put_queue_kinds(rows: &mut dyn Rows, kinds: &[NewKind], queues: &[String]) -> Sql<()> {
    // One process at a time adds and counts.
    rows.lock("queue_kinds").await?;
    for part in parts(&by_name(kinds)) {
        rows.execute(&PUT_QUEUE_KINDS, args![part.names, part.schemas, part.defaults, queues]).await?;
    }
    let mut used = one(rows.row(&USED, args![queues]).await?)?;
    let of_token = KindUse { kinds: used.take("own_kinds")?, bytes: used.take("own_bytes")? };
    let in_all = KindUse { kinds: used.take("kinds")?, bytes: used.take("bytes")? };
    Ok(QUEUE_KINDS.check(of_token, in_all)?)
}

static KINDS: Statement = Statement::new(
    "
    select name, queue, schema is not null as has_schema, case when $5 then schema::text end as schema,
           defaults::text as defaults, updated_at
      from (select name, null as queue, schema, defaults, updated_at
              from longshore.kinds
             union all
            select name, queue, schema, defaults, updated_at
              from longshore.queue_kinds) k
     where (queue is null or $1::text[] is null or queue = any($1::text[]))
       and (name collate \"C\", coalesce(queue, '') collate \"C\") > ($2, $3)
     order by name collate \"C\", coalesce(queue, '') collate \"C\"
     limit $4",
);

async fn kinds(rows: &mut dyn Rows, filter: &KindFilter) -> Sql<Vec<KindRecord>> {
    let (name, queue) = filter.after.clone().unwrap_or_default();
    let limit = filter.limit.map_or(i64::MAX, i64::from);
    let with_schemas = filter.schemas == Schemas::Include;
    let found = rows.rows(&KINDS, args![&filter.queues, &name, &queue, limit, with_schemas]).await?;
    found.into_iter().map(read_kind).collect()
}

static REMOVE_KIND: Statement = Statement::new("delete from longshore.kinds where name = $1");

async fn remove_kind(rows: &mut dyn Rows, name: &String) -> Sql<bool> {
    let of_queues = rows.execute(&REMOVE_QUEUE_KINDS, args![std::slice::from_ref(name)]).await?;
    let of_all = rows.execute(&REMOVE_KIND, args![name]).await?;
    Ok(of_queues + of_all > 0)
}

fn read_kind(mut row: Row) -> Sql<KindRecord> {
    Ok(KindRecord {
        name: row.take("name")?,
        queue: row.take("queue")?,
        has_schema: row.take("has_schema")?,
        schema: row.take("schema")?,
        defaults: row.take("defaults")?,
        updated_at: row.take("updated_at")?,
    })
}
