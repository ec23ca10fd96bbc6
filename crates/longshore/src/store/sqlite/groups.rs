//! Groups: the list that operators see, and their place in line.

use std::collections::BTreeSet;

use async_trait::async_trait;
use rusqlite::{Row, params};

use super::SqliteStore;
use super::claim_groups::rate;
use super::queues::waiting_queues;
use super::tx::{Columns, Sql, Tx, instant};
use crate::error::Result;
use crate::store::{FoundGroup, GroupRecord, Groups, PlaceInLine, next_start};

#[async_trait]
impl Groups for SqliteStore {
    async fn groups(&self, queue: &str, after: &str, limit: u32) -> Result<Vec<GroupRecord>> {
        let (queue, after) = (queue.to_owned(), after.to_owned());
        self.engine.read(move |tx| groups(tx, &queue, &after, limit)).await
    }

    async fn group(&self, queue: &str, group: &str) -> Result<Option<GroupRecord>> {
        let (queue, group) = (queue.to_owned(), group.to_owned());
        self.engine.read(move |tx| self::group(tx, &queue, &group)).await
    }

    async fn find_groups(
        &self,
        text: &str,
        queues: Option<&[String]>,
        limit: u32,
    ) -> Result<Vec<FoundGroup>> {
        let (text, queues) = (text.to_owned(), queues.map(<[String]>::to_vec));
        self.engine.read(move |tx| find_groups(tx, &text, queues.as_deref(), limit)).await
    }

    async fn place_in_line(&self, queue: &str, group: &str, priority: i16) -> Result<Option<PlaceInLine>> {
        let (queue, group) = (queue.to_owned(), group.to_owned());
        self.engine.read(move |tx| place_in_line(tx, &queue, &group, priority)).await
    }
}

/// Finds the groups with waiting jobs with one index probe each.
pub(super) fn groups(tx: &Tx<'_>, queue: &str, after: &str, limit: u32) -> Sql<Vec<GroupRecord>> {
    const WAITING: &str = "
        select grp
          from ready indexed by ready_groups
         where queue = ?1
           and grp > ?2
         order by grp
         limit 1";
    const OTHERS: &str = "
        select grp
          from running indexed by running_groups
         where queue = ?1
           and grp > ?2
        union
        select name
          from groups
         where queue = ?1
           and name > ?2
         order by 1
         limit ?3";
    let mut names: BTreeSet<String> =
        tx.rows(OTHERS, params![queue, after, limit], |row| row.get(0))?.into_iter().collect();
    let mut last = after.to_owned();
    for _ in 0..limit {
        let Some(name) = tx.row(WAITING, params![queue, last], |row| row.get::<_, String>(0))? else { break };
        names.insert(name.clone());
        last = name;
    }
    let mut groups = Vec::new();
    for name in names.into_iter().take(limit as usize) {
        groups.extend(group(tx, queue, &name)?);
    }
    Ok(groups)
}

pub(super) fn group(tx: &Tx<'_>, queue: &str, group: &str) -> Sql<Option<GroupRecord>> {
    const GROUP: &str = "
        select coalesce(g.paused, 0),
               coalesce(g.max_running, s.group_max_running),
               case when g.rate is null then s.group_rate else g.rate end,
               case when g.rate is null then s.group_rate_ms else g.rate_ms end,
               case when g.rate is null then s.group_burst else g.burst end,
               coalesce(g.weight, 1),
               (select count(*)
                  from (select 1
                          from ready indexed by ready_groups
                         where queue = ?1
                           and grp = ?2
                         limit 1001)),
               (select count(*)
                  from running indexed by running_groups
                 where queue = ?1
                   and grp = ?2),
               (select max(tat)
                  from turns indexed by turns_paced
                 where queue = ?1
                   and grp = ?2
                   and tat is not null),
               g.name is not null
          from (select 1) as one_row
          left join queues s on s.name = ?1
          left join groups g on g.queue = ?1 and g.name = ?2";
    let now = tx.now()?;
    let read = |row: &Row<'_>| {
        let rate = rate(row, 2)?;
        let (waiting, waiting_or_more) = GroupRecord::waiting(row.get::<_, u32>(6)?.into());
        let record = GroupRecord {
            queue: queue.to_owned(),
            name: group.to_owned(),
            paused: row.get(0)?,
            limit: row.get(1)?,
            rate,
            weight: row.get(5)?,
            waiting,
            waiting_or_more,
            running: row.get::<_, u32>(7)?.into(),
            next_start_at: next_start(rate, row.maybe_time(8)?, instant(now)),
        };
        Ok((record, row.get::<_, bool>(9)?))
    };
    let found = tx.row(GROUP, params![queue, group], read)?;
    Ok(found
        .filter(|(record, has_settings)| *has_settings || record.waiting + record.running > 0)
        .map(|(record, _)| record))
}

/// Looks at the groups with waiting jobs with one index probe each.
pub(super) fn find_groups(
    tx: &Tx<'_>,
    text: &str,
    queues: Option<&[String]>,
    limit: u32,
) -> Sql<Vec<FoundGroup>> {
    const FIRST: &str = "
        select queue, grp
          from ready indexed by ready_groups
         where grp is not null
         order by queue, grp
         limit 1";
    const NEXT: &str = "
        select queue, grp
          from ready indexed by ready_groups
         where grp is not null
           and (queue, grp) > (?1, ?2)
         order by queue, grp
         limit 1";
    const EXACT: &str = "
        select queue, grp
          from ready indexed by ready_groups
         where queue = ?1
           and grp = ?2
         limit 1";
    const OTHERS: &str = "
        select queue, name
          from (select queue, name
                  from groups
                 limit ?1)
        union
        select queue, grp
          from (select queue, grp
                  from running indexed by running_groups
                 where grp is not null
                 limit ?1)";
    const PAUSED: &str = "
        select paused
          from groups
         where queue = ?1
           and name = ?2";
    let name = |row: &Row<'_>| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?));
    let mut names: BTreeSet<(String, String)> =
        tx.rows(OTHERS, [FoundGroup::MAX_OTHERS], name)?.into_iter().collect();
    let mut last = tx.row(FIRST, [], name)?;
    for _ in 0..FoundGroup::MAX_WAITING {
        let Some(found) = last.take() else { break };
        last = tx.row(NEXT, params![found.0, found.1], name)?;
        names.insert(found);
    }
    if last.is_some() {
        for queue in waiting_queues(tx)? {
            names.extend(tx.row(EXACT, params![queue, text], name)?);
        }
    }
    let lower = text.to_ascii_lowercase();
    let mut matching: Vec<(String, String)> = names
        .into_iter()
        .filter(|(queue, name)| {
            name.to_ascii_lowercase().contains(&lower) && queues.is_none_or(|queues| queues.contains(queue))
        })
        .collect();
    matching.sort_by_cached_key(|(queue, name)| {
        (name != text, name.chars().count(), name.clone(), queue.clone())
    });
    let mut found = Vec::new();
    for (queue, name) in matching.into_iter().take(limit as usize) {
        let paused = tx.row(PAUSED, params![queue, name], |row| row.get(0))?.unwrap_or(false);
        found.push(FoundGroup { queue, name, paused });
    }
    Ok(found)
}

pub(super) fn place_in_line(
    tx: &Tx<'_>,
    queue: &str,
    group: &str,
    priority: i16,
) -> Sql<Option<PlaceInLine>> {
    const LINE: &str = "
        select grp
          from turns indexed by turns_line
         where queue = ?1
           and priority = ?2
           and at <= ?3
         order by at, id
         limit 1000";
    let line: Vec<String> = tx.rows(LINE, params![queue, priority, tx.now()?], |row| row.get(0))?;
    let mut folded: Vec<String> = Vec::new();
    for name in line {
        if !folded.contains(&name) {
            folded.push(name);
        }
    }
    let place = folded.iter().position(|name| name == group);
    Ok(place.map(|place| PlaceInLine { place: place as u32 + 1, groups: folded.len() as u32 }))
}
