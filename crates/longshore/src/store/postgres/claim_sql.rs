//! The statements of a claim.
//!
//! Every one reads its places through a sub-select with a literal limit, so that the
//! planner knows how little will be read and uses the index. Parameters are passed
//! through sub-selects, so that a plan for their actual values promises no gain and
//! the statement is planned once. What the statements have in common is in the macros
//! below, because a constant can only be put together from literals.

/// No claim takes more jobs than this; the literal limit of the statements is the same.
pub(super) const MAX_CLAIM: usize = 1000;

/// Which (queue, priority) have waiting jobs: one index probe each, however
/// many jobs wait there and whenever they are due.
pub(super) const DISCOVER: &str = "
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

pub(super) const LOCK_LIMITED: &str = "
    select name, max_running
      from longshore.queues
     where name = any($1)
       and max_running is not null
     order by name
       for update skip locked";

pub(super) const COUNT_LIMITED: &str = "
    select queue, count(*)
      from longshore.running
     where queue = any($1)
     group by queue";

/// The queues that may be claimed from, each with how many jobs it may still start,
/// and their places. Empty unless the worker is alive.
macro_rules! queues_and_places {
    () => {
        "
    with requested as (
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
        from unnest((select $4::text[]), (select $5::int2[]), (select $6::timestamptz[]), (select $7::uuid[]))
          as p(queue, priority, run_at, id)
        join requested a on a.queue = p.queue
       order by p.priority desc),"
    };
}

/// Whether the worker handles a job of `ready` (as `r`): its kind and its flags.
macro_rules! is_handled {
    ($kinds:literal, $accept:literal, $forbid:literal) => {
        concat!(
            "((select ",
            $kinds,
            "::text[]) is null or r.kind = any((select ",
            $kinds,
            "::text[])::text[]))
                          and ((select ",
            $accept,
            "::text[]) is null or r.flags && (select ",
            $accept,
            "::text[]))
                          and ((select ",
            $forbid,
            "::text[]) is null or r.flags is null
                               or not r.flags && (select ",
            $forbid,
            "::text[]))"
        )
    };
}

/// The due jobs of one place (as `p`), in claim order, from where the cursor says.
macro_rules! due_in_place {
    ($columns:literal, $lock:literal) => {
        concat!(
            "(select ",
            $columns,
            "
                         from longshore.ready r
                        where r.queue = p.queue
                          and r.priority = p.priority
                          and r.interruptions = 0
                          and (r.run_at, r.id) > (p.after_run_at, p.after_id)
                          and r.run_at <= longshore.clock()
                          and ",
            is_handled!("$8", "$9", "$10"),
            "
                        order by r.run_at, r.id
                        limit 1000",
            $lock,
            ") as n"
        )
    };
}

/// The due suspects of one queue (as `a`), in claim order.
macro_rules! due_suspects {
    ($columns:literal, $lock:literal) => {
        concat!(
            "(select ",
            $columns,
            "
                 from longshore.ready r
                where r.queue = a.queue
                  and r.interruptions > 0
                  and r.run_at <= longshore.clock()
                  and ",
            is_handled!("$8", "$9", "$10"),
            "
                order by r.priority desc, r.run_at, r.id
                limit least((select $12::int4), a.cap)",
            $lock,
            ") c"
        )
    };
}

/// Leases the deleted rows (`taken`) to the worker and returns them.
macro_rules! lease_taken {
    ($worker:literal, $more_columns:literal) => {
        concat!(
            "
    leased as (
      insert into longshore.running
             (id, worker, claimed_at, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags)
      select t.id, ", $worker, ", longshore.clock(), t.timeout_ms, t.lease_no + 1, t.priority, t.attempt + 1,
             t.max_attempts, t.interruptions, t.keyed, t.kind, t.queue, t.flags
        from taken t)
    select longshore.clock(), t.id, t.kind, t.attempt + 1, t.max_attempts, t.lease_no + 1, t.timeout_ms, t.flags,
           t.run_at, j.payload::text, j.options::text", $more_columns, "
      from (select 1) as always
      left join (taken t join longshore.jobs j on j.id = t.id) on true"
        )
    };
}

/// Reads first and locks afterwards. `look` merges the places in claim order without
/// locks (lazily, from the highest priority down, so that lower ones are not read if
/// higher ones suffice), which says how many jobs to take from each place. `picked`
/// takes that many from each place and skips rows that others have locked. Rows of
/// `ready` are never updated, so a locked row can be found by its `ctid`, which saves
/// an index lookup.
pub(super) const TAKE: &str = concat!(
    queues_and_places!(),
    "
    look as materialized (
      select p.queue, p.priority, c.run_at, c.id, p.cap, false as suspect
        from (select * from place order by priority desc) p
       cross join lateral (
               select n.run_at, n.id
                 from ",
    due_in_place!("r.run_at, r.id", ""),
    "
                limit least((select $11::int4), p.cap)) c
       order by p.priority desc
       fetch first (select $11::int8) rows with ties),
    suspect as (
      select a.queue, c.priority, c.run_at, c.id, a.cap, true as suspect
        from requested a
       cross join lateral ",
    due_suspects!("r.priority, r.run_at, r.id", ""),
    "
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
                 from ",
    due_in_place!("r.ctid as place", " for update skip locked"),
    "
                limit quota.n) c),
    picked_suspect as (
      select r.ctid as place
        from longshore.ready r
       where r.id = (select id from chosen where suspect)
         for update skip locked),
    taken as (
      delete from longshore.ready
       where ctid = any(array(select place from picked) || array(select place from picked_suspect))
      returning *),",
    lease_taken!("$3", ", t.queue, t.priority, t.interruptions, (select count(*) from chosen)"),
);

/// As [`TAKE`], but locks while it reads, and so sees only rows that are free. For
/// when others have locked what [`TAKE`] chose: they may hold it for as long as their
/// transaction lasts. If several queues share the last priority that it reaches, it
/// locks some rows that it then leaves alone, so it is not used otherwise.
pub(super) const TAKE_FREE: &str = concat!(
    queues_and_places!(),
    "
    free as materialized (
      select p.queue, p.priority, c.run_at, c.id, p.cap, c.place
        from (select * from place order by priority desc) p
       cross join lateral (
               select n.run_at, n.id, n.place
                 from ",
    due_in_place!("r.run_at, r.id, r.ctid as place", " for update skip locked"),
    "
                limit least((select $11::int4), p.cap)) c
       order by p.priority desc
       fetch first (select $11::int8) rows with ties),
    free_suspect as materialized (
      select a.queue, c.priority, c.run_at, c.id, a.cap, c.place
        from requested a
       cross join lateral ",
    due_suspects!("r.priority, r.run_at, r.id, r.ctid as place", " for update skip locked"),
    "
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
      returning *),",
    lease_taken!("$3", ", t.queue, t.priority, t.interruptions, (select count(*) from chosen)"),
);

/// As [`TAKE`], if there is only one place: the common case, at half the cost. The
/// columns that all its rows share (queue, priority, no interruptions) are not
/// returned. A probe (`$10`) takes nothing while a job of a higher priority waits.
pub(super) const TAKE_FROM_ONE: &str = concat!(
    "
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
                 and ",
    is_handled!("$5", "$6", "$7"),
    "
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
      returning *),",
    lease_taken!("$8", ""),
);
