//! The faults of flows: counts, links and held jobs that do not match the jobs. Changes that have not been
//! followed yet, in `flow_changes`, are taken into account.

use super::Fault;

/// The changes of each flow that have not been followed.
macro_rules! unfollowed {
    () => {
        "(select flow,
                 count(*) filter (where succeeded is not null) as ended,
                 count(*) filter (where job is not null and succeeded is null and not counted) as reopened,
                 count(*) filter (where succeeded is not null and failure) as failed,
                 count(*) filter (where succeeded is null and failure and not counted) as retried
            from longshore.flow_changes
           group by flow) c"
    };
}

/// The members of the flow `o` that have not ended.
macro_rules! live {
    () => {
        "(select count(*)
            from longshore.jobs j
           where j.flow = o.id
             and not exists (select 1 from longshore.finished f where f.id = j.id))"
    };
}

/// The members of the flow `o` that count as failures.
macro_rules! failures {
    () => {
        "(select count(*)
            from longshore.jobs j
            join longshore.finished f on f.id = j.id
           where j.flow = o.id
             and f.outcome <> 'succeeded'
             and f.skipped is not true)"
    };
}

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        find: "
            select s.id, s.table_name
              from (select id, flow, 'ready' as table_name from longshore.ready
                     union all
                    select id, flow, 'running' from longshore.running
                     union all
                    select id, flow, 'finished' from longshore.finished) s
              join longshore.jobs j on j.id = s.id
             where s.flow is distinct from j.flow
             limit 100",
        says: "job {0} is in {1} as a member of another flow than in jobs",
        remedy: "Take the flow of its row in jobs, which is what every list shows.",
        sql: &["
            update longshore.{1} as s
               set flow = j.flow
              from longshore.jobs as j
             where j.id = s.id
               and s.id = {0:id}"],
    },
    Fault {
        find: "
            select j.id, j.flow
              from longshore.jobs j
             where j.flow is not null
               and not exists (select 1 from longshore.flows o where o.id = j.flow)
             limit 100",
        says: "job {0} is a member of flow {1}, which does not exist",
        remedy: "Store the flow again, sealed, with the numbers of its jobs. Its name, key and deadline are lost.",
        // Deletes the changes that were not followed: the new counts include them.
        sql: &[
            "
            delete from longshore.flow_changes
             where flow = {1:id}
               and not exists (select 1 from longshore.flows o where o.id = {1:id})",
            "
            insert into longshore.flows (id, created_at, members, open, failed, sealed, owned, name)
            select j.flow, min(j.created_at), count(*), count(*) - count(f.id),
                   count(*) filter (where f.outcome <> 'succeeded' and f.skipped is not true), true,
                   exists (select 1 from longshore.jobs p where p.id = {1:id}), 'restored'
              from longshore.jobs j
              left join longshore.finished f on f.id = j.id
             where j.flow = {1:id}
               and not exists (select 1 from longshore.flows o where o.id = {1:id})
             group by j.flow",
            "insert into longshore.flow_changes (flow) values ({1:id})",
        ],
    },
    Fault {
        find: concat!(
            "
            select n.id, n.counted, n.live
              from (select o.id, o.open - coalesce(c.ended, 0) + coalesce(c.reopened, 0) as counted, ",
            live!(),
            " as live
                      from longshore.flows o
                      left join ",
            unfollowed!(),
            " on c.flow = o.id) n
             where n.counted <> n.live
             limit 100"
        ),
        says: "flow {0} counts {1} open members, but there are {2}",
        remedy: "Count the open members again. The statement reads the jobs of the flow.",
        sql: &[
            concat!(
                "
            update longshore.flows as changed
               set open = changed.open + d.missing
              from (select o.id, ",
                live!(),
                " - o.open + coalesce(c.ended, 0) - coalesce(c.reopened, 0) as missing
                      from longshore.flows o
                      left join ",
                unfollowed!(),
                " on c.flow = o.id
                     where o.id = {0:id}) d
             where changed.id = d.id"
            ),
            "insert into longshore.flow_changes (flow) values ({0:id})",
        ],
    },
    Fault {
        // Only while no member has been removed.
        find: concat!(
            "
            select n.id, n.counted, n.failed
              from (select o.id, o.failed + coalesce(c.failed, 0) - coalesce(c.retried, 0) as counted, ",
            failures!(),
            " as failed
                      from longshore.flows o
                      left join ",
            unfollowed!(),
            " on c.flow = o.id
                     where o.members = (select count(*) from longshore.jobs j where j.flow = o.id)) n
             where n.counted <> n.failed
             limit 100"
        ),
        says: "flow {0} counts {1} failed members, but there are {2}",
        remedy: "Count the failed members again. The statement reads the jobs of the flow. If the flow has ended, \
                 jobs that started because of its end are not affected.",
        sql: &[concat!(
            "
            update longshore.flows as changed
               set failed = changed.failed + d.missing
              from (select o.id, ",
            failures!(),
            " - o.failed - coalesce(c.failed, 0) + coalesce(c.retried, 0) as missing
                      from longshore.flows o
                      left join ",
            unfollowed!(),
            " on c.flow = o.id
                     where o.id = {0:id}) d
             where changed.id = d.id"
        )],
    },
    Fault {
        find: "
            select o.id,
                   case when o.ended_at is null then 'not ended' else 'ended' end,
                   case when o.sealed then 'sealed' else 'not sealed' end,
                   o.open
              from longshore.flows o
             where (o.ended_at is not null) <> (o.sealed and o.open = 0)
               and not exists (select 1 from longshore.flow_changes c where c.flow = o.id)
             limit 100",
        says: "flow {0} has {1}, but it is {2} with {3} open members",
        remedy: "Let a worker or a server look at the flow: it ends the flow or opens it again. Callbacks of its end \
                 may start.",
        sql: &["insert into longshore.flow_changes (flow) values ({0:id})"],
    },
    Fault {
        find: "
            select l.parent, l.child,
                   case when l.met is null then 'open' else 'closed' end,
                   case when p.ended then 'ended' else 'not ended' end
              from longshore.links l
              join (select j.id, exists (select 1 from longshore.finished f where f.id = j.id) as ended
                      from longshore.jobs j
                     union all
                    select o.id, o.ended_at is not null
                      from longshore.flows o
                     where not exists (select 1 from longshore.jobs j where j.id = o.id)) p on p.id = l.parent
             where (l.met is null) = p.ended
               and not exists (select 1 from longshore.flow_changes c where c.job = l.parent)
             limit 100",
        says: "the link from {0} to job {1} is {2}, but its parent has {3}",
        remedy: "Set the link by the end of its parent. If the job has started already, it is not affected.",
        sql: &["
            update longshore.links as l
               set met = (
                   select case l.condition when 'ended' then true when 'succeeded' then p.succeeded
                               else not p.succeeded end
                     from (select f.id, f.outcome = 'succeeded' as succeeded
                             from longshore.finished f
                            union all
                           select o.id, o.failed = 0 and not o.cancelled
                             from longshore.flows o
                            where o.ended_at is not null
                              and not exists (select 1 from longshore.jobs j where j.id = o.id)) p
                    where p.id = l.parent)
             where l.parent = {0:id}
               and l.child = {1:id}
               and not exists (select 1 from longshore.flow_changes c where c.job = l.parent)"],
    },
    Fault {
        find: "
            select l.parent, l.child
              from longshore.links l
             where l.met is null
               and not exists (select 1 from longshore.jobs j where j.id = l.parent)
               and not exists (select 1 from longshore.flows o where o.id = l.parent)
             limit 100",
        says: "the open link from {0} to job {1} has no parent",
        remedy: "Delete the link. The job then does not wait for this parent any more.",
        sql: &["
            delete from longshore.links as l
             where l.parent = {0:id}
               and l.child = {1:id}
               and l.met is null
               and not exists (select 1 from longshore.jobs j where j.id = l.parent)
               and not exists (select 1 from longshore.flows o where o.id = l.parent)"],
    },
    Fault {
        find: "
            select w.id
              from longshore.ready w
             where w.held
               and not exists (select 1 from longshore.links l where l.child = w.id and l.met is null)
               and not exists (
                   select 1
                     from longshore.flow_changes c
                     join longshore.links l on l.parent = c.job
                    where l.child = w.id)
             limit 100",
        says: "job {0} is held, but it waits for nothing",
        remedy: "Let the job run at the time that it was enqueued for. If a task that it needs did not end as \
                 required, the statement changes nothing: cancel the job with `longshore jobs cancel {0}`.",
        sql: &["
            update longshore.ready as w
               set held = null, run_at = j.run_at
              from longshore.jobs as j
             where j.id = w.id
               and w.id = {0:id}
               and w.held
               and not exists (select 1 from longshore.links l where l.child = w.id and l.met is not true)"],
    },
    Fault {
        find: "
            select f.id
              from longshore.finished f
             where f.skipped
               and f.last_error <> 'the flow was cancelled'
               and exists (select 1 from longshore.links l where l.child = f.id)
               and not exists (select 1 from longshore.links l where l.child = f.id and l.met is not true)
               and not exists (select 1 from longshore.flow_changes c where c.flow = f.flow)
               and not exists (select 1 from longshore.flows o where o.id = f.flow and o.cancelled)
             limit 100",
        says: "job {0} was skipped, but all tasks that it needs ended as it requires",
        remedy: "If it should run, retry it with `longshore jobs retry {0}`; the tasks that were skipped because of \
                 it then wait for it again. If not, remove it with `longshore jobs delete {0}`.",
        sql: &[],
    },
    Fault {
        find: "
            select w.id
              from longshore.ready w
             where w.held
               and w.run_at < {never}
             limit 100",
        says: "job {0} is held, but it has a due time",
        remedy: "Remove the due time. The job starts when the tasks that it needs have ended.",
        sql: &["
            update longshore.ready
               set run_at = {never}
             where id = {0:id}
               and held"],
    },
];
