//! Groups: the search by name.

use async_trait::async_trait;

use super::PostgresStore;
use crate::error::Result;
use crate::store::queues::find_waiting_queues;
use crate::store::{FoundGroup, GroupSearch};

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

#[async_trait]
impl GroupSearch for PostgresStore {
    async fn find_groups(
        &self,
        text: &str,
        queues: Option<&[String]>,
        limit: u32,
    ) -> Result<Vec<FoundGroup>> {
        self.run_read(
            (text.to_owned(), queues.map(<[String]>::to_vec), limit),
            |tx, (text, queues, limit)| {
                Box::pin(async move {
                    let rows: Vec<(String, String, bool)> = sqlx::query_as(tx.sql(FIND_GROUPS))
                        .bind(text)
                        .bind(queues)
                        .bind(i64::from(*limit))
                        .bind(FoundGroup::MAX_WAITING as i32)
                        .bind(i64::from(FoundGroup::MAX_OTHERS))
                        .fetch_all(&mut *tx.connection)
                        .await?;
                    Ok(rows
                        .into_iter()
                        .map(|(queue, name, paused)| FoundGroup { queue, name, paused })
                        .collect())
                })
            },
        )
        .await
    }
}
