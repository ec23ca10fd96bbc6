//! Groups: the search by name.

use std::collections::BTreeSet;

use async_trait::async_trait;
use rusqlite::{Row, params};

use super::SqliteStore;
use super::queues::waiting_queues;
use super::tx::{Sql, Tx};
use crate::error::Result;
use crate::store::{FoundGroup, GroupSearch};

#[async_trait]
impl GroupSearch for SqliteStore {
    async fn find_groups(
        &self,
        text: &str,
        queues: Option<&[String]>,
        limit: u32,
    ) -> Result<Vec<FoundGroup>> {
        let (text, queues) = (text.to_owned(), queues.map(<[String]>::to_vec));
        self.engine.read(move |tx| find_groups(tx, &text, queues.as_deref(), limit)).await
    }
}

/// Looks at the groups with waiting jobs with one index probe each.
fn find_groups(tx: &Tx<'_>, text: &str, queues: Option<&[String]>, limit: u32) -> Sql<Vec<FoundGroup>> {
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
