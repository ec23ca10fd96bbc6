//! Pages of jobs: walking the tables, and reading the jobs of a page.

use async_trait::async_trait;
use rusqlite::types::Value;
use rusqlite::{CachedStatement, Row, params};

use super::db::Rows;
use super::settle::newest_error;
use super::tx::{Columns, Sql, Tx};
use crate::job::{JobId, JobRecord, Status};
use crate::rules::enqueue::Options;
use crate::store::db;
use crate::store::inspect::record::job;
use crate::store::inspect::{ListFilter, Live, PageBuilder, Pages, Payloads, Step, Walk, Walked};

#[async_trait]
impl Pages for Rows<'_> {
    async fn live_jobs(&mut self, filter: &ListFilter, live: Live) -> db::Sql<Option<Vec<JobId>>> {
        Ok(live_jobs(&self.tx()?, filter, live)?)
    }

    async fn walk(&mut self, filter: &ListFilter, walk: Walk, step: Step) -> db::Sql<Walked> {
        Ok(walk_step(&self.tx()?, filter, walk, step)?)
    }

    async fn page(&mut self, ids: &[JobId], payloads: Payloads) -> db::Sql<(Vec<JobRecord>, Option<JobId>)> {
        let mut page = PageBuilder::default();
        for id in ids {
            if let Some(job) = job(self, *id, payloads).await?
                && !page.add(job)
            {
                let end = page.last();
                return Ok((page.jobs(), end));
            }
        }
        Ok((page.jobs(), None))
    }
}

/// The live jobs that match; `None` if there are too many to sort them.
fn live_jobs(tx: &Tx<'_>, filter: &ListFilter, live: Live) -> Sql<Option<Vec<JobId>>> {
    const WAITING: &str = "
        select id,
               kind,
               attempt = 0 and interruptions = 0 as is_fresh
          from (select id, kind, attempt, interruptions
                  from ready indexed by ready_claim
                 where queue = ?1
                   and interruptions = 0
                   and grp is null
                union all
                select id, kind, attempt, interruptions
                  from ready indexed by ready_suspects
                 where queue = ?1
                   and interruptions > 0
                   and grp is null
                union all
                select id, kind, attempt, interruptions
                  from ready indexed by ready_groups
                 where queue = ?1
                   and grp is not null)
         limit ?2";
    const RUNNING: &str = "
        select id,
               kind,
               0 as is_fresh
          from running
         where ?1 is null
            or queue = ?1
         limit ?2";
    let parts: &[&str] = match live {
        Live::Waiting => &[WAITING],
        Live::Running => &[RUNNING],
        Live::WaitingAndRunning => &[WAITING, RUNNING],
    };
    let (before, from) = filter.id_bounds();
    let (mut ids, mut count) = (Vec::new(), 0);
    for part in parts {
        let mut statement = tx.prepare(part)?;
        let at = Positions::of(&statement);
        let mut rows = statement.query(params![filter.queue, ListFilter::MAX_SORTED + 1])?;
        while let Some(row) = rows.next()? {
            count += 1;
            let id = row.job(at.id)?;
            let is_fresh: bool = row.get(at.is_fresh)?;
            let is_match = before.is_none_or(|before| id.0 < before)
                && from.is_none_or(|from| id.0 >= from)
                && filter.status().is_none_or(|status| (status == Status::Queued) == is_fresh)
                && has_text(row, at.kind, &filter.kind)?;
            if is_match {
                ids.push(id);
            }
        }
    }
    Ok((count <= ListFilter::MAX_SORTED).then_some(ids))
}

fn walk_step(tx: &Tx<'_>, filter: &ListFilter, walk: Walk, step: Step) -> Sql<Walked> {
    let (text, value) = walk_statement(filter, walk);
    // Without an upper bound, 17 bytes of 0xff: greater than every id, which has 16 bytes.
    let before = step.before.map_or(vec![0xff; 17], |id| id.as_bytes().to_vec());
    let mut statement = tx.prepare(text)?;
    let at = Positions::of(&statement);
    let mut conditions = Conditions::new(tx, filter, walk)?;
    let mut rows = statement.query(params![before, value])?;
    let (mut walked, mut examined) = (Walked::default(), 0);
    while let Some(row) = rows.next()? {
        let id = row.job(at.id)?;
        examined += 1;
        if conditions.select(id, row, &at)? {
            walked.ids.push(id);
        }
        if examined == step.rows || walked.ids.len() == step.wanted as usize {
            walked.reached = Some(id);
            break;
        }
    }
    Ok(walked)
}

/// The statement that returns the ids of a table, and what the filter needs of its other
/// columns.
fn walk_statement(filter: &ListFilter, walk: Walk) -> (&'static str, Value) {
    const JOBS: &str = "
        select id
          from jobs
         where id < ?1
           and ?2 is null
         order by id desc";
    const JOBS_WITH_REQUEST: &str = "
        select id,
               queue,
               kind,
               grp,
               options
          from jobs
         where id < ?1
           and ?2 is null
         order by id desc";
    const WAITING: &str = "
        select id,
               queue,
               kind,
               grp,
               attempt = 0 and interruptions = 0 as is_fresh
          from ready
         where id < ?1
           and ?2 is null
         order by id desc";
    const RUNNING: &str = "
        select id,
               queue,
               kind,
               grp
          from running
         where id < ?1
           and ?2 is null
         order by id desc";
    const FINISHED: &str = "
        select id,
               outcome,
               finished_at,
               last_error
          from finished
         where id < ?1
           and ?2 is null
         order by id desc";
    const UNSUCCESSFUL: &str = "
        select id,
               outcome,
               finished_at,
               last_error
          from finished indexed by finished_unsuccessful
         where id < ?1
           and outcome = ?2
           and outcome <> 'succeeded'
         order by id desc";
    const FAILED: &str = "
        select id,
               outcome,
               finished_at,
               last_error
          from finished indexed by finished_error_groups
         where id < ?1
           and error_group = ?2
           and error_group is not null
         order by id desc";
    match (walk, filter.status(), filter.failure) {
        (Walk::Jobs, _, _) if filter.needs_request() => (JOBS_WITH_REQUEST, Value::Null),
        (Walk::Jobs, _, _) => (JOBS, Value::Null),
        (Walk::Waiting, _, _) => (WAITING, Value::Null),
        (Walk::Running, _, _) => (RUNNING, Value::Null),
        (Walk::Finished, _, Some(failure)) => (FAILED, failure.0.into()),
        (Walk::Finished, Some(status @ (Status::FailedPermanent | Status::Cancelled)), None) => {
            (UNSUCCESSFUL, status.as_str().to_owned().into())
        }
        (Walk::Finished, _, None) => (FINISHED, Value::Null),
    }
}

/// Tests the rows of [`walk_statement`]. Reads the request only if the table does not have what
/// the filter needs, and the attempts only for the text of an error.
struct Conditions<'a> {
    tx: &'a Tx<'a>,
    filter: &'a ListFilter,
    walk: Walk,
    request: CachedStatement<'a>,
    /// Where the columns of the request are.
    at: Positions,
}

impl<'a> Conditions<'a> {
    fn new(tx: &'a Tx<'_>, filter: &'a ListFilter, walk: Walk) -> Sql<Self> {
        const REQUEST: &str = "
            select queue,
                   kind,
                   grp,
                   options
              from jobs
             where id = ?1";
        let request = tx.prepare(REQUEST)?;
        let at = Positions::of(&request);
        Ok(Conditions { tx, filter, walk, request, at })
    }

    fn select(&mut self, id: JobId, row: &Row<'_>, at: &Positions) -> Sql<bool> {
        let has_state = match (self.walk, self.filter.status()) {
            (Walk::Waiting, Some(status)) => row.get::<_, bool>(at.is_fresh)? == (status == Status::Queued),
            (Walk::Finished, status) => {
                status.is_none_or(|status| {
                    row.get_ref(at.outcome).is_ok_and(|outcome| outcome.as_str() == Ok(status.as_str()))
                }) && self.filter.has_end(Some(row.time(at.finished_at)?))
            }
            _ => true,
        };
        Ok(has_state
            && self.has_request(id, row, at)?
            && self.has_error(id, row, at)?
            && self.has_failure(id)?)
    }

    fn has_request(&mut self, id: JobId, row: &Row<'_>, at: &Positions) -> Sql<bool> {
        let filter = self.filter;
        if !filter.needs_request() {
            return Ok(true);
        }
        match self.walk {
            Walk::Jobs => Ok(is_request(filter, row, at)?),
            Walk::Waiting | Walk::Running if !has_names(filter, row, at)? => Ok(false),
            Walk::Waiting | Walk::Running if filter.tag.is_none() => Ok(true),
            _ => {
                let mut rows = self.request.query([id.0.as_bytes()])?;
                Ok(rows.next()?.map(|row| is_request(filter, row, &self.at)).transpose()?.unwrap_or(false))
            }
        }
    }

    fn has_error(&self, id: JobId, row: &Row<'_>, at: &Positions) -> Sql<bool> {
        if self.filter.error.is_none() {
            return Ok(true);
        }
        if self.walk == Walk::Finished
            && let Some(error) = row.get_ref(at.last_error)?.as_str_or_null()?
        {
            return Ok(self.filter.has_error(Some(error)));
        }
        Ok(self.filter.has_error(newest_error(self.tx, id)?.as_deref()))
    }

    /// Whether the last failure of a job belongs to the group of the filter. A walk of `finished` reads only
    /// such jobs, from the index of the groups.
    fn has_failure(&self, id: JobId) -> Sql<bool> {
        const NEWEST: &str = "
            select error_group
              from attempts
             where job = ?1
               and error is not null
             order by lease_no desc
             limit 1";
        match self.filter.failure {
            Some(wanted) if self.walk != Walk::Finished => {
                let newest =
                    self.tx.row(NEWEST, [id.0.as_bytes()], |row| row.get::<_, Option<i64>>("error_group"))?;
                Ok(newest.flatten() == Some(wanted.0))
            }
            _ => Ok(true),
        }
    }
}

fn has_names(filter: &ListFilter, row: &Row<'_>, at: &Positions) -> rusqlite::Result<bool> {
    Ok(has_text(row, at.queue, &filter.queue)?
        && has_text(row, at.kind, &filter.kind)?
        && has_text(row, at.group, &filter.group)?)
}

fn is_request(filter: &ListFilter, row: &Row<'_>, at: &Positions) -> rusqlite::Result<bool> {
    if !has_names(filter, row, at)? {
        return Ok(false);
    }
    let Some(tag) = &filter.tag else { return Ok(true) };
    let options = Options::from_stored(row.get_ref(at.options)?.as_str_or_null()?).unwrap_or_default();
    Ok(options.tags.contains(tag))
}

/// Whether the column is equal to `wanted`. Without it, every row matches.
fn has_text(row: &Row<'_>, column: usize, wanted: &Option<String>) -> rusqlite::Result<bool> {
    let Some(wanted) = wanted else { return Ok(true) };
    Ok(row.get_ref(column)?.as_str_or_null()? == Some(wanted))
}

/// Where the columns of a statement are, found by their names once for its many rows. A statement has only those that its
/// walk needs.
struct Positions {
    id: usize,
    queue: usize,
    kind: usize,
    group: usize,
    options: usize,
    is_fresh: usize,
    outcome: usize,
    finished_at: usize,
    last_error: usize,
}

impl Positions {
    fn of(statement: &CachedStatement<'_>) -> Self {
        // Reading a column that is not there is an error of the driver.
        let at = |name| statement.column_index(name).unwrap_or(usize::MAX);
        Positions {
            id: at("id"),
            queue: at("queue"),
            kind: at("kind"),
            group: at("grp"),
            options: at("options"),
            is_fresh: at("is_fresh"),
            outcome: at("outcome"),
            finished_at: at("finished_at"),
            last_error: at("last_error"),
        }
    }
}
