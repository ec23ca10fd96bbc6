//! Claim: due jobs from `ready` to `running`, in order, never the same one twice.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};
use uuid::Uuid;

use super::{Done, Fault, PostgresStore, Query, translate};
use crate::enqueue::Options;
use crate::error::{Error, Result};
use crate::job::{JobId, WorkerId};
use crate::store::cursor::{ClaimCursor, Place, Position, Start, Taken};
use crate::store::{ClaimRequest, Claimed, Claims, Lease, Suspects, shared};

/// Which (queue, priority) have waiting jobs: one index probe each, however
/// many jobs wait there and whenever they are due.
const DISCOVER: &str = "
    with recursive asked as (
      select q.queue, s.max_running is not null as limited
        from unnest((select $1::text[])) as q(queue)
        left join longshore.queues s on s.name = q.queue
       where s.paused is not true),
    places as (
      select a.queue, a.limited, (
               select r.priority
                 from longshore.ready r
                where r.queue = a.queue
                  and r.interruptions = 0
                order by r.priority desc
                limit 1) as priority
        from asked a
      union all
      select p.queue, p.limited, (
               select r.priority
                 from longshore.ready r
                where r.queue = p.queue
                  and r.interruptions = 0
                  and r.priority < p.priority
                order by r.priority desc
                limit 1)
        from places p
       where p.priority is not null)
    select longshore.clock(),
           exists (
             select 1
               from longshore.ready r
              where r.queue = any((select $1::text[])::text[])
                and r.interruptions > 0),
           exists (
             select 1
               from asked a
              where a.limited),
           p.queue, p.limited, p.priority
      from (select 1) as always
      left join places p on p.priority is not null";

const LOCK_LIMITED: &str = "
    select name, max_running
      from longshore.queues
     where name = any($1)
       and max_running is not null
     order by name
       for update skip locked";

const COUNT_LIMITED: &str = "
    select queue, count(*)
      from longshore.running
     where queue = any($1)
     group by queue";

/// Every claim statement reads its places through a sub-select with a literal
/// limit, so that the planner knows how little will be read and keeps to the
/// index, and takes its parameters through sub-selects, so that a plan made for
/// their values promises no gain and the statement is planned once.
const MAX_CLAIM: usize = 1000;

/// Looks first and locks after: `look` merges the places in claim order without
/// locks (lazily, from the highest priority down, so that lower ones are not
/// read when higher ones suffice), which says how many to take where; `picked`
/// takes that many from each place, passing over what others have locked.
/// Rows of `ready` are never updated, so once locked, where they lie (`ctid`) is
/// as good as their id and spares the index.
const TAKE: &str = "
    with asked as (
      select q.queue, q.cap
        from unnest((select $1::text[]), (select $2::int4[])) as q(queue, cap)
        left join longshore.queues s on s.name = q.queue
       where s.paused is not true
         and (s.max_running is null or q.cap is not null)
         and exists (
               select 1
                 from longshore.workers w
                where w.id = $3
                  and w.dead_at is null)),
    place as materialized (
      select p.queue, p.priority, a.cap,
             coalesce(p.run_at, '-infinity') as after_run_at,
             coalesce(p.id, '00000000-0000-0000-0000-000000000000') as after_id
        from unnest((select $4::text[]), (select $5::int2[]), (select $6::timestamptz[]), (select $7::uuid[])) as p(queue, priority, run_at, id)
        join asked a on a.queue = p.queue
       order by p.priority desc),
    look as materialized (
      select p.queue, p.priority, c.run_at, c.id, p.cap, false as suspect
        from (select * from place order by priority desc) p
       cross join lateral (
               select n.run_at, n.id
                 from (select r.run_at, r.id
                         from longshore.ready r
                        where r.queue = p.queue
                          and r.priority = p.priority
                          and r.interruptions = 0
                          and (r.run_at, r.id) > (p.after_run_at, p.after_id)
                          and r.run_at <= longshore.clock()
                          and ((select $8::text[]) is null or r.kind = any((select $8::text[])::text[]))
                          and ((select $9::text[]) is null or r.flags && (select $9::text[]))
                          and ((select $10::text[]) is null or r.flags is null or not r.flags && (select $10::text[]))
                        order by r.run_at, r.id
                        limit 1000) as n
                limit least((select $11::int4), p.cap)) c
       order by p.priority desc
       fetch first (select $11::int8) rows with ties),
    suspect as (
      select a.queue, c.priority, c.run_at, c.id, a.cap, true as suspect
        from asked a
       cross join lateral (
               select r.priority, r.run_at, r.id
                 from longshore.ready r
                where r.queue = a.queue
                  and r.interruptions > 0
                  and r.run_at <= longshore.clock()
                  and ((select $8::text[]) is null or r.kind = any((select $8::text[])::text[]))
                  and ((select $9::text[]) is null or r.flags && (select $9::text[]))
                  and ((select $10::text[]) is null or r.flags is null or not r.flags && (select $10::text[]))
                order by r.priority desc, r.run_at, r.id
                limit least((select $12::int4), a.cap)) c
       order by c.priority desc, c.run_at, c.id
       limit (select $12::int8)),
    chosen as materialized (
      select queue, priority, run_at, id, suspect
        from (select *,
                     row_number() over (partition by queue order by priority desc, run_at, id) as nth
                from (select * from look
                      union all
                      select * from suspect) as seen) as ranked
       where cap is null or nth <= cap
       order by priority desc, run_at, id
       limit (select $11::int8)),
    picked as (
      select c.place
        from (select queue, priority, count(*) as n
                from chosen
               where not suspect
               group by queue, priority) as quota
        join place p using (queue, priority)
       cross join lateral (
               select n.place
                 from (select r.ctid as place
                         from longshore.ready r
                        where r.queue = p.queue
                          and r.priority = p.priority
                          and r.interruptions = 0
                          and (r.run_at, r.id) > (p.after_run_at, p.after_id)
                          and r.run_at <= longshore.clock()
                          and ((select $8::text[]) is null or r.kind = any((select $8::text[])::text[]))
                          and ((select $9::text[]) is null or r.flags && (select $9::text[]))
                          and ((select $10::text[]) is null or r.flags is null or not r.flags && (select $10::text[]))
                        order by r.run_at, r.id
                        limit 1000
                          for update skip locked) as n
                limit quota.n) c),
    picked_suspect as (
      select r.ctid as place
        from longshore.ready r
       where r.id = (select id from chosen where suspect)
         for update skip locked),
    taken as (
      delete from longshore.ready
       where ctid = any(array(select place from picked) || array(select place from picked_suspect))
      returning *),
    leased as (
      insert into longshore.running
             (id, worker, claimed_at, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags)
      select t.id, $3, longshore.clock(), t.timeout_ms, t.lease_no + 1, t.priority, t.attempt + 1, t.max_attempts,
             t.interruptions, t.keyed, t.kind, t.queue, t.flags
        from taken t)
    select longshore.clock(), t.id, t.kind, t.attempt + 1, t.max_attempts, t.lease_no + 1, t.timeout_ms, t.flags,
           t.run_at, j.payload::text, j.options::text,
           t.queue, t.priority, t.interruptions, (select count(*) from chosen)
      from (select 1) as always
      left join (taken t join longshore.jobs j on j.id = t.id) on true";

/// As [`TAKE`], but locks while it looks, and so sees only what can be had: for
/// what [`TAKE`] chose and found in the hands of others, who may keep it for as
/// long as their transaction lasts. Where several queues have the last priority
/// it reaches, it locks some rows that it then leaves; hence not the usual way.
const TAKE_FREE: &str = "
    with asked as (
      select q.queue, q.cap
        from unnest((select $1::text[]), (select $2::int4[])) as q(queue, cap)
        left join longshore.queues s on s.name = q.queue
       where s.paused is not true
         and (s.max_running is null or q.cap is not null)
         and exists (
               select 1
                 from longshore.workers w
                where w.id = $3
                  and w.dead_at is null)),
    place as materialized (
      select p.queue, p.priority, a.cap,
             coalesce(p.run_at, '-infinity') as after_run_at,
             coalesce(p.id, '00000000-0000-0000-0000-000000000000') as after_id
        from unnest((select $4::text[]), (select $5::int2[]), (select $6::timestamptz[]), (select $7::uuid[])) as p(queue, priority, run_at, id)
        join asked a on a.queue = p.queue
       order by p.priority desc),
    free as materialized (
      select p.queue, p.priority, c.run_at, c.id, p.cap, c.place
        from (select * from place order by priority desc) p
       cross join lateral (
               select n.run_at, n.id, n.place
                 from (select r.run_at, r.id, r.ctid as place
                         from longshore.ready r
                        where r.queue = p.queue
                          and r.priority = p.priority
                          and r.interruptions = 0
                          and (r.run_at, r.id) > (p.after_run_at, p.after_id)
                          and r.run_at <= longshore.clock()
                          and ((select $8::text[]) is null or r.kind = any((select $8::text[])::text[]))
                          and ((select $9::text[]) is null or r.flags && (select $9::text[]))
                          and ((select $10::text[]) is null or r.flags is null or not r.flags && (select $10::text[]))
                        order by r.run_at, r.id
                        limit 1000
                          for update skip locked) as n
                limit least((select $11::int4), p.cap)) c
       order by p.priority desc
       fetch first (select $11::int8) rows with ties),
    free_suspect as materialized (
      select a.queue, c.priority, c.run_at, c.id, a.cap, c.place
        from asked a
       cross join lateral (
               select r.priority, r.run_at, r.id, r.ctid as place
                 from longshore.ready r
                where r.queue = a.queue
                  and r.interruptions > 0
                  and r.run_at <= longshore.clock()
                  and ((select $8::text[]) is null or r.kind = any((select $8::text[])::text[]))
                  and ((select $9::text[]) is null or r.flags && (select $9::text[]))
                  and ((select $10::text[]) is null or r.flags is null or not r.flags && (select $10::text[]))
                order by r.priority desc, r.run_at, r.id
                limit least((select $12::int4), a.cap)
                  for update skip locked) c
       order by c.priority desc, c.run_at, c.id
       limit (select $12::int8)),
    chosen as materialized (
      select place
        from (select *,
                     row_number() over (partition by queue order by priority desc, run_at, id) as nth
                from (select * from free
                      union all
                      select * from free_suspect) as seen) as ranked
       where cap is null or nth <= cap
       order by priority desc, run_at, id
       limit (select $11::int8)),
    taken as (
      delete from longshore.ready
       where ctid = any(array(select place from chosen))
      returning *),
    leased as (
      insert into longshore.running
             (id, worker, claimed_at, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags)
      select t.id, $3, longshore.clock(), t.timeout_ms, t.lease_no + 1, t.priority, t.attempt + 1, t.max_attempts,
             t.interruptions, t.keyed, t.kind, t.queue, t.flags
        from taken t)
    select longshore.clock(), t.id, t.kind, t.attempt + 1, t.max_attempts, t.lease_no + 1, t.timeout_ms, t.flags,
           t.run_at, j.payload::text, j.options::text,
           t.queue, t.priority, t.interruptions, (select count(*) from chosen)
      from (select 1) as always
      left join (taken t join longshore.jobs j on j.id = t.id) on true";

/// As [`TAKE`], from the one place there is, when there is no other to merge
/// with: the common case, at half the cost. What all its rows have in common
/// (queue, priority, no interruptions) is not sent with each. A probe takes
/// nothing while any of a higher priority wait.
const TAKE_FROM_ONE: &str = "
    with picked as (
      select place
        from (select r.ctid as place
                from longshore.ready r
               where r.queue = (select $1::text)
                 and r.priority = (select $2::int2)
                 and r.interruptions = 0
                 and (r.run_at, r.id) > ((select coalesce($3, '-infinity'::timestamptz)),
                                         (select coalesce($4, '00000000-0000-0000-0000-000000000000'::uuid)))
                 and r.run_at <= longshore.clock()
                 and ((select $5::text[]) is null or r.kind = any((select $5::text[])::text[]))
                 and ((select $6::text[]) is null or r.flags && (select $6::text[]))
                 and ((select $7::text[]) is null or r.flags is null or not r.flags && (select $7::text[]))
                 and exists (
                       select 1
                         from longshore.workers w
                        where w.id = (select $8::uuid)
                          and w.dead_at is null)
                 and not exists (
                       select 1
                         from longshore.queues s
                        where s.name = (select $1::text)
                          and (s.paused or s.max_running is not null))
                 and (not (select $10::bool) or not exists (
                       select 1
                         from longshore.ready h
                        where h.queue = (select $1::text)
                          and h.priority > (select $2::int2)
                          and h.interruptions = 0))
               order by r.run_at, r.id
               limit 1000
                 for update of r skip locked) as r
       limit (select $9::int8)),
    taken as (
      delete from longshore.ready
       where ctid = any(array(select place from picked))
      returning *),
    leased as (
      insert into longshore.running
             (id, worker, claimed_at, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags)
      select t.id, $8, longshore.clock(), t.timeout_ms, t.lease_no + 1, t.priority, t.attempt + 1, t.max_attempts,
             t.interruptions, t.keyed, t.kind, t.queue, t.flags
        from taken t)
    select longshore.clock(), t.id, t.kind, t.attempt + 1, t.max_attempts, t.lease_no + 1, t.timeout_ms, t.flags,
           t.run_at, j.payload::text, j.options::text
      from (select 1) as always
      left join (taken t join longshore.jobs j on j.id = t.id) on true";

impl PostgresStore {
    pub(super) async fn claim_on(
        &self,
        connection: &mut PgConnection,
        request: &ClaimRequest,
        cursor: &mut ClaimCursor,
    ) -> Done<Claims> {
        let wanted = (request.limit as usize).min(MAX_CLAIM);
        let mut jobs = Vec::new();
        if wanted == 0 || request.queues.is_empty() {
            return Ok(Claims { jobs, more: false });
        }
        let start = cursor.start(request, Instant::now());
        if start != Start::Head {
            let limited = cursor.places().iter().any(|place| place.limited);
            let more = self.take_any(connection, request, cursor, &mut jobs, start, limited).await?;
            let head = cursor.may_scan_head(Instant::now());
            // What was found need not wait for another look at the head.
            if more || !jobs.is_empty() || !head {
                return Ok(Claims { jobs, more: more || head });
            }
        }
        let more = self.claim_from_head(connection, request, cursor, &mut jobs).await?;
        Ok(Claims { jobs, more })
    }

    async fn claim_from_head(
        &self,
        connection: &mut PgConnection,
        request: &ClaimRequest,
        cursor: &mut ClaimCursor,
        jobs: &mut Vec<Claimed>,
    ) -> Done<bool> {
        let began = Instant::now();
        let found = self.discover(connection, request, cursor).await?;
        let mut more = false;
        if found.any {
            more = self.take_any(connection, request, cursor, jobs, Start::Head, found.limited).await?;
        } else {
            cursor.advance(&[], false, Some(found.now));
        }
        cursor.head_scanned(began, Instant::now());
        Ok(more)
    }

    async fn discover(
        &self,
        connection: &mut PgConnection,
        request: &ClaimRequest,
        cursor: &mut ClaimCursor,
    ) -> Done<Discovered> {
        let rows = sqlx::query(self.sql(DISCOVER)).bind(&request.queues).fetch_all(connection).await?;
        let first = rows.first().ok_or_else(|| Error::internal("the discovery of queues gave no answer"))?;
        let (now, suspects, limited) = (first.try_get(0)?, first.try_get(1)?, first.try_get(2)?);
        let mut places = Vec::with_capacity(rows.len());
        for row in &rows {
            if let Some(queue) = row.try_get::<Option<String>, _>(3)? {
                places.push(Place {
                    queue,
                    limited: row.try_get(4)?,
                    priority: row.try_get(5)?,
                    after: None,
                });
            }
        }
        let any = suspects || !places.is_empty();
        cursor.set_places(places, suspects, now);
        Ok(Discovered { now, limited, any })
    }

    async fn take_any(
        &self,
        connection: &mut PgConnection,
        request: &ClaimRequest,
        cursor: &mut ClaimCursor,
        jobs: &mut Vec<Claimed>,
        start: Start,
        limited: bool,
    ) -> Done<bool> {
        match limited {
            false => self.take(connection, request, cursor, jobs, start, Vec::new()).await,
            true => self.take_limited(connection, request, cursor, jobs, start).await,
        }
    }

    /// Limited queues are never overdrawn: whoever holds the queue's row counts
    /// what runs, in a statement of its own that sees the last holder's
    /// commit, and takes the rest. Others pass the queue over meanwhile.
    async fn take_limited(
        &self,
        connection: &mut PgConnection,
        request: &ClaimRequest,
        cursor: &mut ClaimCursor,
        jobs: &mut Vec<Claimed>,
        start: Start,
    ) -> Done<bool> {
        let mut tx = connection.begin().await?;
        let locked = sqlx::query(self.sql(LOCK_LIMITED)).bind(&request.queues).fetch_all(&mut *tx).await?;
        let mut free = BTreeMap::<String, i64>::new();
        for row in &locked {
            free.insert(row.try_get(0)?, row.try_get::<i32, _>(1)?.into());
        }
        let names: Vec<&str> = free.keys().map(String::as_str).collect();
        let running = sqlx::query(self.sql(COUNT_LIMITED)).bind(&names).fetch_all(&mut *tx).await?;
        for row in &running {
            if let Some(left) = free.get_mut(row.try_get::<&str, _>(0)?) {
                *left -= row.try_get::<i64, _>(1)?;
            }
        }
        let caps =
            free.into_iter().map(|(queue, left)| (queue, left.clamp(0, i32::MAX.into()) as i32)).collect();
        let more = self.take(&mut tx, request, cursor, jobs, start, caps).await?;
        tx.commit().await?;
        Ok(more)
    }

    /// Takes what the limit leaves room for from the cursor's places; says
    /// whether there may be more.
    async fn take(
        &self,
        connection: &mut PgConnection,
        request: &ClaimRequest,
        cursor: &mut ClaimCursor,
        jobs: &mut Vec<Claimed>,
        start: Start,
        mut caps: Vec<(String, i32)>,
    ) -> Done<bool> {
        let before = jobs.len();
        let wanted = (request.limit as usize).min(MAX_CLAIM) - before;
        let suspect = may_take_suspect(request, jobs);
        let single = match cursor.places() {
            [place] if caps.is_empty() && !(suspect && cursor.saw_suspects()) => Some(place),
            _ => None,
        };
        let query = match single {
            Some(place) => {
                let probe = start == Start::Probe;
                bind_take_from_one(sqlx::query(self.sql(TAKE_FROM_ONE)), request, place, wanted, probe)
            }
            None => bind_take(sqlx::query(self.sql(TAKE)), request, cursor, &caps, wanted, suspect),
        };
        let rows = query.fetch_all(&mut *connection).await?;
        let Looked { at, chosen } = read_taken(&rows, request.worker, single, jobs)?;
        let missing = wanted - (jobs.len() - before);
        let mut full = chosen >= wanted;
        // Others hold some of what was chosen, perhaps for long. If that is not
        // all there is, what comes after it must not wait for them.
        let cut = full || !caps.is_empty() || (suspect && cursor.saw_suspects());
        if wanted - missing < chosen && cut {
            for (queue, left) in &mut caps {
                *left -= jobs[before..].iter().filter(|job| *job.queue == **queue).count() as i32;
            }
            let suspect = may_take_suspect(request, jobs);
            let query = bind_take(sqlx::query(self.sql(TAKE_FREE)), request, cursor, &caps, missing, suspect);
            // The first step is stored: another round of both, after a fault that
            // may pass, would forget its leases. The caller asks for them.
            let rows = query.fetch_all(connection).await.map_err(|error| Fault::Ours(translate(error)))?;
            full = read_taken(&rows, request.worker, None, jobs)?.chosen >= missing;
        }
        jobs[before..].sort_by_key(|job| (Reverse(job.priority), job.run_at, job.lease.id));
        let taken: Vec<Taken> =
            jobs[before..].iter().filter(|job| job.interruptions == 0).map(taken).collect();
        cursor.advance(&taken, full, Some(at));
        Ok(full)
    }
}

/// One probe a lease, whatever the planner believes of the table. The columns are
/// those of a claim, then which lease it is about.
const CLAIMS: &str = "
    select r.claimed_at, r.id, r.kind, r.attempt::int4, r.max_attempts, r.lease_no, r.timeout_ms, r.flags,
           j.run_at, j.payload::text, j.options::text,
           r.queue, r.priority, r.interruptions, i.nth
      from unnest((select $1::uuid[]), (select $2::int4[]), (select $3::uuid[])) with ordinality
        as i(id, lease_no, worker, nth)
     cross join lateral (
             select *
               from longshore.running h
              where h.id = i.id
                and h.lease_no = i.lease_no   -- fence: a newer lease owns the row
                and h.worker = i.worker
              limit 1) as r
      join longshore.jobs j on j.id = r.id";

impl PostgresStore {
    pub(super) async fn claims_on(
        &self,
        connection: &mut PgConnection,
        leases: &[Lease],
    ) -> Done<Vec<Option<Claimed>>> {
        let rows = sqlx::query(self.sql(CLAIMS))
            .bind(leases.iter().map(|lease| lease.id.0).collect::<Vec<_>>())
            .bind(leases.iter().map(|lease| lease.lease_no).collect::<Vec<_>>())
            .bind(leases.iter().map(|lease| lease.worker.0).collect::<Vec<_>>())
            .fetch_all(connection)
            .await?;
        let mut claims: Vec<_> = leases.iter().map(|_| None).collect();
        for row in &rows {
            let nth = row.try_get::<i64, _>(14)? as usize - 1;
            let Lease { id, worker, .. } = leases[nth];
            claims[nth] = Some(Reader::new(worker, row.try_get(0)?, None).read(row, id)?);
        }
        Ok(claims)
    }
}

/// One suspect at a time, counting one that this call took already.
fn may_take_suspect(request: &ClaimRequest, jobs: &[Claimed]) -> bool {
    request.suspects == Suspects::One && jobs.iter().all(|job| job.interruptions == 0)
}

impl PostgresStore {
    /// How Postgres would carry out this claim now, starting at the head: the
    /// plan with its costs and buffers. Runs the claim and takes it back.
    pub async fn explain_claim(&self, request: &ClaimRequest) -> Result<String> {
        self.run(request.clone(), |store, connection, request| {
            Box::pin(store.explain_claim_on(connection, request))
        })
        .await
    }

    async fn explain_claim_on(&self, connection: &mut PgConnection, request: &ClaimRequest) -> Done<String> {
        let mut tx = connection.begin().await?;
        let mut cursor = ClaimCursor::default();
        self.discover(&mut tx, request, &mut cursor).await?;
        let text = format!("explain (analyze, buffers, settings) {}", self.0.schema.fill(TAKE));
        let query = sqlx::query(AssertSqlSafe(text));
        let query = bind_take(query, request, &cursor, &[], request.limit as usize, true);
        let rows = query.fetch_all(&mut *tx).await?;
        tx.rollback().await?;
        let lines: Vec<String> = rows.iter().map(|row| row.try_get(0)).collect::<sqlx::Result<_>>()?;
        Ok(lines.join("\n"))
    }
}

fn bind_take_from_one<'q>(
    query: Query<'q>,
    request: &ClaimRequest,
    place: &Place,
    wanted: usize,
    probe: bool,
) -> Query<'q> {
    query
        .bind(place.queue.clone())
        .bind(place.priority)
        .bind(place.after.map(|after| after.run_at))
        .bind(place.after.map(|after| after.id))
        .bind(request.kinds.clone())
        .bind((!request.accept_flags.is_empty()).then(|| request.accept_flags.clone()))
        .bind((!request.forbid_flags.is_empty()).then(|| request.forbid_flags.clone()))
        .bind(request.worker.0)
        .bind(wanted as i64)
        .bind(probe)
}

/// The twelve parameters of [`TAKE`] and [`TAKE_FREE`].
fn bind_take<'q>(
    query: Query<'q>,
    request: &ClaimRequest,
    cursor: &ClaimCursor,
    caps: &[(String, i32)],
    wanted: usize,
    suspect: bool,
) -> Query<'q> {
    let cap = |queue: &String| caps.iter().find(|(name, _)| name == queue).map(|(_, left)| *left);
    let places = cursor.places().iter();
    query
        .bind(request.queues.clone())
        .bind(request.queues.iter().map(cap).collect::<Vec<_>>())
        .bind(request.worker.0)
        .bind(places.clone().map(|place| place.queue.clone()).collect::<Vec<_>>())
        .bind(places.clone().map(|place| place.priority).collect::<Vec<_>>())
        .bind(places.clone().map(|place| place.after.map(|after| after.run_at)).collect::<Vec<_>>())
        .bind(places.map(|place| place.after.map(|after| after.id)).collect::<Vec<_>>())
        .bind(request.kinds.clone())
        .bind((!request.accept_flags.is_empty()).then(|| request.accept_flags.clone()))
        .bind((!request.forbid_flags.is_empty()).then(|| request.forbid_flags.clone()))
        .bind(wanted as i32)
        .bind(i32::from(suspect))
}

struct Discovered {
    now: DateTime<Utc>,
    limited: bool,
    /// Whether anything waits at all.
    any: bool,
}

fn taken(job: &Claimed) -> Taken<'_> {
    Taken {
        queue: &job.queue,
        priority: job.priority,
        at: Position { run_at: job.run_at, id: job.lease.id.0 },
    }
}

/// What a claim statement says beside the jobs.
struct Looked {
    at: DateTime<Utc>,
    /// How many were there to take, whether or not others had locked them.
    chosen: usize,
}

fn read_taken(
    rows: &[PgRow],
    worker: WorkerId,
    single: Option<&Place>,
    jobs: &mut Vec<Claimed>,
) -> Done<Looked> {
    let first = rows.first().ok_or_else(|| Error::internal("a claim gave no answer"))?;
    let mut reader = Reader::new(worker, first.try_get(0)?, single);
    let before = jobs.len();
    jobs.reserve(rows.len());
    for row in rows {
        if let Some(id) = row.try_get::<Option<Uuid>, _>(1)? {
            jobs.push(reader.read(row, JobId(id))?);
        }
    }
    let chosen = match single {
        // Looks and locks in one.
        Some(_) => jobs.len() - before,
        None => first.try_get::<i64, _>(14)? as usize,
    };
    Ok(Looked { at: reader.claimed_at, chosen })
}

/// Reads the rows of a claim. Names that repeat from row to row are shared.
struct Reader {
    worker: WorkerId,
    claimed_at: DateTime<Utc>,
    /// Queue and priority, where all rows have the same.
    single: Option<(Arc<str>, i16)>,
    queue: Arc<str>,
    kind: Arc<str>,
}

impl Reader {
    fn new(worker: WorkerId, claimed_at: DateTime<Utc>, single: Option<&Place>) -> Self {
        let single = single.map(|place| (Arc::from(place.queue.as_str()), place.priority));
        Reader { worker, claimed_at, single, queue: "".into(), kind: "".into() }
    }

    fn read(&mut self, row: &PgRow, id: JobId) -> Done<Claimed> {
        let (queue, priority, interruptions) = match &self.single {
            Some((queue, priority)) => (queue.clone(), *priority, 0),
            None => {
                let queue = shared(&mut self.queue, row.try_get(11)?);
                (queue, row.try_get(12)?, row.try_get::<i16, _>(13)? as u16)
            }
        };
        Ok(Claimed {
            kind: shared(&mut self.kind, row.try_get(2)?),
            queue,
            priority,
            attempt: row.try_get::<i32, _>(3)? as u16,
            max_attempts: row.try_get::<i16, _>(4)? as u16,
            interruptions,
            lease: Lease { id, lease_no: row.try_get(5)?, worker: self.worker },
            timeout: row.try_get::<Option<i64>, _>(6)?.map(|ms| Duration::from_millis(ms as u64)),
            flags: row
                .try_get::<Option<Vec<Option<String>>>, _>(7)?
                .unwrap_or_default()
                .into_iter()
                .flatten()
                .collect(),
            run_at: row.try_get(8)?,
            claimed_at: self.claimed_at,
            payload: row.try_get(9)?,
            // The claim is committed: one bad row must not take its neighbours with it.
            options: Options::from_stored(row.try_get(10)?).unwrap_or_else(|error| {
                tracing::error!(job_id = %id, %error, "running the job without its options");
                Options::default()
            }),
        })
    }
}
