//! Both engines, and the SQL function `enqueue` on Postgres, do what `keys::decide` says
//! when the id or a key of a new job is taken: every combination of holders and modes.

use longshore::keys::{self, Decision, Holders, Owner, RunAt};
use longshore::lifecycle::State;
use longshore::{EnqueuedAs, JobId, ListFilter, NewJob, Status, UniqueMode};
use sqlx::AssertSqlSafe;
use sqlx::Row as _;

use crate::fixture::*;

cases! {
    an_enqueue_follows_the_rules_about_keys,
}

cases! {
    only on postgres:
    the_sql_function_follows_the_rules_about_keys,
}

const MODES: [UniqueMode; 3] = [UniqueMode::Dedupe, UniqueMode::Replace, UniqueMode::PreserveRunAt];
const STATES: [Option<Status>; 4] =
    [None, Some(Status::Queued), Some(Status::Running), Some(Status::Succeeded)];

/// One combination: the state of the job that had the unique key first, and whether the
/// idempotency key and the id are taken.
struct Combination {
    /// Part of the names of this combination's keys and queues.
    name: String,
    mode: UniqueMode,
    holders: Holders,
    new_id: JobId,
}

impl Combination {
    async fn build(
        fixture: &Fixture,
        n: usize,
        mode: UniqueMode,
        owner: Option<Status>,
        idempotency: bool,
        same_id: bool,
    ) -> Self {
        let (name, new_id) = (format!("c{n}"), JobId::new());
        let mut holders = Holders { same_id, ..Holders::default() };
        if let Some(status) = owner {
            let first = job("first").queue(&name).unique_key(&name, UniqueMode::Dedupe);
            // A waiting owner is due later, so that both times differ from now.
            let first = if status == Status::Queued { first.delay(HOUR) } else { first };
            let id = fixture.add(first).await;
            let worker = fixture.worker().await;
            let claimed = fixture.claim_from(&name, worker, 1).await;
            match status {
                Status::Queued => holders.unique = Some((id, Owner::Waiting)),
                Status::Running => holders.unique = Some((id, Owner::Running)),
                _ => fixture.must_finish(&claimed[0], done()).await,
            }
        }
        if idempotency {
            let other = job("other").queue(&name).idempotency_key(&name);
            holders.idempotency = Some(fixture.add(other).await);
        }
        if same_id {
            fixture.add(job("earlier").queue(&name).id(new_id)).await;
        }
        Combination { name, mode, holders, new_id }
    }

    /// The job that is enqueued: due in two hours.
    fn new_job(&self) -> NewJob {
        let job = job("new").id(self.new_id).queue(&self.name).delay(2 * HOUR);
        job.unique_key(&self.name, self.mode).idempotency_key(&self.name)
    }

    /// Compares the result of the enqueue, and what is stored, with the decision.
    async fn verify(&self, fixture: &Fixture, id: JobId, how: EnqueuedAs) {
        let decision = keys::decide(self.holders, self.mode);
        let context = format!("{:?} {:?}: {decision:?}", self.holders, self.mode);
        let expected = match decision {
            Decision::AlreadyStored | Decision::Insert | Decision::Supersede(_) => {
                (self.new_id, EnqueuedAs::Created)
            }
            Decision::Existing(id) => (id, EnqueuedAs::Existing),
            Decision::Replace(id, _) => (id, EnqueuedAs::Replaced),
        };
        assert_eq!((id, how), expected, "{context}");
        let owner = match decision {
            Decision::Insert | Decision::Supersede(_) => Some(self.new_id),
            _ => self.holders.unique.map(|(id, _)| id),
        };
        let filter = ListFilter { unique_key: Some(self.name.clone()), ..ListFilter::default() };
        let owners: Vec<JobId> =
            fixture.list(&filter).await.expect("list").jobs.iter().map(|job| job.id).collect();
        assert_eq!(owners, owner.into_iter().collect::<Vec<_>>(), "{context}");
        if let Decision::Replace(id, run_at) = decision {
            let job = fixture.job(id).await;
            let delay = if run_at == RunAt::Preserved { HOUR } else { 2 * HOUR };
            assert_eq!((job.kind.as_str(), job.run_at), ("new", start() + delay), "{context}");
        } else if let Some((id, Owner::Waiting)) = self.holders.unique {
            assert_eq!(fixture.job(id).await.kind, "first", "{context}");
        }
        if let Some((id, Owner::Running)) = self.holders.unique {
            let State::Running(running) = fixture.state(id).await else { panic!("{context}") };
            assert_eq!(running.flags.superseded, decision == Decision::Supersede(id), "{context}");
        }
    }
}

async fn combinations(fixture: &Fixture) -> Vec<Combination> {
    let mut combinations = Vec::new();
    for mode in MODES {
        for owner in STATES {
            for (idempotency, same_id) in [(false, false), (true, false), (false, true), (true, true)] {
                let n = combinations.len();
                combinations.push(Combination::build(fixture, n, mode, owner, idempotency, same_id).await);
            }
        }
    }
    combinations
}

async fn an_enqueue_follows_the_rules_about_keys(fixture: Fixture) {
    for combination in combinations(&fixture).await {
        let enqueued = fixture.enqueue(combination.new_job()).await.expect("enqueue");
        combination.verify(&fixture, enqueued.id, enqueued.how).await;
    }
}

async fn the_sql_function_follows_the_rules_about_keys(fixture: Fixture) {
    let mut connection = fixture.postgres().await;
    for combination in combinations(&fixture).await {
        let Combination { name, mode, new_id, .. } = &combination;
        let call = format!(
            "select job, how from enqueue('new', '{{\"for\":\"new\"}}', queue => '{name}', delay => '2 hours', \
             idempotency_key => '{name}', unique_key => '{name}', unique_mode => '{}', id => '{new_id}')",
            mode.as_str()
        );
        let row = sqlx::query(AssertSqlSafe(call)).fetch_one(&mut connection).await.expect("enqueue");
        let how = match row.get::<&str, _>("how") {
            "created" => EnqueuedAs::Created,
            "existing" => EnqueuedAs::Existing,
            "replaced" => EnqueuedAs::Replaced,
            other => panic!("{other}"),
        };
        combination
            .verify(&fixture, row.get::<uuid::Uuid, _>("job").to_string().parse().expect("id"), how)
            .await;
    }
}
