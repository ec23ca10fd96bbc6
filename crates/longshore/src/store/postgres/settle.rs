//! Settle: stores how attempts end, in batches, each under its own lease. Recovery (in
//! `recover.rs`) ends other workers' leases with the same statements.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};

use async_trait::async_trait;
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::PostgresStore;
use super::enqueue::{insert_any, split};
use super::flow_changes::note_ends;
use super::run::{Mode, QUICK, Work, within};
use super::steps::save_waits;
use super::tables::{insert_finished, insert_ready};
use super::turns::{add_turns, add_turns_of_freed};
use super::tx::{Fault, Query, Sql, Tx};
use crate::error::Result;
use crate::job::{AttemptEnd, Outcome, WorkerId};
use crate::rules::lifecycle::{Finish, LeaseFlags, Leave, Requeue};
use crate::store::{EndedBy, Settled, Settlement, Settling, clean};

/// The items of a settle statement (as `i`), each with the `ctid` of its lease. Each
/// lease is found by its primary key, one lookup per item whatever the planner assumes
/// about the table, and the row is then deleted by its `ctid`. The id, lease number and
/// worker of a row never change. Only its flags may change, so they are tested on the
/// row that is deleted.
///
/// The settle statements wait only 2 s for a locked row: a user's transaction that
/// asserts a lease, or takes its unique key, must not delay other leases. The setting
/// ends with the statement.
macro_rules! held_leases {
    ($columns:literal, $names:literal) => {
        concat!(
            "(select i.*, held.row_id
                from unnest((select $1::uuid[] where set_config('lock_timeout', '2s', true) <> ''),
                            (select $2::int4[]), (select $3::uuid[]), (select $4::int2[]), (select $5::int2[]), ",
            $columns, ")
                  as i(id, lease_no, worker, attempts, interruptions, ", $names, ")
               cross join lateral (
                       select h.ctid as row_id
                         from longshore.running h
                        where h.id = i.id
                          and h.lease_no = i.lease_no   -- fence: a newer lease owns the row
                          and h.worker = i.worker
                        limit 1) as held) as i"
        )
    };
}

/// Whether the flags are those that the end was decided from and, for recovery, whether
/// the holder is dead.
macro_rules! is_as_decided {
    ($cancel_seen:literal, $superseded_seen:literal, $recovers_dead:literal) => {
        concat!(
            "(",
            $cancel_seen,
            "::bool is null or r.cancel_requested = ",
            $cancel_seen,
            ")
         and (",
            $superseded_seen,
            "::bool is null or r.superseded = ",
            $superseded_seen,
            ")
         and (",
            $recovers_dead,
            "::bool is not true or not exists (
               select 1
                 from longshore.workers w
                where w.id = r.worker
                  and w.dead_at is null))"
        )
    };
}

/// The newest error of a job that was leased before.
macro_rules! earlier_error {
    () => {
        "(select a.error
                   from longshore.attempts a
                  where a.job = t.id
                    and a.error is not null
                  order by a.lease_no desc
                  limit 1)"
    };
}

/// Frees the unique keys of the jobs that finished and counts their outcome.
macro_rules! free_keys_and_tally {
    ($outcome:literal) => {
        concat!(
            "
    deleted_keys as (
      delete from longshore.keys
       where job = any(array(select t.id from taken t where t.keyed))),
    tallied as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), sum(t.n), sum(t.n), ",
            $outcome,
            "::text::longshore.outcome,
             longshore.run_bucket(t.claimed_at, longshore.clock()), t.queue, t.kind
        from (select claimed_at, queue, kind, count(*) as n   -- a batch has few distinct claim times
                from taken
               group by claimed_at, queue, kind) as t
       group by 5, 6, 7)
    select array_agg(id) as ids, array_agg(lease_no) as lease_nos from taken"
        )
    };
}

/// Writes the history of the leases that ended. A job keeps its newest 100 rows
/// ([`MAX_HISTORY`](crate::store::MAX_HISTORY)), the newest error, and the number of rows
/// that were removed. A job with at most 100 leases cannot have more rows, so nothing is
/// read for it.
macro_rules! record_attempts {
    () => {
        "
    pruned as (
      delete from longshore.attempts
       where ctid = any(array(
               select old.row_id
                 from taken t
                cross join lateral (
                        select a.ctid as row_id, a.lease_no
                          from longshore.attempts a
                         where a.job = t.id
                         order by a.lease_no desc
                        offset 99) as old
                where t.lease_no > 100
                  and t.history is not null
                  and (t.error is not null
                    or old.lease_no is distinct from (
                         select e.lease_no
                           from longshore.attempts e
                          where e.job = t.id
                            and e.error is not null
                          order by e.lease_no desc
                          limit 1))))
      returning job),
    recorded as (
      insert into longshore.attempts
             (job, lease_no, attempt, what, worker, started_at, ended_at, error, error_group, omitted)
      select t.id, t.lease_no, t.attempt, t.history, t.worker, t.claimed_at, longshore.clock(), t.error, t.error_group,
             case when t.lease_no > 100 then
               nullif(coalesce((select max(a.omitted) from longshore.attempts a where a.job = t.id), 0)
                        + (select count(*) from pruned p where p.job = t.id), 0)
             end
        from taken t
       where t.history is not null)"
    };
}

/// Finishes attempts that differ only in their job, most often successes: the same lease
/// number, worker and outcome, and nothing to record. The fence then needs no join.
const FINISH_UNIFORM: &str = concat!(
    "
    with taken as (
      delete from longshore.running r
       where r.id = any((select $1::uuid[] where set_config('lock_timeout', '2s', true) <> '')::uuid[])
         and r.lease_no = $2   -- fence: a newer lease owns the row
         and r.worker = $3
         and ($4::bool is null or r.cancel_requested = $4)
         and ($5::bool is null or r.superseded = $5)
      returning r.id, r.worker, r.claimed_at, r.lease_no, r.priority, r.max_attempts, r.keyed, r.kind, r.queue,
                r.grp, r.gate, r.flow),
    finished_jobs as (",
    insert_finished!(
        job: "t",
        started_at: "t.claimed_at",
        finished_by: "t.worker",
        outcome: "$6::text::longshore.outcome",
        attempts: "$7::int2",
        interruptions: "$8::int2",
        last_error: concat!("case when t.lease_no > 1 then ", earlier_error!(), " end"),
        result: "null",
        skipped: "null",
        error_group: "null",
        from: "taken t",
    ),
    "),",
    add_turns_of_freed!(),
    ",",
    note_ends!("taken", "($6::text = 'succeeded')"),
    ",",
    free_keys_and_tally!("$6"),
);

/// Notes the failures of `taken`, one row per error group. Only the beginning of an error is kept.
macro_rules! note_errors {
    () => {
        "
    noted_errors as (
      insert into longshore.error_notes (fingerprint, attempts, seen_at, job, kind, error)
      select t.error_group, count(*), longshore.clock(), (array_agg(t.id order by t.id desc))[1], min(t.kind),
             left((array_agg(t.error order by t.id desc))[1], 2000)
        from taken t
       where t.error_group is not null
       group by t.error_group)"
    };
}

/// Finishes attempts in general: with errors, results or history, or by recovery.
const FINISH: &str = concat!(
    "
    with taken as (
      delete from longshore.running r
       using ",
    held_leases!(
        "(select $6::text[]), (select $7::text[]), (select $8::text[]), (select $13::int8[])",
        "error, result, history, error_group"
    ),
    "
       where r.ctid = i.row_id
         and ",
    is_as_decided!("$9", "$10", "$11"),
    "
      returning r.id, r.worker, r.claimed_at, r.lease_no, r.priority, r.attempt, r.max_attempts, r.keyed, r.kind,
                r.queue, r.grp, r.gate, r.flow, i.attempts, i.interruptions, i.error, i.result, i.history, i.error_group),
    finished_jobs as (",
    insert_finished!(
        job: "t",
        started_at: "t.claimed_at",
        finished_by: "case when $11 is null then t.worker end",
        outcome: "$12::text::longshore.outcome",
        attempts: "t.attempts",
        interruptions: "t.interruptions",
        last_error: concat!(
            "case
               when t.error is not null then t.error
               when t.lease_no > 1 then ",
            earlier_error!(),
            "
             end"
        ),
        result: "t.result::json",
        skipped: "null",
        error_group: "t.error_group",
        from: "taken t",
    ),
    "),",
    add_turns_of_freed!(),
    ",",
    note_ends!("taken", "($12::text = 'succeeded')"),
    ",",
    record_attempts!(),
    ",",
    note_errors!(),
    ",",
    free_keys_and_tally!("$12"),
);

/// Ends attempts after which the job returns to the queue.
const REQUEUE: &str = concat!(
    "
    with taken as (
      delete from longshore.running r
       using ",
    held_leases!(
        "(select $6::text[]), (select $7::text[]), (select $8::timestamptz[]), (select $9::int8[]), (select $13::int8[])",
        "error, history, run_at, delay_us, error_group"
    ),
    "
       where r.ctid = i.row_id
         and ", is_as_decided!("$10", "$11", "$12"), "
      returning r.*, i.attempts, i.interruptions as new_interruptions, i.error, i.history, i.run_at, i.delay_us,
                i.error_group),
    requeued as (",
    insert_ready!(
        job: "t",
        run_at: "coalesce(t.run_at, longshore.clock() + t.delay_us * interval '1 microsecond')",
        lease_no: "t.lease_no",
        attempts: "t.attempts",
        interruptions: "t.new_interruptions",
        keyed: "t.keyed",
        held: "null",
        from: "taken t",
    ),
    "
      returning run_at, priority, queue, grp),",
    add_turns!("requeued"),
    ",",
    add_turns_of_freed!(),
    ",",
    record_attempts!(),
    ",",
    note_errors!(),
    "
    select array_agg(id) as ids, array_agg(lease_no) as lease_nos from taken",
);

/// Finds out why a settlement found no matching lease: the lease is live with other
/// flags, the same end was stored before and the reply was lost, or the lease is lost.
/// The error is compared too, because a sweeper may have recorded a
/// failed attempt with the holder's worker id.
const DIAGNOSE: &str = "
    select i.nth, r.cancel_requested, r.superseded, (
           exists (
             select 1
               from longshore.finished f
              where f.id = i.id
                and f.lease_no = i.lease_no
                and f.finished_by = i.worker
                and f.outcome::text = i.outcome)
        or exists (
             select 1
               from longshore.attempts a
              where a.job = i.id
                and a.lease_no = i.lease_no
                and a.worker = i.worker
                and a.what = i.history
                and a.error is not distinct from i.error)) as is_stored
      from unnest((select $1::uuid[]), (select $2::int4[]), (select $3::uuid[]), (select $4::text[]), (select $5::text[]), (select $6::text[])) with ordinality
        as i(id, lease_no, worker, outcome, history, error, nth)
      left join longshore.running r
        on r.id = i.id
       and r.lease_no = i.lease_no
       and r.worker = i.worker";

/// A settlement, after the index of its result.
pub(super) type Item<'a> = (usize, &'a Settlement);

fn lease_key((_, settlement): &Item<'_>) -> (Uuid, i32) {
    (settlement.lease.id.0, settlement.lease.lease_no)
}

#[async_trait]
impl Settling for PostgresStore {
    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>> {
        let work: Work<_, _> = |tx, settlements: &Vec<Settlement>| Box::pin(settle(tx, settlements));
        // Each statement has its own short deadline. If many leases are locked,
        // they are ended one by one.
        self.run_here(Mode::QUICK_IN_PARTS, settlements.to_vec(), work).await
    }
}

/// Ends each lease that is live. An error means that at least one could not be stored.
/// The others are stored, and return `Stored` when the call is repeated.
async fn settle(tx: &mut Tx<'_>, batch: &[Settlement]) -> Sql<Vec<Settled>> {
    debug_assert!(
        batch.iter().all(|settlement| settlement.is_sound() && settlement.by == EndedBy::Holder),
        "{batch:?}"
    );
    let mut results = vec![Settled::LeaseLost; batch.len()];
    let (alone, mut together): (Vec<Item<'_>>, Vec<Item<'_>>) =
        batch.iter().enumerate().partition(|(_, settlement)| settlement.is_alone());
    // Lock rows in the order of their ids, as everywhere.
    together.sort_by_key(|(_, settlement)| settlement.lease.id);
    let mut refused = None;
    match within(QUICK, end_together(tx, &together, &mut results)).await {
        Err(fault) if fault.is_lock_timeout() && together.len() > 1 => {
            for item in &together {
                let done = within(QUICK, end_together(tx, &[*item], &mut results)).await;
                refused = remember_refusal(done.map(drop), refused)?;
            }
        }
        done => drop(done?),
    }
    for item in alone {
        let done = within(QUICK, end_with_more(tx, item, &mut results)).await;
        refused = remember_refusal(done, refused)?;
    }
    refused.map_or(Ok(results), Err)
}

/// Ends one lease, and stores its follow-up jobs and waits, in one transaction.
async fn end_with_more(tx: &mut Tx<'_>, item: Item<'_>, results: &mut [Settled]) -> Sql<()> {
    let mut has_begun = false;
    let done = try_to_end_with_more(tx, item, results, &mut has_begun).await;
    if done.is_err() && !has_begun {
        tx.roll_back_begin().await;
    }
    done
}

async fn try_to_end_with_more(
    tx: &mut Tx<'_>,
    (nth, settlement): Item<'_>,
    results: &mut [Settled],
    has_begun: &mut bool,
) -> Sql<()> {
    let events = settlement.awaited_events();
    // Until the transaction ends, none of these events is delivered.
    let mut transaction = tx.begin_sharing("events", &events).await?;
    *has_begun = true;
    let tx = &mut transaction.tx();
    let due_now;
    let settlement = if save_waits(tx, settlement, &events).await? {
        due_now = settlement.clone().due_now();
        &due_now
    } else {
        settlement
    };
    if end_together(tx, &[(nth, settlement)], results).await? == 0 {
        // If an earlier call ended the lease and its reply was lost, that call also stored the follow-up jobs.
        return transaction.rollback().await;
    }
    insert_any(tx, &settlement.follow_ups).await?;
    transaction.commit().await
}

/// Ends leases in batches, without storing follow-up jobs. Returns how many leases this
/// call ended.
pub(super) async fn end_together(tx: &mut Tx<'_>, items: &[Item<'_>], results: &mut [Settled]) -> Sql<usize> {
    debug_assert!(
        items.is_sorted_by_key(|(_, settlement)| settlement.lease.id),
        "rows are locked in the order of their ids"
    );
    let mut batches = BTreeMap::<Condition, Batch<'_>>::new();
    let mut leases = HashSet::with_capacity(items.len());
    for item in items {
        // If a lease is twice in one batch, the first item ends it, and the second finds
        // it gone.
        if leases.insert(lease_key(item)) {
            batches.entry(Condition::of(item.1)).or_default().add(item.1);
        }
    }
    let mut stored = Vec::with_capacity(items.len());
    for (condition, batch) in &mut batches {
        for (end, ids) in batch.take_uniform() {
            stored.extend(finish_uniform(tx, condition, &end, ids).await?);
        }
        for (outcome, finishes) in &batch.finishes {
            stored.extend(finish(tx, condition, *outcome, finishes).await?);
        }
        if !batch.requeues.is_empty() {
            stored.extend(requeue(tx, condition, &batch.requeues).await?);
        }
    }
    if stored.len() == items.len() {
        items.iter().for_each(|(nth, _)| results[*nth] = Settled::Stored);
        return Ok(stored.len());
    }
    let ended = stored.len();
    let mut stored: HashSet<(Uuid, i32)> = stored.into_iter().collect();
    let (done, missed): (Vec<Item<'_>>, Vec<Item<'_>>) =
        items.iter().partition(|item| stored.remove(&lease_key(item)));
    debug_assert!(stored.is_empty(), "a statement ends only the leases that it names");
    done.iter().for_each(|(nth, _)| results[*nth] = Settled::Stored);
    diagnose(tx, &missed, results).await?;
    Ok(ended)
}

async fn finish_uniform(
    tx: &mut Tx<'_>,
    condition: &Condition,
    end: &UniformEnd,
    ids: Vec<Uuid>,
) -> Sql<Vec<(Uuid, i32)>> {
    let taken = sqlx::query(tx.sql(FINISH_UNIFORM))
        .bind(ids)
        .bind(end.lease_no)
        .bind(end.worker.0)
        .bind(condition.cancel_seen)
        .bind(condition.superseded_seen)
        .bind(end.outcome.as_str())
        .bind(end.attempts as i16)
        .bind(end.interruptions as i16)
        .fetch_one(&mut *tx.connection)
        .await?;
    leases_of(&taken)
}

async fn finish(
    tx: &mut Tx<'_>,
    condition: &Condition,
    outcome: Outcome,
    items: &[(&Settlement, &Finish)],
) -> Sql<Vec<(Uuid, i32)>> {
    let query = bind_leases(sqlx::query(tx.sql(FINISH)), items.iter().map(|(settlement, _)| *settlement));
    let finishes = || items.iter().map(|(_, finish)| *finish);
    let taken = query
        .bind(finishes().map(|f| f.attempts as i16).collect::<Vec<_>>())
        .bind(finishes().map(|f| f.interruptions as i16).collect::<Vec<_>>())
        .bind(sparse_column(finishes().map(|f| f.error.as_deref().map(clean).map(Cow::into_owned))))
        .bind(sparse_column(finishes().map(|f| f.result.as_ref().map(|result| result.get().to_owned()))))
        .bind(sparse_column(finishes().map(|f| f.history.map(AttemptEnd::as_str))))
        .bind(condition.cancel_seen)
        .bind(condition.superseded_seen)
        .bind(condition.recovers_dead)
        .bind(outcome.as_str())
        .bind(failures(items.iter().map(|(settlement, _)| *settlement)))
        .fetch_one(&mut *tx.connection)
        .await?;
    leases_of(&taken)
}

async fn requeue(
    tx: &mut Tx<'_>,
    condition: &Condition,
    items: &[(&Settlement, &Requeue)],
) -> Sql<Vec<(Uuid, i32)>> {
    let query = bind_leases(sqlx::query(tx.sql(REQUEUE)), items.iter().map(|(settlement, _)| *settlement));
    let requeues = || items.iter().map(|(_, requeue)| *requeue);
    let (run_ats, delays): (Vec<_>, Vec<_>) = requeues().map(|r| split(r.when)).unzip();
    let taken = query
        .bind(requeues().map(|r| r.attempts as i16).collect::<Vec<_>>())
        .bind(requeues().map(|r| r.interruptions as i16).collect::<Vec<_>>())
        .bind(sparse_column(requeues().map(|r| r.error.as_deref().map(clean).map(Cow::into_owned))))
        .bind(requeues().map(|r| r.history.map(AttemptEnd::as_str)).collect::<Vec<_>>())
        .bind(run_ats)
        .bind(delays)
        .bind(condition.cancel_seen)
        .bind(condition.superseded_seen)
        .bind(condition.recovers_dead)
        .bind(failures(items.iter().map(|(settlement, _)| *settlement)))
        .fetch_one(&mut *tx.connection)
        .await?;
    leases_of(&taken)
}

async fn diagnose(tx: &mut Tx<'_>, missed: &[Item<'_>], results: &mut [Settled]) -> Sql<()> {
    let leases = || missed.iter().map(|(_, settlement)| &settlement.lease);
    let ends: Vec<StoredEnd> = missed.iter().map(|(_, settlement)| StoredEnd::of(settlement)).collect();
    let rows = sqlx::query(tx.sql(DIAGNOSE))
        .bind(leases().map(|lease| lease.id.0).collect::<Vec<_>>())
        .bind(leases().map(|lease| lease.lease_no).collect::<Vec<_>>())
        .bind(leases().map(|lease| lease.worker.0).collect::<Vec<_>>())
        .bind(ends.iter().map(|end| end.outcome).collect::<Vec<_>>())
        .bind(ends.iter().map(|end| end.history).collect::<Vec<_>>())
        .bind(ends.into_iter().map(|end| end.error).collect::<Vec<_>>())
        .fetch_all(&mut *tx.connection)
        .await?;
    for row in rows {
        let (nth, settlement) = missed[row.try_get::<i64, _>("nth")? as usize - 1];
        let cancel_requested: Option<bool> = row.try_get("cancel_requested")?;
        let flags = cancel_requested.zip(row.try_get("superseded")?);
        results[nth] = match flags {
            Some((cancel_requested, superseded))
                if settlement.by == EndedBy::Holder || flags_differ(settlement, flags) =>
            {
                Settled::Flagged(LeaseFlags { cancel_requested, superseded })
            }
            // The lease is live with the flags as seen: its holder is not dead and keeps
            // it.
            Some(_) => Settled::LeaseLost,
            None if settlement.by == EndedBy::Holder && row.try_get("is_stored")? => Settled::Stored,
            None => Settled::LeaseLost,
        };
    }
    Ok(())
}

fn flags_differ(settlement: &Settlement, found: Option<(bool, bool)>) -> bool {
    settlement.seen.map(|seen| (seen.cancel_requested, seen.superseded)) != found
}

/// What a settlement leaves in the tables: its outcome and its history entry.
struct StoredEnd {
    outcome: Option<&'static str>,
    history: Option<&'static str>,
    error: Option<String>,
}

impl StoredEnd {
    fn of(settlement: &Settlement) -> Self {
        match &settlement.leave {
            Leave::Finish(finish) => StoredEnd {
                outcome: Some(finish.outcome.as_str()),
                history: finish.history.map(AttemptEnd::as_str),
                error: finish.error.as_deref().map(|error| clean(error).into_owned()),
            },
            Leave::Requeue(requeue) => StoredEnd {
                outcome: None,
                history: requeue.history.map(AttemptEnd::as_str),
                error: requeue.error.as_deref().map(|error| clean(error).into_owned()),
            },
        }
    }
}

/// Keeps the first refusal by the database, so that the remaining items are still tried.
/// Returns any other failure.
fn remember_refusal(done: Sql<()>, before: Option<Fault>) -> Sql<Option<Fault>> {
    match done {
        Ok(()) => Ok(before),
        Err(fault) if fault.code().is_some() => Ok(before.or(Some(fault))),
        Err(fault) => Err(fault),
    }
}

/// The condition under which a statement ends its leases.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Condition {
    cancel_seen: Option<bool>,
    superseded_seen: Option<bool>,
    /// `None` if the holder ends the lease; otherwise whether the holder must be dead.
    recovers_dead: Option<bool>,
}

impl Condition {
    fn of(settlement: &Settlement) -> Self {
        Condition {
            cancel_seen: settlement.seen.map(|seen| seen.cancel_requested),
            superseded_seen: settlement.seen.map(|seen| seen.superseded),
            recovers_dead: match settlement.by {
                EndedBy::Holder => None,
                by @ EndedBy::Recovery(_) => Some(by.requires_dead_holder()),
            },
        }
    }
}

/// The settlements with one condition.
#[derive(Default)]
struct Batch<'a> {
    finishes: BTreeMap<Outcome, Vec<(&'a Settlement, &'a Finish)>>,
    requeues: Vec<(&'a Settlement, &'a Requeue)>,
}

impl<'a> Batch<'a> {
    fn add(&mut self, settlement: &'a Settlement) {
        match &settlement.leave {
            Leave::Finish(finish) => {
                self.finishes.entry(finish.outcome).or_default().push((settlement, finish));
            }
            Leave::Requeue(requeue) => self.requeues.push((settlement, requeue)),
        }
    }
}

/// What a group of finished attempts has in common, so that one short statement can
/// store them all.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct UniformEnd {
    outcome: Outcome,
    lease_no: i32,
    worker: WorkerId,
    attempts: u16,
    interruptions: u16,
}

impl UniformEnd {
    /// `None` if the end has an error, a result or a history entry, or comes from a
    /// sweeper.
    fn of(settlement: &Settlement, finish: &Finish) -> Option<Self> {
        let plain = finish.error.is_none() && finish.result.is_none() && finish.history.is_none();
        (plain && settlement.by == EndedBy::Holder).then_some(UniformEnd {
            outcome: finish.outcome,
            lease_no: settlement.lease.lease_no,
            worker: settlement.lease.worker,
            attempts: finish.attempts,
            interruptions: finish.interruptions,
        })
    }
}

impl Batch<'_> {
    /// A separate statement is worth it only for the largest few groups.
    const MAX_UNIFORM_GROUPS: usize = 3;

    /// Removes the largest groups of uniform ends from the batch and returns them.
    fn take_uniform(&mut self) -> BTreeMap<UniformEnd, Vec<Uuid>> {
        let mut groups = BTreeMap::<UniformEnd, Vec<Uuid>>::new();
        for (settlement, finish) in self.finishes.values().flatten() {
            if let Some(end) = UniformEnd::of(settlement, finish) {
                groups.entry(end).or_default().push(settlement.lease.id.0);
            }
        }
        let mut sizes: Vec<usize> = groups.values().map(Vec::len).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let min_size = sizes.get(Batch::MAX_UNIFORM_GROUPS).map_or(0, |size| size + 1);
        groups.retain(|_, ids| ids.len() >= min_size);
        for finishes in self.finishes.values_mut() {
            finishes.retain(|(settlement, finish)| {
                UniformEnd::of(settlement, finish).is_none_or(|end| !groups.contains_key(&end))
            });
        }
        self.finishes.retain(|_, finishes| !finishes.is_empty());
        groups
    }
}

/// Binds the first three arrays of [`FINISH`] and [`REQUEUE`]: the leases.
fn bind_leases<'q, 'i>(
    query: Query<'q>,
    settlements: impl Iterator<Item = &'i Settlement> + Clone,
) -> Query<'q> {
    let leases = settlements.map(|settlement| settlement.lease);
    query
        .bind(leases.clone().map(|lease| lease.id.0).collect::<Vec<_>>())
        .bind(leases.clone().map(|lease| lease.lease_no).collect::<Vec<_>>())
        .bind(leases.map(|lease| lease.worker.0).collect::<Vec<_>>())
}

fn failures<'i>(settlements: impl Iterator<Item = &'i Settlement>) -> Vec<Option<i64>> {
    sparse_column(settlements.map(|settlement| settlement.failure.map(|fingerprint| fingerprint.0)))
}

/// A column that is usually null in all rows. Then it is sent as an empty array, which
/// `unnest` pads with nulls.
fn sparse_column<T>(values: impl Iterator<Item = Option<T>>) -> Vec<Option<T>> {
    let values: Vec<Option<T>> = values.collect();
    if values.iter().all(Option::is_none) { Vec::new() } else { values }
}

/// The leases that a statement has ended.
fn leases_of(taken: &PgRow) -> Sql<Vec<(Uuid, i32)>> {
    let ids: Option<Vec<Uuid>> = taken.try_get("ids")?;
    let lease_nos: Option<Vec<i32>> = taken.try_get("lease_nos")?;
    Ok(ids.unwrap_or_default().into_iter().zip(lease_nos.unwrap_or_default()).collect())
}
