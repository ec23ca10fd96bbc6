//! The part of the consistency check about flows: their numbers, links and held jobs match the jobs.
//! What `flow_changes` contains has not been followed yet, and counts.

use super::tx::{Sql, Tx};

/// The changes of each flow that have not been followed.
macro_rules! unfollowed {
    () => {
        "(select flow,
                 count(*) filter (where succeeded is not null) as ended,
                 count(*) filter (where job is not null and succeeded is null and not counted) as reopened,
                 count(*) filter (where succeeded is not null and failure) as failed,
                 count(*) filter (where succeeded is null and failure and not counted) as retried
            from longshore.flow_changes
           group by flow)"
    };
}

/// Each statement returns one sentence per problem. The sentences are the same as those of the
/// SQLite engine.
const CHECKS: &[&str] = &[
    "select format('job %s is in %s as a member of another flow than in jobs', s.id, s.table_name)
       from (select id, flow, 'ready' as table_name from longshore.ready
             union all
             select id, flow, 'running' from longshore.running
             union all
             select id, flow, 'finished' from longshore.finished) s
       join longshore.jobs j on j.id = s.id
      where s.flow is distinct from j.flow
      limit 100",
    "select format('job %s is a member of flow %s, which does not exist', j.id, j.flow)
       from longshore.jobs j
      where j.flow is not null
        and not exists (select 1 from longshore.flows o where o.id = j.flow)
      limit 100",
    concat!(
        "select format('flow %s counts %s open members, but there are %s', o.id,
                       o.open - coalesce(c.ended, 0) + coalesce(c.reopened, 0), m.live)
           from longshore.flows o
           left join ",
        unfollowed!(),
        " c on c.flow = o.id
          cross join lateral (
                  select count(*) as live
                    from longshore.jobs j
                   where j.flow = o.id
                     and not exists (select 1 from longshore.finished f where f.id = j.id)) m
          where o.open - coalesce(c.ended, 0) + coalesce(c.reopened, 0) <> m.live
          limit 100"
    ),
    concat!(
        "select format('flow %s counts %s failed members, but there are %s', o.id,
                       o.failed + coalesce(c.failed, 0) - coalesce(c.retried, 0), m.failed)
           from longshore.flows o
           left join ",
        unfollowed!(),
        " c on c.flow = o.id
          cross join lateral (
                  select count(*) as jobs,
                         count(*) filter (where f.outcome <> 'succeeded' and f.skipped is not true) as failed
                    from longshore.jobs j
                    left join longshore.finished f on f.id = j.id
                   where j.flow = o.id) m
          where m.jobs = o.members   -- none has been removed
            and o.failed + coalesce(c.failed, 0) - coalesce(c.retried, 0) <> m.failed
          limit 100"
    ),
    "select format('flow %s has %s, but it is %s with %s open members', o.id,
                   case when o.ended_at is null then 'not ended' else 'ended' end,
                   case when o.sealed then 'sealed' else 'not sealed' end, o.open)
       from longshore.flows o
      where (o.ended_at is not null) <> (o.sealed and o.open = 0)
        and not exists (select 1 from longshore.flow_changes c where c.flow = o.id)
      limit 100",
    "select format('the link from %s to job %s is %s, but its parent has %s', l.parent, l.child,
                   case when l.met is null then 'open' else 'closed' end,
                   case when p.ended then 'ended' else 'not ended' end)
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
    "select format('the open link from %s to job %s has no parent', l.parent, l.child)
       from longshore.links l
      where l.met is null
        and not exists (select 1 from longshore.jobs j where j.id = l.parent)
        and not exists (select 1 from longshore.flows o where o.id = l.parent)
      limit 100",
    "select format('job %s is held, but it waits for nothing', w.id)
       from longshore.ready w
      where w.held
        and not exists (select 1 from longshore.links l where l.child = w.id and l.met is null)
        and not exists (
              select 1
                from longshore.flow_changes c
                join longshore.links l on l.parent = c.job
               where l.child = w.id)
      limit 100",
    "select format('job %s was skipped, but all tasks that it needs ended as it requires', f.id)
       from longshore.finished f
      where f.skipped
        and f.last_error <> 'the flow was cancelled'
        and (select bool_and(l.met) from longshore.links l where l.child = f.id)
        and not exists (select 1 from longshore.flow_changes c where c.flow = f.flow)
        and not exists (select 1 from longshore.flows o where o.id = f.flow and o.cancelled)
      limit 100",
    "select format('job %s is held, but it is due at %s', w.id, w.run_at)
       from longshore.ready w
      where w.held
        and w.run_at < '9999-12-31 00:00:00+00'
      limit 100",
];

/// The problems of flows, one sentence each.
pub(super) async fn flow_problems(tx: &mut Tx<'_>) -> Sql<Vec<String>> {
    let mut problems = Vec::new();
    for check in CHECKS {
        let found: Vec<String> = sqlx::query_scalar(tx.sql(check)).fetch_all(&mut *tx.connection).await?;
        problems.extend(found);
    }
    Ok(problems)
}
