//! Both engines, and the SQL function `enqueue` on Postgres, do what `keys::decide` says
//! when the id or a key of a new job is taken: every combination of holders and modes.

use longshore::rules::keys::{self, Decision, Holders, Owner, RunAt};
use longshore::rules::lifecycle::State;
use longshore::store::Fenced;
use longshore::{Edit, Enqueued, EnqueuedAs, JobId, ListFilter, NewJob, UniqueMode, When};
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
const IDEMPOTENCY: [Option<Key>; 3] = [None, Some(Key::Own), Some(Key::Merged)];
const EARLIER: [Option<EnqueuedAs>; 3] = [None, Some(EnqueuedAs::Created), Some(EnqueuedAs::Replaced)];

/// The state of the job that had the unique key first.
#[derive(Clone, Copy)]
enum First {
    Waiting,
    Running,
    Cancelling,
    Ended,
}

const FIRST: [Option<First>; 5] =
    [None, Some(First::Waiting), Some(First::Running), Some(First::Cancelling), Some(First::Ended)];

/// How a job got the idempotency key: enqueued with it, or by a request merged into it.
#[derive(Clone, Copy)]
enum Key {
    Own,
    Merged,
}

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
        first: Option<First>,
        idempotency: Option<Key>,
        earlier: Option<EnqueuedAs>,
    ) -> Self {
        let (name, new_id) = (format!("c{n}"), JobId::new());
        let mut holders = Holders::default();
        if let Some(state) = first {
            let id = fixture.add(job("first").queue(&name).unique_key(&name, UniqueMode::Dedupe)).await;
            // It was interrupted once and has a checkpoint.
            let worker = fixture.worker().await;
            let claimed = fixture.claim_from(&name, worker, 1).await.remove(0);
            let saved = fixture.save_checkpoint(&claimed.lease(), &raw("[1]")).await;
            assert_eq!(saved.expect("save"), Fenced::Held);
            fixture.must_finish(&claimed, interrupted()).await;
            fixture.retry(id).await.expect("retry");
            let claim = async || fixture.claim_from(&name, worker, 1).await.remove(0);
            match state {
                // Due later, so that both times differ from now.
                First::Waiting => {
                    fixture.edit(id, Edit::default().when(When::After(HOUR))).await.expect("edit");
                    holders.unique = Some((id, Owner::Waiting));
                }
                First::Running => {
                    claim().await;
                    holders.unique = Some((id, Owner::Running));
                }
                First::Cancelling => {
                    claim().await;
                    fixture.cancel(id).await.expect("cancel");
                    holders.unique = Some((id, Owner::Cancelling));
                }
                First::Ended => fixture.must_finish(&claim().await, done()).await,
            }
        }
        // The other jobs have unique keys of their own.
        let other = |what: &str, mode| job("other").queue("other").unique_key(format!("{name}-{what}"), mode);
        match idempotency {
            None => {}
            Some(Key::Own) => {
                let id = fixture.add(other("own", UniqueMode::Dedupe).idempotency_key(&name)).await;
                holders.idempotency = Some(id);
            }
            Some(Key::Merged) => {
                let id = fixture.add(other("merged", UniqueMode::Dedupe)).await;
                let merged = other("merged", UniqueMode::Dedupe).idempotency_key(&name);
                assert_eq!(fixture.enqueue(merged).await.expect("enqueue").id, id);
                holders.idempotency = Some(id);
            }
        }
        holders.earlier = match earlier {
            None => None,
            Some(EnqueuedAs::Replaced) => {
                let id = fixture.add(other("replaced", UniqueMode::Dedupe)).await;
                let replacing = other("replaced", UniqueMode::Replace).id(new_id);
                assert_eq!(fixture.enqueue(replacing).await.expect("enqueue").id, id);
                Some((id, EnqueuedAs::Replaced))
            }
            Some(how) => {
                fixture.add(job("earlier").queue("other").id(new_id)).await;
                Some((new_id, how))
            }
        };
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
            Decision::Repeat(id, how) => (id, how),
            Decision::Insert | Decision::Supersede(_) => (self.new_id, EnqueuedAs::Created),
            Decision::Existing(id) | Decision::Dedupe(id) => (id, EnqueuedAs::Existing),
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
            assert_eq!((job.attempts, job.interruptions), (0, 1), "{context}");
            assert!(fixture.checkpoint(id).await.expect("checkpoint").is_none(), "{context}");
        } else if let Some((id, Owner::Waiting)) = self.holders.unique {
            assert_eq!(fixture.job(id).await.kind, "first", "{context}");
        }
        if let Some((id, Owner::Running | Owner::Cancelling)) = self.holders.unique {
            let State::Running(running) = fixture.state(id).await else { panic!("{context}") };
            assert_eq!(running.flags.superseded, decision == Decision::Supersede(id), "{context}");
        }
        // From now on both the idempotency key and the id return the same job.
        if !matches!(decision, Decision::Repeat(..)) {
            let again = job("again").queue("other").idempotency_key(&self.name);
            let again = fixture.enqueue(again).await.expect("enqueue");
            assert_eq!(again, Enqueued { id, how: EnqueuedAs::Existing }, "{context}");
        }
        if !matches!(decision, Decision::Existing(_)) {
            let again =
                job("again").queue("other").id(self.new_id).unique_key(&self.name, UniqueMode::Replace);
            let again = fixture.enqueue(again).await.expect("enqueue");
            assert_eq!(again, Enqueued { id, how }, "{context}");
        }
    }
}

async fn combinations(fixture: &Fixture) -> Vec<Combination> {
    let mut combinations = Vec::new();
    for mode in MODES {
        for first in FIRST {
            for idempotency in IDEMPOTENCY {
                for earlier in EARLIER {
                    let n = combinations.len();
                    let combination = Combination::build(fixture, n, mode, first, idempotency, earlier);
                    combinations.push(combination.await);
                }
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
