//! The statements of a claim.
//!
//! Each statement reads its [segments](crate::store::cursor) through a sub-select with a
//! literal limit, so that the planner knows how little will be read and uses the index.
//! Parameters are passed through sub-selects, so that the planner expects no gain from
//! planning for their values and plans each statement once. The parts that the statements
//! share are macros, because a constant can only be concatenated from literals.

/// The maximum number of jobs per claim, and the literal limit in the statements.
pub(super) const MAX_CLAIM: usize = 1000;

/// Finds the segments, that is, each (queue, priority) with waiting jobs, down to the lowest
/// priority requested (`$2`), and the lines with due turns. Costs one index probe per segment and
/// line, however many jobs wait there and whenever they are due.
pub(super) const DISCOVER: &str = "
    with recursive requested as (
      select n.queue, s.max_running is not null or s.rate is not null as limited
        from unnest((select $1::text[])) as n(queue)
        left join longshore.queues s on s.name = n.queue
       where s.paused is not true),
    segments as (
      select q.queue, q.limited, (
               select r.priority
                 from longshore.ready r
                where r.queue = q.queue
                  and r.interruptions = 0
                  and r.grp is null
                  and r.priority >= (select $2::int2)
                order by r.priority desc
                limit 1) as priority
        from requested q
      union all
      select seg.queue, seg.limited, (
               select r.priority
                 from longshore.ready r
                where r.queue = seg.queue
                  and r.interruptions = 0
                  and r.grp is null
                  and r.priority < seg.priority
                  and r.priority >= (select $2::int2)
                order by r.priority desc
                limit 1)
        from segments seg
       where seg.priority is not null),
    lines as (
      select q.queue, q.limited, (
               select t.priority
                 from longshore.turns t
                where t.queue = q.queue
                  and t.priority >= (select $2::int2)
                order by t.priority desc
                limit 1) as priority
        from requested q
      union all
      select l.queue, l.limited, (
               select t.priority
                 from longshore.turns t
                where t.queue = l.queue
                  and t.priority < l.priority
                  and t.priority >= (select $2::int2)
                order by t.priority desc
                limit 1)
        from lines l
       where l.priority is not null)
    select longshore.clock(),
           exists (
             select 1
               from longshore.ready r
              where r.queue = any((select $1::text[])::text[])
                and r.interruptions > 0
                and r.grp is null
                and r.priority >= (select $2::int2)),
           exists (
             select 1
               from requested q
              where q.limited),
           found.queue, found.limited, found.priority, found.is_line,
           (select min(next.at)   -- when a rate lets the next job start
              from requested q
             cross join lateral (
                     select t.at
                       from longshore.turns t
                      where t.queue = q.queue
                        and t.tat is not null
                        and t.at > longshore.clock()
                      order by t.at
                      limit 1) as next)
      from (select 1) as one_row
      left join (select seg.queue, seg.limited, seg.priority, false as is_line
                   from segments seg
                  where seg.priority is not null
                  union all
                 select l.queue, l.limited, l.priority, true
                   from lines l
                  where l.priority is not null
                    and exists (
                          select 1
                            from longshore.turns t
                           where t.queue = l.queue
                             and t.priority = l.priority
                             and t.at <= longshore.clock())) as found on true";

/// Limits hold across processes: the claim that locks the row may start jobs of the queue.
pub(super) const LOCK_LIMITED: &str = "
    select name, max_running, rate, rate_ms, burst, tat, longshore.clock()
      from longshore.queues
     where name = any($1)
       and (max_running is not null or rate is not null)
     order by name
       for update skip locked";

pub(super) const COUNT_LIMITED: &str = "
    select queue, count(*)
      from longshore.running
     where queue = any($1)
     group by queue";

pub(super) const PACE_QUEUES: &str = "
    update longshore.queues q
       set tat = i.tat
      from unnest($1::text[], $2::timestamptz[]) as i(name, tat)
     where q.name = i.name";

/// The queues that may be claimed from, each with the number of jobs it may still start
/// (`cap`), and their segments. Empty unless the worker is alive.
macro_rules! queues_and_segments {
    () => {
        "
    with requested as (
      select n.queue, n.cap
        from unnest((select $1::text[]), (select $2::int4[])) as n(queue, cap)
        left join longshore.queues s on s.name = n.queue
       where s.paused is not true
         and ((s.max_running is null and s.rate is null) or n.cap is not null)
         and exists (
               select 1
                 from longshore.workers w
                where w.id = $3
                  and w.dead_at is null)),
    segment as materialized (
      select seg.queue, seg.priority, q.cap,
             coalesce(seg.run_at, '-infinity') as after_run_at,
             coalesce(seg.id, '00000000-0000-0000-0000-000000000000') as after_id
        from unnest((select $4::text[]), (select $5::int2[]), (select $6::timestamptz[]), (select $7::uuid[]))
          as seg(queue, priority, run_at, id)
        join requested q on q.queue = seg.queue
       order by seg.priority desc),"
    };
}

/// Returns the variant of a claim statement that skips unsound rows: waiting jobs that are
/// also running or finished, or that have no request. It costs three lookups per row, so it
/// is used only after a claim failed because of such a row.
pub(super) fn skipping_unsound(statement: &str) -> String {
    const IS_SOUND: &str = "
                          and exists (select 1 from longshore.jobs s where s.id = r.id)
                          and not exists (select 1 from longshore.running s where s.id = r.id)
                          and not exists (select 1 from longshore.finished s where s.id = r.id)";
    statement.replace("/* sound */", IS_SOUND)
}

/// Whether the worker takes a job of `ready` (as `r`), by its kind and flags. The comment
/// marks where [`skipping_unsound`] adds its test.
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
            "::text[])) /* sound */"
        )
    };
}

/// The due jobs of one segment (as `seg`), in claim order, after the cursor's position.
macro_rules! due_in_segment {
    ($columns:literal, $lock:literal) => {
        concat!(
            "(select ",
            $columns,
            "
                         from longshore.ready r
                        where r.queue = seg.queue
                          and r.priority = seg.priority
                          and r.interruptions = 0
                          and r.grp is null
                          and (r.run_at, r.id) > (seg.after_run_at, seg.after_id)
                          and r.run_at <= longshore.clock()
                          and ",
            is_handled!("$8", "$9", "$10"),
            "
                        order by r.run_at, r.id
                        limit 1000",
            $lock,
            ") as due"
        )
    };
}

/// The due suspects of one queue (as `q`), in claim order.
macro_rules! due_suspects {
    ($columns:literal, $lock:literal) => {
        concat!(
            "(select ",
            $columns,
            "
                 from longshore.ready r
                where r.queue = q.queue
                  and r.interruptions > 0
                  and r.grp is null
                  and r.priority >= (select $13::int2)
                  and r.run_at <= longshore.clock()
                  and ",
            is_handled!("$8", "$9", "$10"),
            "
                order by r.priority desc, r.run_at, r.id
                limit least((select $12::int4), q.cap)",
            $lock,
            ") c"
        )
    };
}

/// Leases the deleted rows (`taken`) to the worker and returns them. If there are none,
/// returns one row with the time. A job without a request makes the statement fail, because
/// its text is not a uuid: it must not be leased.
macro_rules! lease_taken {
    ($worker:literal, $gate:literal, $more_columns:literal) => {
        concat!(
            "
    leased as (
      insert into longshore.running
             (id, worker, claimed_at, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags, grp, flow, gate)
      select t.id, ", $worker, ", longshore.clock(), t.timeout_ms, t.lease_no + 1, t.priority, t.attempt + 1,
             t.max_attempts, t.interruptions, t.keyed, t.kind, t.queue, t.flags, t.grp, t.flow, ", $gate, "
        from taken t)
    select longshore.clock(), t.id, t.kind, t.attempt + 1, t.max_attempts, t.lease_no + 1, t.timeout_ms, t.flags,
           t.run_at, coalesce(j.payload::text, ('job ' || t.id || ' has no request')::uuid::text),
           j.options::text, t.flow", $more_columns, "
      from (select 1) as one_row
      left join (taken t
                 left join lateral (   -- one index probe per job, whatever the planner assumes
                        select payload, options
                          from longshore.jobs
                         where id = t.id
                         limit 1) as j
                   on true)
        on true"
        )
    };
}

/// Reads first and locks afterwards. `candidates` merges the segments in claim order
/// without locks. It does so lazily, from the highest priority down, so that lower ones
/// are not read if higher ones suffice. `chosen` applies the limits and so determines how
/// many jobs to take from each segment. `picked` takes that many and skips rows that
/// other transactions have locked. Rows of `ready` are never updated, so a locked row can
/// be found by its `ctid`, which saves an index lookup.
pub(super) const TAKE: &str = concat!(
    queues_and_segments!(),
    "
    candidates as materialized (
      select seg.queue, seg.priority, c.run_at, c.id, seg.cap, false as is_suspect
        from (select * from segment order by priority desc) seg
       cross join lateral (
               select due.run_at, due.id
                 from ",
    due_in_segment!("r.run_at, r.id", ""),
    "
                limit least((select $11::int4), seg.cap)) c
       order by seg.priority desc
       fetch first (select $11::int8) rows with ties),
    suspects as (
      select q.queue, c.priority, c.run_at, c.id, q.cap, true as is_suspect
        from requested q
       cross join lateral ",
    due_suspects!("r.priority, r.run_at, r.id", ""),
    "
       order by c.priority desc, c.run_at, c.id
       limit (select $12::int8)),
    chosen as materialized (
      select queue, priority, run_at, id, is_suspect
        from (select *,
                     row_number() over (partition by queue order by priority desc, run_at, id) as nth
                from (select * from candidates
                      union all
                      select * from suspects) as found) as ranked
       where cap is null or nth <= cap
       order by priority desc, run_at, id
       limit (select $11::int8)),
    picked as (
      select c.row_id
        from (select queue, priority, count(*) as n
                from chosen
               where not is_suspect
               group by queue, priority) as quota
        join segment seg using (queue, priority)
       cross join lateral (
               select due.row_id
                 from ",
    due_in_segment!("r.ctid as row_id", " for update skip locked"),
    "
                limit quota.n) c),
    picked_suspect as (
      select r.ctid as row_id
        from longshore.ready r
       where r.id = (select id from chosen where is_suspect)
         for update skip locked),
    taken as (
      delete from longshore.ready
       where ctid = any(array(select row_id from picked) || array(select row_id from picked_suspect))
      returning *),",
    lease_taken!(
        "$3",
        "null::int4",
        ", t.queue, t.priority, t.interruptions, (select count(*) from chosen),
             (select count(*) from candidates)"
    ),
);

/// As [`TAKE`], but locks while it reads, and so finds only unlocked rows. Used when
/// others have locked rows that [`TAKE`] chose, which they may hold for as long as their
/// transaction lasts. Not used otherwise: if several queues share the last priority that
/// it reaches, it locks some rows that it does not take.
pub(super) const TAKE_UNLOCKED: &str = concat!(
    queues_and_segments!(),
    "
    unlocked as materialized (
      select seg.queue, seg.priority, c.run_at, c.id, seg.cap, c.row_id
        from (select * from segment order by priority desc) seg
       cross join lateral (
               select due.run_at, due.id, due.row_id
                 from ",
    due_in_segment!("r.run_at, r.id, r.ctid as row_id", " for update skip locked"),
    "
                limit least((select $11::int4), seg.cap)) c
       order by seg.priority desc
       fetch first (select $11::int8) rows with ties),
    unlocked_suspects as materialized (
      select q.queue, c.priority, c.run_at, c.id, q.cap, c.row_id
        from requested q
       cross join lateral ",
    due_suspects!("r.priority, r.run_at, r.id, r.ctid as row_id", " for update skip locked"),
    "
       order by c.priority desc, c.run_at, c.id
       limit (select $12::int8)),
    chosen as materialized (
      select row_id
        from (select *,
                     row_number() over (partition by queue order by priority desc, run_at, id) as nth
                from (select * from unlocked
                      union all
                      select * from unlocked_suspects) as found) as ranked
       where cap is null or nth <= cap
       order by priority desc, run_at, id
       limit (select $11::int8)),
    taken as (
      delete from longshore.ready
       where ctid = any(array(select row_id from chosen))
      returning *),",
    lease_taken!("$3", "null::int4", ", t.queue, t.priority, t.interruptions, (select count(*) from chosen)"),
);

/// As [`TAKE`], for a single segment: the common case, at half the cost. The columns
/// that are the same in all rows (queue, priority, no interruptions) are not returned. A
/// probe (`$10`) takes nothing while a job of a higher priority waits.
pub(super) const TAKE_FROM_ONE: &str = concat!(
    "
    with picked as (
      select row_id
        from (select r.ctid as row_id
                from longshore.ready r
               where r.queue = (select $1::text)
                 and r.priority = (select $2::int2)
                 and r.interruptions = 0
                 and r.grp is null
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
                          and (s.paused or s.max_running is not null or s.rate is not null))
                 and (not (select $10::bool) or not exists (
                       select 1
                         from longshore.ready h
                        where h.queue = (select $1::text)
                          and h.priority > (select $2::int2)
                          and h.interruptions = 0
                          and h.grp is null)
                  and not exists (
                       select 1
                         from longshore.turns h
                        where h.queue = (select $1::text)
                          and h.priority > (select $2::int2)
                          and h.at <= longshore.clock()))
               order by r.run_at, r.id
               limit 1000
                 for update of r skip locked) as r
       limit (select $9::int8)),
    taken as (
      delete from longshore.ready
       where ctid = any(array(select row_id from picked))
      returning *),",
    lease_taken!("$8", "null::int4", ""),
);

pub(super) use {is_handled, lease_taken};
