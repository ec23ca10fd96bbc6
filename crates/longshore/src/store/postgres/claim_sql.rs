//! The two statements of a claim of jobs without a group: [`LOOK`] reads and plans, [`TAKE`] leases. The parts that they share with the
//! statements of groups are macros, because a constant can only be concatenated from literals.
//!
//! Each statement reads its [levels](crate::store::cursor) through a sub-select with a
//! literal limit, so that the planner knows how little will be read and uses the index.
//! Parameters are passed through sub-selects, so that the planner expects no gain from
//! planning for their values and plans each statement once.

/// The maximum number of jobs per claim, and the literal limit in the statements.
pub(super) const MAX_CLAIM: usize = 1000;

/// Returns the variant of a statement that skips unsound rows: waiting jobs that are
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

/// The due jobs of one level (as `l`), in claim order, after the cursor's position.
macro_rules! due_in_level {
    ($columns:literal, $lock:literal, $kinds:literal, $accept:literal, $forbid:literal) => {
        concat!(
            "(select ",
            $columns,
            "
                         from longshore.ready r
                        where r.queue = l.queue
                          and r.priority = l.priority
                          and r.interruptions = 0
                          and r.grp is null
                          and (r.run_at, r.id) > (l.after_run_at, l.after_id)
                          and r.run_at <= longshore.clock()
                          and ",
            is_handled!($kinds, $accept, $forbid),
            "
                        order by r.run_at, r.id
                        limit 1000",
            $lock,
            ") as due"
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
           j.options::text, t.flow, t.queue, t.priority, t.interruptions", $more_columns, "
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

/// Plans a claim of up to `$12` jobs, without locks. `$5` to `$8` are levels and the positions in them. Without them,
/// it finds the levels first, down to the lowest priority requested (`$4`), and those with due turns: one
/// index probe per level, however many jobs wait there and whenever they are due.
///
/// `candidates` merges the levels in claim order. It does so lazily, from the highest priority
/// down, so that lower ones are not read if higher ones suffice. `chosen` applies the room of the queues (`$2`) and so
/// determines how many jobs to take from each level. `$13` is how many suspects may be among them, and `$14` are suspects to leave out.
macro_rules! look {
    ($chosen:literal) => {
        concat!(
            "
    with recursive requested as (
      select n.queue, n.cap, n.place, s.max_running is not null or s.rate is not null as limited
        from unnest((select $1::text[]), (select $2::int4[]), (select $3::int4[])) as n(queue, cap, place)
        left join longshore.queues s on s.name = n.queue
       where s.paused is not true),
    level_of_jobs as (
      select q.queue, (
               select r.priority
                 from longshore.ready r
                where r.queue = q.queue
                  and r.interruptions = 0
                  and r.grp is null
                  and r.priority >= (select $4::int2)
                order by r.priority desc
                limit 1) as priority
        from requested q
       where (select $5::text[]) is null
      union all
      select l.queue, (
               select r.priority
                 from longshore.ready r
                where r.queue = l.queue
                  and r.interruptions = 0
                  and r.grp is null
                  and r.priority < l.priority
                  and r.priority >= (select $4::int2)
                order by r.priority desc
                limit 1)
        from level_of_jobs l
       where l.priority is not null),
    level_of_turns as (
      select q.queue, (
               select t.priority
                 from longshore.turns t
                where t.queue = q.queue
                  and t.priority >= (select $4::int2)
                order by t.priority desc
                limit 1) as priority
        from requested q
       where (select $5::text[]) is null
      union all
      select l.queue, (
               select t.priority
                 from longshore.turns t
                where t.queue = l.queue
                  and t.priority < l.priority
                  and t.priority >= (select $4::int2)
                order by t.priority desc
                limit 1)
        from level_of_turns l
       where l.priority is not null),
    level as materialized (
      select l.queue, l.priority, '-infinity'::timestamptz as after_run_at,
             '00000000-0000-0000-0000-000000000000'::uuid as after_id
        from level_of_jobs l
       where l.priority is not null
      union all
      select k.queue, k.priority, coalesce(k.run_at, '-infinity'),
             coalesce(k.id, '00000000-0000-0000-0000-000000000000')
        from unnest((select $5::text[]), (select $6::int2[]), (select $7::timestamptz[]), (select $8::uuid[]))
          as k(queue, priority, run_at, id)),
    candidates as materialized (
      select l.queue, l.priority, c.run_at, c.id, l.cap, l.place, false as is_suspect
        from (select v.*, q.cap, q.place
                from level v
                join requested q on q.queue = v.queue
               order by v.priority desc) as l
       cross join lateral (
               select due.run_at, due.id
                 from ",
            due_in_level!("r.run_at, r.id", "", "$9", "$10", "$11"),
            "
                limit least((select $12::int4), l.cap)) c
       order by l.priority desc
       fetch first (select $12::int8) rows with ties),
    suspects as (
      select q.queue, c.priority, c.run_at, c.id, q.cap, q.place, true as is_suspect
        from requested q
       cross join lateral (
               select r.priority, r.run_at, r.id
                 from longshore.ready r
                where r.queue = q.queue
                  and r.interruptions > 0
                  and r.grp is null
                  and r.priority >= (select $4::int2)
                  and r.run_at <= longshore.clock()
                  and r.id <> all ((select $14::uuid[])::uuid[])
                  and ",
            is_handled!("$9", "$10", "$11"),
            "
                order by r.priority desc, r.run_at, r.id
                limit least((select $13::int4), q.cap)) as c
       where q.cap is null   -- it must not keep out the suspect of another queue
          or q.cap > (
               select count(*)
                 from candidates before
                where before.queue = q.queue
                  and (before.priority > c.priority
                    or before.priority = c.priority and (before.run_at, before.id) < (c.run_at, c.id)))
       order by c.priority desc, c.run_at, c.id
       limit (select $13::int8)),
    chosen as materialized (",
            $chosen,
            "
       limit (select $12::int8))
    select longshore.clock(),
           exists (
             select 1
               from longshore.ready r
              where r.queue = any((select $1::text[])::text[])
                and r.interruptions > 0
                and r.grp is null
                and r.priority >= (select $4::int2)),
           exists (
             select 1
               from requested q
              where q.limited
                and exists (
                      select 1
                        from longshore.ready r
                       where r.queue = q.queue
                         and r.interruptions > 0
                         and r.grp is null
                         and r.priority >= (select $4::int2))),
           (select min(next.at)   -- when a rate lets the next job start
              from requested q
             cross join lateral (
                     select t.at
                       from longshore.turns t
                      where t.queue = q.queue
                        and t.tat is not null
                        and t.at > longshore.clock()
                      order by t.at
                      limit 1) as next),
           (select id
              from chosen
             where is_suspect),
           found.queue, found.priority, q.limited, found.is_turn, found.due, found.first_run_at, found.quota
      from (select 1) as one_row
      left join (select l.queue, l.priority, false as is_turn, coalesce(d.due, 0) as due, d.first_run_at,
                        coalesce(c.quota, 0) as quota
                   from level l
                   left join (select queue, priority, count(*) as due, min(run_at) as first_run_at
                                from candidates
                               group by queue, priority) as d
                     on d.queue = l.queue
                    and d.priority = l.priority
                   left join (select queue, priority, count(*) as quota
                                from chosen
                               where not is_suspect
                               group by queue, priority) as c
                     on c.queue = l.queue
                    and c.priority = l.priority
                  union all
                 select l.queue, l.priority, true, 0, null, 0
                   from level_of_turns l
                  where l.priority is not null
                    and exists (
                          select 1
                            from longshore.turns t
                           where t.queue = l.queue
                             and t.priority = l.priority
                             and t.at <= longshore.clock())) as found
        on true
      left join requested q on q.queue = found.queue"
        )
    };
}

pub(super) const LOOK: &str = look!(
    "
      select queue, priority, id, is_suspect
        from (select * from candidates
              union all
              select * from suspects) as found
       order by priority desc, run_at, id"
);

/// As [`LOOK`], if a queue has little room (`cap`), or if queues take turns (by `place`).
pub(super) const LOOK_WITHIN_ROOM: &str = look!(
    "
      select queue, priority, id, is_suspect
        from (select *,
                     row_number() over (partition by queue order by priority desc, run_at, id) as nth,
                     row_number() over (partition by priority, place order by run_at, id) as round
                from (select * from candidates
                      union all
                      select * from suspects) as found) as ranked
       where cap is null or nth <= cap
       order by priority desc, round, place, run_at, id"
);

/// Leases up to `$10` jobs: as many as planned (`$5`) from each level after its position, in the order of the levels, and the suspect `$11`. It
/// skips rows that other transactions have locked. Rows of `ready` are never updated, so a locked row can
/// be found by its `ctid`, which saves an index lookup. `$12` are the queues with a limit or a rate that this claim has locked.
/// Takes nothing while a job of a higher priority than `$13` waits.
pub(super) const TAKE: &str = concat!(
    "
    with level as materialized (
      select k.queue, k.priority, k.quota,
             coalesce(k.run_at, '-infinity') as after_run_at,
             coalesce(k.id, '00000000-0000-0000-0000-000000000000') as after_id
        from unnest((select $1::text[]), (select $2::int2[]), (select $3::timestamptz[]), (select $4::uuid[]),
                    (select $5::int4[])) with ordinality
          as k(queue, priority, run_at, id, quota, nth)
        left join longshore.queues s on s.name = k.queue
       where s.paused is not true
         and ((s.max_running is null and s.rate is null) or k.queue = any((select $12::text[])::text[]))
         and exists (
               select 1
                 from longshore.workers w
                where w.id = $6
                  and w.dead_at is null)
         and ((select $13::int2) is null or not exists (
               select 1
                 from longshore.ready h
                where h.queue = any((select $1::text[])::text[])
                  and h.priority > (select $13::int2)
                  and h.interruptions = 0
                  and h.grp is null)
          and not exists (
               select 1
                 from longshore.turns h
                where h.queue = any((select $1::text[])::text[])
                  and h.priority > (select $13::int2)
                  and h.at <= longshore.clock()))
       order by k.nth),
    picked as (
      select c.row_id
        from level l
       cross join lateral (
               select due.row_id
                 from ",
    due_in_level!("r.ctid as row_id", " for update skip locked", "$7", "$8", "$9"),
    "
                limit l.quota) c
       limit (select $10::int8)),
    picked_suspect as (
      select r.ctid as row_id
        from longshore.ready r
       where r.id = (select $11::uuid)
         and exists (
               select 1
                 from longshore.workers w
                where w.id = $6
                  and w.dead_at is null)
         and not exists (
               select 1
                 from longshore.queues s
                where s.name = r.queue
                  and (s.paused
                       or ((s.max_running is not null or s.rate is not null)
                           and s.name <> all ((select $12::text[])::text[]))))
         for update skip locked),
    taken as (
      delete from longshore.ready
       where ctid = any(array(select row_id from picked) || array(select row_id from picked_suspect))
      returning *),",
    lease_taken!("$6", "null::int4", ""),
);

pub(super) use {is_handled, lease_taken};
