//! The faults of jobs, keys, groups, steps, waits, events and tallies.

use super::Fault;

/// A unique key, `k`, whose job is not live or has another key.
macro_rules! key_without_owner {
    () => {
        "not exists (
               select 1
                 from longshore.jobs j
                where j.id = k.job
                  and j.unique_key = k.key
                  and (exists (select 1 from longshore.ready w where w.id = j.id)
                       or exists (select 1 from longshore.running r where r.id = j.id and not r.superseded)))"
    };
}

/// A step or a wait, `o`, of a job that is in no table. A job that has lost only its request is
/// another problem.
macro_rules! journal_without_job {
    () => {
        "not exists (select 1 from longshore.jobs j where j.id = o.job)
           and not exists (select 1 from longshore.ready w where w.id = o.job)
           and not exists (select 1 from longshore.running r where r.id = o.job)
           and not exists (select 1 from longshore.finished f where f.id = o.job)"
    };
}

/// A wait, `s`, for an event, `e`, that counts as delivered. The job still waits. An event whose time has
/// passed counts as absent.
macro_rules! missed_delivery {
    () => {
        "s.event = e.name
           and not s.woken
           and not e.fresh
           and e.emitted_at >= {now} - {7 days}
           and exists (select 1 from longshore.ready w where w.id = s.job and w.lease_no = s.lease_no)"
    };
}

/// Deletes what belongs to a job without a request, unless its worker still runs it.
macro_rules! delete_from {
    ($table:literal, $job:literal) => {
        concat!(
            "delete from longshore.",
            $table,
            " as o
              where o.",
            $job,
            " = {0:id}
                and not exists (select 1 from longshore.jobs j where j.id = {0:id})
                and not exists (select 1 from longshore.running r where r.id = {0:id})"
        )
    };
}

/// The numbers of finished jobs that the tallies miss, `missing`, in `counted`.
macro_rules! counted {
    () => {
        "(select queue, kind, outcome, kept as tallied, 0 as found
                  from longshore.tallies
                 union all
                select j.queue, j.kind, f.outcome, 0, 1
                  from longshore.finished f
                  join longshore.jobs j on j.id = f.id) as counted"
    };
}

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        find: "
            select j.id, j.queue
              from longshore.jobs j
             where not exists (select 1 from longshore.ready w where w.id = j.id)
               and not exists (select 1 from longshore.running r where r.id = j.id)
               and not exists (select 1 from longshore.finished f where f.id = j.id)
             limit 100",
        says: "job {0} is in none of the tables ready, running and finished",
        remedy: "Let the job wait again. It may have run before, and runs once more. If it must not, pause its queue \
                 first (`longshore queues pause {1:shell}`), and cancel the job before you resume the queue.",
        // No lease of the job had so high a number, so no worker can still report with one.
        sql: &["
            insert into longshore.ready (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
                                         interruptions, keyed, kind, queue, flags, grp, flow, held)
            select j.id, case when l.child is null then j.run_at else {never} end, j.run_at, j.timeout_ms, 1000000,
                   j.priority, 0, j.max_attempts, 0, j.unique_key is not null, j.kind, j.queue, j.flags, j.grp, j.flow,
                   case when l.child is not null then true end
              from longshore.jobs j
              left join (select distinct child from longshore.links where met is null) l on l.child = j.id
             where j.id = {0:id}
               and not exists (select 1 from longshore.ready w where w.id = j.id)
               and not exists (select 1 from longshore.running r where r.id = j.id)
               and not exists (select 1 from longshore.finished f where f.id = j.id)"],
    },
    Fault {
        // The higher lease number is newer; of equal ones, the later state is.
        find: "
            select w.id, case when k.lease_no >= w.lease_no then 'ready' else 'running' end,
                   case when k.lease_no >= w.lease_no then 'running' else 'ready' end
              from longshore.ready w
              join longshore.running k on k.id = w.id
             union all
            select w.id, case when k.lease_no >= w.lease_no then 'ready' else 'finished' end,
                   case when k.lease_no >= w.lease_no then 'finished' else 'ready' end
              from longshore.ready w
              join longshore.finished k on k.id = w.id
             union all
            select r.id, case when k.lease_no >= r.lease_no then 'running' else 'finished' end,
                   case when k.lease_no >= r.lease_no then 'finished' else 'running' end
              from longshore.running r
              join longshore.finished k on k.id = r.id
             limit 100",
        says: "job {0} is in {1} and in {2}, not in exactly one table",
        remedy: "Delete the older row, in {1}. If a worker holds this row as its lease, it cannot report any more; if \
                 the row is an outcome, the outcome is lost.",
        sql: &["
            delete from longshore.{1} as old
             where old.id = {0:id}
               and exists (select 1 from longshore.{2} k where k.id = old.id and k.lease_no >= old.lease_no)"],
    },
    Fault {
        find: "
            select s.id, s.table_name
              from (select id, 'ready' as table_name from longshore.ready
                     union all
                    select id, 'finished' from longshore.finished) s
             where not exists (select 1 from longshore.jobs j where j.id = s.id)
             limit 100",
        says: "job {0} is in {1} but not in jobs",
        remedy: "Delete the row, and what belongs to it. Without its request, nothing can run or show the job.",
        sql: &[
            "
            delete from longshore.{1} as s
             where s.id = {0:id}
               and not exists (select 1 from longshore.jobs j where j.id = s.id)",
            delete_from!("attempts", "job"),
            delete_from!("checkpoints", "job"),
            delete_from!("steps", "job"),
            delete_from!("waits", "job"),
            delete_from!("merged_requests", "job"),
            delete_from!("links", "child"),
        ],
    },
    Fault {
        find: "
            select r.id
              from longshore.running r
             where not exists (select 1 from longshore.jobs j where j.id = r.id)
             limit 100",
        says: "job {0} is in running but not in jobs",
        remedy: "Wait until its worker has stopped: its handler may still run, and until then the statements change \
                 nothing. Then delete the row, and what belongs to it. Without its request, nothing can run or show \
                 the job.",
        sql: &[
            "
            delete from longshore.running as s
             where s.id = {0:id}
               and not exists (select 1 from longshore.jobs j where j.id = s.id)
               and not exists (select 1 from longshore.workers w where w.id = s.worker and w.dead_at is null)",
            delete_from!("attempts", "job"),
            delete_from!("checkpoints", "job"),
            delete_from!("steps", "job"),
            delete_from!("waits", "job"),
            delete_from!("merged_requests", "job"),
            delete_from!("links", "child"),
        ],
    },
    Fault {
        find: "
            select w.id
              from longshore.ready w
              join longshore.jobs j on j.id = w.id
             where w.queue <> j.queue
                or w.kind <> j.kind
                or w.priority <> j.priority
                or w.max_attempts <> j.max_attempts
                or w.grp is distinct from j.grp
                or w.keyed <> (j.unique_key is not null)
             limit 100",
        says: "waiting job {0} differs from its row in jobs in queue, kind, priority, max_attempts, group or unique key",
        remedy: "Give the job what its row in jobs has, which is what every list shows. It may then run in another \
                 queue than before.",
        sql: &["
            update longshore.ready as w
               set queue = j.queue, kind = j.kind, priority = j.priority, max_attempts = j.max_attempts, grp = j.grp,
                   keyed = j.unique_key is not null
              from longshore.jobs as j
             where j.id = w.id
               and w.id = {0:id}"],
    },
    Fault {
        // A group that may not start a job is looked at again after ten seconds or, because of
        // its rate, later.
        find: "
            select w.grp, w.queue, w.priority
              from (select queue, grp, priority, min(run_at) as run_at
                      from longshore.ready
                     where grp is not null
                     group by queue, grp, priority) w
             where not exists (
                   select 1
                     from longshore.turns t
                    where t.queue = w.queue
                      and t.grp = w.grp
                      and t.priority = w.priority
                      and (t.at <= w.run_at + {10 seconds} or t.at <= {now} + {10 seconds} or t.tat is not null))
             limit 100",
        says: "group `{0}` of queue `{1}` has waiting jobs of priority {2}, but no turn in time",
        remedy: "Add the turn, so that these jobs are claimed. Nothing is lost, and a turn too many does no harm.",
        sql: &["
            insert into longshore.turns (at, queue, grp, priority)
            select min(run_at), queue, grp, priority
              from longshore.ready
             where queue = {1:text}
               and grp = {0:text}
               and priority = {2}
             group by queue, grp, priority"],
    },
    Fault {
        find: "
            select grp, queue, count(*), max(gate)
              from longshore.running
             where grp is not null
             group by queue, grp
            having count(*) > max(gate)
               and count(*) = count(gate)   -- none was claimed without a limit
             limit 100",
        says: "group `{0}` of queue `{1}` runs {2} jobs, but its limit was never above {3}",
        remedy: "The limit holds again when enough of these jobs have ended. If they must not run together, find them \
                 with `longshore jobs list --status running --queue {1:shell} --group {0:shell}`, and cancel some.",
        sql: &[],
    },
    Fault {
        find: concat!(
            "
            select k.key, k.job
              from longshore.keys k
             where ",
            key_without_owner!(),
            "
             limit 100"
        ),
        says: "unique key `{0}` belongs to job {1}, which is not live or has another key",
        remedy: "Free the key. The next enqueue with it then creates a job.",
        sql: &[concat!(
            "
            delete from longshore.keys as k
             where k.job = {1:id}
               and ",
            key_without_owner!()
        )],
    },
    Fault {
        find: "
            select j.id, j.unique_key
              from longshore.jobs j
              left join longshore.ready w on w.id = j.id
              left join longshore.running r on r.id = j.id and not r.superseded
             where j.unique_key is not null
               and (w.id is not null or r.id is not null)
               and not exists (select 1 from longshore.keys k where k.job = j.id and k.key = j.unique_key)
             limit 100",
        says: "job {0} is live but does not own its unique key `{1}`",
        remedy: "Give the job its key. If another job owns the key now, the statement changes nothing: cancel one of \
                 the two with `longshore jobs cancel`, because both would run.",
        sql: &["
            insert into longshore.keys (key, job)
            select j.unique_key, j.id
              from longshore.jobs j
             where j.id = {0:id}
               and (exists (select 1 from longshore.ready w where w.id = j.id)
                    or exists (select 1 from longshore.running r where r.id = j.id and not r.superseded))
               and not exists (select 1 from longshore.keys k where k.key = j.unique_key or k.job = j.id)"],
    },
    Fault {
        find: concat!(
            "
            select queue, kind, outcome, sum(tallied), sum(found)
              from ",
            counted!(),
            "
             group by queue, kind, outcome
            having sum(tallied) <> sum(found)
             limit 100"
        ),
        says: "the tallies count {3} {2} jobs of kind `{1}` in queue `{0}`, but there are {4}",
        remedy: "Correct the tallies. Only the number of kept jobs changes. The statement reads all finished jobs.",
        sql: &[concat!(
            "
            insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
            select {now}, 0, sum(found) - sum(tallied), outcome, 0, queue, kind
              from ",
            counted!(),
            "
             where queue = {0:text}
               and kind = {1:text}
               and outcome = {2:text}
             group by queue, kind, outcome
            having sum(tallied) <> sum(found)"
        )],
    },
    Fault {
        find: concat!(
            "
            select o.job
              from (select job from longshore.steps
                     union
                    select job from longshore.waits) o
             where ",
            journal_without_job!(),
            "
             limit 100"
        ),
        says: "steps or waits of job {0} are left, but there is no such job",
        remedy: "Delete them. No job can use them.",
        sql: &[
            concat!("delete from longshore.steps as o where o.job = {0:id}\nand ", journal_without_job!()),
            concat!("delete from longshore.waits as o where o.job = {0:id}\nand ", journal_without_job!()),
        ],
    },
    Fault {
        find: "
            select s.job, s.event, s.lease_no
              from longshore.waits s
              join longshore.running r on r.id = s.job
             where not s.woken
               and s.lease_no >= r.lease_no
             limit 100",
        says: "job {0} waits for event `{1}` since lease {2}, but that lease is running",
        remedy: "Delete the wait. If the job still needs the event, its handler waits again.",
        sql: &["
            delete from longshore.waits as s
             where s.job = {0:id}
               and s.event = {1:text}
               and not s.woken
               and exists (select 1 from longshore.running r where r.id = s.job and s.lease_no >= r.lease_no)"],
    },
    Fault {
        find: concat!(
            "
            select s.job, e.name
              from longshore.events e, longshore.waits s
             where ",
            missed_delivery!(),
            "
             limit 100"
        ),
        says: "job {0} waits for event `{1}`, which counts as delivered",
        remedy: "Let the event be delivered again. The jobs that still wait for it then continue.",
        sql: &[concat!(
            "
            update longshore.events as e
               set fresh = true
             where e.name = {1:text}
               and exists (select 1 from longshore.waits s where ",
            missed_delivery!(),
            ")"
        )],
    },
];

pub(super) const UNREADABLE_OPTIONS: Fault = Fault {
    find: super::OPTIONS,
    says: "job {0} has options that cannot be read, and runs without them: {1}",
    remedy: "Read the column `options` of this job in jobs, and correct it. Or remove the options, which changes \
             nothing for the job: it then still runs without them.",
    sql: &["
        update longshore.jobs
           set options = null
         where id = {0:id}"],
};
