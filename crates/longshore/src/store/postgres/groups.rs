//! Groups: the list that operators see, and their place in line.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::PostgresStore;
use super::claim_groups::rate;
use super::queues::find_waiting_queues;
use super::tx::{Sql, Tx};
use crate::error::Result;
use crate::store::{FoundGroup, GroupRecord, Groups, PlaceInLine, next_start};

#[async_trait]
impl Groups for PostgresStore {
    async fn groups(&self, queue: &str, after: &str, limit: u32) -> Result<Vec<GroupRecord>> {
        self.run_read((queue.to_owned(), after.to_owned(), limit), |tx, (queue, after, limit)| {
            Box::pin(groups(tx, queue, after, *limit))
        })
        .await
    }

    async fn group(&self, queue: &str, group: &str) -> Result<Option<GroupRecord>> {
        self.run_read((queue.to_owned(), group.to_owned()), |tx, (queue, group)| {
            Box::pin(self::group(tx, queue, group))
        })
        .await
    }

    async fn find_groups(
        &self,
        text: &str,
        queues: Option<&[String]>,
        limit: u32,
    ) -> Result<Vec<FoundGroup>> {
        self.run_read(
            (text.to_owned(), queues.map(<[String]>::to_vec), limit),
            |tx, (text, queues, limit)| Box::pin(find_groups(tx, text, queues.as_deref(), *limit)),
        )
        .await
    }

    async fn place_in_line(&self, queue: &str, group: &str, priority: i16) -> Result<Option<PlaceInLine>> {
        self.run_read((queue.to_owned(), group.to_owned(), priority), |tx, (queue, group, priority)| {
            Box::pin(place_in_line(tx, queue, group, *priority))
        })
        .await
    }
}

/// The columns of a [`GroupRecord`]; `page` has the names of the groups.
macro_rules! group_columns {
    () => {
        "
    select p.grp, coalesce(g.paused, false), coalesce(g.max_running, s.group_max_running),
           case when g.rate is null then s.group_rate else g.rate end,
           case when g.rate is null then s.group_rate_ms else g.rate_ms end,
           case when g.rate is null then s.group_burst else g.burst end,
           coalesce(g.weight, 1), (
             select count(*)
               from (select 1
                       from longshore.ready r
                      where r.queue = $1
                        and r.grp = p.grp
                        and r.grp is not null
                      limit 1001) as bounded), (
             select count(*)
               from longshore.running r
              where r.queue = $1
                and r.grp = p.grp), (
             select max(t.tat)
               from longshore.turns t
              where t.queue = $1
                and t.grp = p.grp
                and t.tat is not null), longshore.clock(), g.name is not null
      from page p
      left join longshore.queues s on s.name = $1
      left join longshore.groups g on g.queue = $1 and g.name = p.grp
     order by p.grp"
    };
}

/// Finds the groups with waiting jobs with one index probe each.
const GROUPS: &str = concat!(
    "
    with recursive waiting as (
      select $2::text as grp, 0 as n
      union all
      select (
               select r.grp
                 from longshore.ready r
                where r.queue = $1
                  and r.grp > w.grp
                order by r.grp
                limit 1), w.n + 1
        from waiting w
       where w.grp is not null
         and w.n < $3),
    page as (
      select grp
        from (select grp from waiting where n > 0 and grp is not null
              union
              select r.grp from longshore.running r where r.queue = $1 and r.grp > $2
              union
              select g.name from longshore.groups g where g.queue = $1 and g.name > $2) as named
       order by grp
       limit $3)",
    group_columns!(),
);

pub(super) async fn groups(tx: &mut Tx<'_>, queue: &str, after: &str, limit: u32) -> Sql<Vec<GroupRecord>> {
    let rows = sqlx::query(tx.sql(GROUPS))
        .bind(queue)
        .bind(after)
        .bind(i32::try_from(limit).unwrap_or(i32::MAX))
        .fetch_all(&mut *tx.connection)
        .await?;
    rows.iter().map(|row| read_group(queue, row)).collect()
}

const GROUP: &str = concat!("with page as (select $2::text as grp)", group_columns!());

pub(super) async fn group(tx: &mut Tx<'_>, queue: &str, group: &str) -> Sql<Option<GroupRecord>> {
    let row = sqlx::query(tx.sql(GROUP)).bind(queue).bind(group).fetch_one(&mut *tx.connection).await?;
    let (record, has_settings) = (read_group(queue, &row)?, row.try_get::<bool, _>(11)?);
    Ok(Some(record).filter(|record| has_settings || record.waiting + record.running > 0))
}

fn read_group(queue: &str, row: &PgRow) -> Sql<GroupRecord> {
    let rate = rate(row.try_get(3)?, row.try_get(4)?, row.try_get(5)?);
    let (waiting, waiting_or_more) = GroupRecord::waiting(row.try_get::<i64, _>(7)? as u64);
    let (paced_until, now): (Option<DateTime<Utc>>, DateTime<Utc>) = (row.try_get(9)?, row.try_get(10)?);
    Ok(GroupRecord {
        queue: queue.to_owned(),
        name: row.try_get(0)?,
        paused: row.try_get(1)?,
        limit: row.try_get::<Option<i32>, _>(2)?.map(|limit| limit as u32),
        rate,
        weight: row.try_get::<i32, _>(6)? as u32,
        waiting,
        waiting_or_more,
        running: row.try_get::<i64, _>(8)? as u64,
        next_start_at: next_start(rate, paced_until, now),
    })
}

/// Looks at the groups with waiting jobs with one index probe each. Orders by bytes, as SQLite does.
const FIND_GROUPS: &str = concat!(
    "
    with recursive ",
    find_waiting_queues!(),
    ",
    waiting as (
      (select r.queue, r.grp, 1 as n
         from longshore.ready r
        where r.grp is not null
        order by r.queue, r.grp
        limit 1)
      union all
      select next.queue, next.grp, w.n + 1
        from waiting w
       cross join lateral (
               select r.queue, r.grp
                 from longshore.ready r
                where r.grp is not null
                  and (r.queue, r.grp) > (w.queue, w.grp)
                order by r.queue, r.grp
                limit 1) as next
       where w.n < $4),
    named as (
      select queue, grp from waiting
      union
      select q.queue, $1
        from waiting_queues q
       where exists (select 1 from longshore.ready r where r.queue = q.queue and r.grp = $1)
      union
      select queue, grp
        from (select r.queue, r.grp from longshore.running r where r.grp is not null limit $5) as some_running
      union
      select queue, name
        from (select g.queue, g.name from longshore.groups g limit $5) as with_settings)
    select n.queue, n.grp, coalesce(g.paused, false)
      from named n
      left join longshore.groups g on g.queue = n.queue and g.name = n.grp
     where position(lower($1 collate \"C\") in lower(n.grp collate \"C\")) > 0
       and ($2::text[] is null or n.queue = any($2))
     order by n.grp <> $1, length(n.grp), n.grp collate \"C\", n.queue collate \"C\"
     limit $3"
);

pub(super) async fn find_groups(
    tx: &mut Tx<'_>,
    text: &str,
    queues: Option<&[String]>,
    limit: u32,
) -> Sql<Vec<FoundGroup>> {
    let rows: Vec<(String, String, bool)> = sqlx::query_as(tx.sql(FIND_GROUPS))
        .bind(text)
        .bind(queues)
        .bind(i64::from(limit))
        .bind(FoundGroup::MAX_WAITING as i32)
        .bind(i64::from(FoundGroup::MAX_OTHERS))
        .fetch_all(&mut *tx.connection)
        .await?;
    Ok(rows.into_iter().map(|(queue, name, paused)| FoundGroup { queue, name, paused }).collect())
}

const PLACE: &str = "
    with line as (
      select t.grp, t.at, t.id
        from longshore.turns t
       where t.queue = $1
         and t.priority = $3
         and t.at <= longshore.clock()
       order by t.at, t.id
       limit 1000),
    folded as (
      select grp, row_number() over (order by min(at), min(id)) as place
        from line
       group by grp)
    select place, (select count(*) from folded)
      from folded
     where grp = $2";

pub(super) async fn place_in_line(
    tx: &mut Tx<'_>,
    queue: &str,
    group: &str,
    priority: i16,
) -> Sql<Option<PlaceInLine>> {
    let found: Option<(i64, i64)> = sqlx::query_as(tx.sql(PLACE))
        .bind(queue)
        .bind(group)
        .bind(priority)
        .fetch_optional(&mut *tx.connection)
        .await?;
    Ok(found.map(|(place, groups)| PlaceInLine { place: place as u32, groups: groups as u32 }))
}
