//! The part of the consistency check about flows: their numbers, links and held jobs match the jobs.
//! What `flow_changes` contains has not been followed yet, and counts.

use rusqlite::Row;
use uuid::Uuid;

use super::tx::{Columns, Sql, Tx, instant};

/// The changes of each flow that have not been followed.
macro_rules! unfollowed {
    () => {
        "(select flow,
                 count(*) filter (where succeeded is not null) as ended,
                 count(*) filter (where job is not null and succeeded is null and not counted) as reopened,
                 count(*) filter (where succeeded is not null and failure) as failed,
                 count(*) filter (where succeeded is null and failure and not counted) as retried
            from flow_changes
           group by flow)"
    };
}

type Sentence = fn(&Row<'_>) -> rusqlite::Result<String>;

/// Each statement returns the values of one sentence per problem. The sentences are the same as
/// those of the Postgres engine.
const CHECKS: &[(&str, Sentence)] = &[
    (
        "select s.id,
                s.table_name
           from (select id, flow, 'ready' as table_name from ready
                 union all
                 select id, flow, 'running' from running
                 union all
                 select id, flow, 'finished' from finished) s
           join jobs j on j.id = s.id
          where s.flow is not j.flow
          limit 100",
        |row| {
            let (id, table) = (row.job(0)?, row.get::<_, String>(1)?);
            Ok(format!("job {id} is in {table} as a member of another flow than in jobs"))
        },
    ),
    (
        "select j.id,
                j.flow
           from jobs j
          where j.flow is not null
            and not exists (select 1 from flows o where o.id = j.flow)
          limit 100",
        |row| Ok(format!("job {} is a member of flow {}, which does not exist", row.job(0)?, row.uuid(1)?)),
    ),
    (
        concat!(
            "select o.id,
                    o.open - coalesce(c.ended, 0) + coalesce(c.reopened, 0) as counted,
                    (select count(*)
                       from jobs j
                      where j.flow = o.id
                        and not exists (select 1 from finished f where f.id = j.id)) as live
               from flows o
               left join ",
            unfollowed!(),
            " c on c.flow = o.id
              where counted <> live
              limit 100"
        ),
        |row| {
            let (id, counted, live): (Uuid, i64, i64) = (row.uuid(0)?, row.get(1)?, row.get(2)?);
            Ok(format!("flow {id} counts {counted} open members, but there are {live}"))
        },
    ),
    (
        concat!(
            "select o.id,
                    o.failed + coalesce(c.failed, 0) - coalesce(c.retried, 0) as counted,
                    (select count(*)
                       from jobs j
                       join finished f on f.id = j.id
                      where j.flow = o.id
                        and f.outcome <> 'succeeded'
                        and f.skipped is null) as found
               from flows o
               left join ",
            unfollowed!(),
            " c on c.flow = o.id
              where o.members = (select count(*) from jobs j where j.flow = o.id)   -- none has been removed
                and counted <> found
              limit 100"
        ),
        |row| {
            let (id, counted, found): (Uuid, i64, i64) = (row.uuid(0)?, row.get(1)?, row.get(2)?);
            Ok(format!("flow {id} counts {counted} failed members, but there are {found}"))
        },
    ),
    (
        "select o.id,
                case when o.ended_at is null then 'not ended' else 'ended' end,
                case when o.sealed then 'sealed' else 'not sealed' end,
                o.open
           from flows o
          where (o.ended_at is not null) <> (o.sealed and o.open = 0)
            and not exists (select 1 from flow_changes c where c.flow = o.id)
          limit 100",
        |row| {
            let (id, ended, sealed): (Uuid, String, String) = (row.uuid(0)?, row.get(1)?, row.get(2)?);
            let open: i64 = row.get(3)?;
            Ok(format!("flow {id} has {ended}, but it is {sealed} with {open} open members"))
        },
    ),
    (
        "select l.parent,
                l.child,
                case when l.met is null then 'open' else 'closed' end,
                case when p.ended then 'ended' else 'not ended' end
           from links l
           join (select j.id, exists (select 1 from finished f where f.id = j.id) as ended
                   from jobs j
                 union all
                 select o.id, o.ended_at is not null
                   from flows o
                  where not exists (select 1 from jobs j where j.id = o.id)) p on p.id = l.parent
          where (l.met is null) = p.ended
            and not exists (select 1 from flow_changes c where c.job = l.parent)
          limit 100",
        |row| {
            let (parent, child): (Uuid, Uuid) = (row.uuid(0)?, row.uuid(1)?);
            let (open, ended): (String, String) = (row.get(2)?, row.get(3)?);
            Ok(format!("the link from {parent} to job {child} is {open}, but its parent has {ended}"))
        },
    ),
    (
        "select l.parent,
                l.child
           from links l
          where l.met is null
            and not exists (select 1 from jobs j where j.id = l.parent)
            and not exists (select 1 from flows o where o.id = l.parent)
          limit 100",
        |row| Ok(format!("the open link from {} to job {} has no parent", row.uuid(0)?, row.uuid(1)?)),
    ),
    (
        "select w.id
           from ready w
          where w.held
            and not exists (select 1 from links l where l.child = w.id and l.met is null)
            and not exists (
                select 1
                  from flow_changes c
                  join links l on l.parent = c.job
                 where l.child = w.id)
          limit 100",
        |row| Ok(format!("job {} is held, but it waits for nothing", row.job(0)?)),
    ),
    (
        "select f.id
           from finished f
          where f.skipped
            and f.last_error <> 'the flow was cancelled'
            and (select min(l.met is true) from links l where l.child = f.id) = 1
            and not exists (select 1 from flow_changes c where c.flow = f.flow)
            and not exists (select 1 from flows o where o.id = f.flow and o.cancelled)
          limit 100",
        |row| {
            Ok(format!("job {} was skipped, but all tasks that it needs ended as it requires", row.job(0)?))
        },
    ),
    (
        "select w.id,
                w.run_at
           from ready w
          where w.held
            and w.run_at < 253402214400000000   -- the last day of the year 9999
          limit 100",
        |row| Ok(format!("job {} is held, but it is due at {}", row.job(0)?, instant(row.get(1)?))),
    ),
];

/// The problems of flows, one sentence each.
pub(super) fn flow_problems(tx: &Tx<'_>) -> Sql<Vec<String>> {
    let mut problems = Vec::new();
    for (statement, sentence) in CHECKS {
        problems.extend(tx.rows(statement, [], sentence)?);
    }
    Ok(problems)
}
