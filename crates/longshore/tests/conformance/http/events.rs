//! What happens, as it happens.

use axum::body::Body;
use http_body_util::BodyExt;
use longshore::api::{Access, Api, Limits, UnknownKinds};
use longshore::store::Scope;
use longshore::{NewJob, Status};
use serde_json::{Value, json};

use super::auth::token;
use super::client::HttpClient;
use crate::fixture::*;

cases! {
    a_jobs_life_is_told_as_it_happens,
    a_job_that_is_not_among_the_newest_is_told_of_while_it_runs,
    more_new_jobs_than_one_look_sees_leave_a_gap,
    a_listener_goes_on_where_it_was_or_is_told_to_read_anew,
    a_token_for_some_queues_hears_of_no_others,
    whoever_listens_is_let_go_when_the_server_ends,
}

/// Somebody who listens.
struct Ear {
    body: Body,
    /// What has come and was not read.
    text: String,
}

#[derive(Debug)]
struct Told {
    id: String,
    event: String,
    data: Value,
}

impl Ear {
    async fn open(http: &HttpClient, last: Option<&str>) -> Self {
        let headers: Vec<_> = last.map(|id| ("last-event-id", id)).into_iter().collect();
        let (status, headers, body) = http.open("/events", &headers).await;
        assert_eq!((status, &headers["content-type"]), (200, &"text/event-stream".parse().expect("a value")));
        Ear { body, text: String::new() }
    }

    /// The next event; `None` once there will be no more. Signs of life are no
    /// events: a stream that brings nothing else is not waited for.
    async fn next(&mut self) -> Option<Told> {
        tokio::time::timeout(30 * SECOND, self.read()).await.expect("an event or the end")
    }

    async fn read(&mut self) -> Option<Told> {
        loop {
            while let Some((block, rest)) = self.text.split_once("\n\n") {
                let (block, rest) = (block.to_owned(), rest.to_owned());
                self.text = rest;
                let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name));
                if let Some(event) = field("event: ") {
                    return Some(Told {
                        id: field("id: ").expect("an id").to_owned(),
                        event: event.to_owned(),
                        data: serde_json::from_str(field("data: ").expect("data")).expect("JSON"),
                    });
                }
            }
            let bytes = self.body.frame().await?.expect("a frame").into_data().expect("data");
            self.text += std::str::from_utf8(&bytes).expect("text");
        }
    }

    /// The next event of this name.
    async fn hear(&mut self, event: &str) -> Told {
        loop {
            let told = self.next().await.expect("no end");
            assert_ne!(told.event, "reset", "nothing was missed");
            if told.event == event {
                return told;
            }
        }
    }

    /// Waits until this job is in this status.
    async fn hear_of(&mut self, id: longshore::JobId, status: Status) -> Told {
        loop {
            let told = self.hear("job").await;
            if told.data["id"] == id.to_string() && told.data["status"] == status.as_str() {
                return told;
            }
        }
    }
}

async fn a_jobs_life_is_told_as_it_happens(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let before = fixture.add(job("greet")).await;
    let mut ear = Ear::open(&http, None).await;
    let id = fixture.add(job("greet").tags(["secret"])).await;
    let told = ear.hear_of(id, Status::Queued).await;
    let whole = json!({
        "id": id.to_string(), "kind": "greet", "queue": "default", "status": "queued", "attempts": 0,
        "cancel_requested": false,
    });
    assert_eq!(told.data, whole, "and nothing of what it carries");
    let worker = fixture.worker().await;
    assert_eq!(ear.hear("worker").await.data["state"], "alive");
    let claimed = fixture.claim(worker, 2).await;
    assert_eq!(claimed[0].lease().id, before);
    ear.hear_of(before, Status::Running).await;
    for claimed in &claimed {
        fixture.must_finish(claimed, done()).await;
    }
    ear.hear_of(id, Status::Succeeded).await;
    fixture.delete(id).await.expect("delete");
    assert_eq!(ear.hear("job_removed").await.data["id"], id.to_string());
    fixture.pause("default").await.expect("pause");
    assert_eq!(ear.hear("queue").await.data["paused"], true);
}

async fn a_job_that_is_not_among_the_newest_is_told_of_while_it_runs(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let old = fixture.add(job("greet")).await;
    let jobs: Vec<NewJob> = (0..300).map(|_| job("later").queue("elsewhere")).collect();
    fixture.enqueue_many(jobs).await.expect("enqueued");
    let mut ear = Ear::open(&http, None).await;
    let claimed = fixture.claim_one(fixture.worker().await).await;
    ear.hear_of(old, Status::Running).await;
    fixture.must_finish(&claimed, done()).await;
    ear.hear_of(old, Status::Succeeded).await;
}

async fn more_new_jobs_than_one_look_sees_leave_a_gap(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let mut ear = Ear::open(&http, None).await;
    let few = fixture.add(job("greet")).await;
    let told = ear.next().await.expect("an event");
    assert_eq!((told.event.as_str(), &told.data["id"]), ("job", &json!(few.to_string())), "no gap");
    let jobs: Vec<NewJob> = (0..300).map(|_| job("greet")).collect();
    let made = fixture.enqueue_many(jobs).await.expect("enqueued");
    assert_eq!(ear.hear("gap").await.data, json!({}));
    ear.hear_of(made[299].id, Status::Queued).await;
}

async fn a_listener_goes_on_where_it_was_or_is_told_to_read_anew(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    let mut ear = Ear::open(&http, None).await;
    let first = fixture.add(job("greet")).await;
    let seen = ear.hear_of(first, Status::Queued).await;
    drop(ear);
    let second = fixture.add(job("greet")).await;
    let mut back = Ear::open(&http, Some(&seen.id)).await;
    let told = back.hear_of(second, Status::Queued).await;
    // What it had not seen is told again, in the same words.
    assert_eq!(Ear::open(&http, Some(&seen.id)).await.hear_of(second, Status::Queued).await.id, told.id);

    for unknown in ["ffff-1", "nonsense", "", "9".repeat(5000).as_str()] {
        let mut lost = Ear::open(&http, Some(unknown)).await;
        let reset = lost.next().await.expect("an event");
        assert_eq!((reset.event.as_str(), reset.data), ("reset", json!({})), "{unknown}");
        let third = fixture.add(job("greet")).await;
        lost.hear_of(third, Status::Queued).await;
    }
}

async fn a_token_for_some_queues_hears_of_no_others(fixture: Fixture) {
    let api = Api::new(fixture.client()).access(Access::Tokens).unknown_kinds(UnknownKinds::Allow);
    let http = HttpClient::of(api);
    let (id, secret) = token(&fixture, Scope::Read, Some(&["mail"])).await;
    let mut ear = Ear::open(&http.with_token(&secret), None).await;
    fixture.worker().await;
    fixture.add(job("greet").queue("harbour")).await;
    let own = fixture.add(job("greet").queue("mail")).await;
    let told = ear.next().await.expect("an event");
    assert_eq!((told.event.as_str(), &told.data["id"]), ("job", &json!(own.to_string())));
    assert_eq!(ear.next().await.expect("an event").data["name"], "mail");
    // And of nothing at all once it is revoked.
    fixture.revoke_token(id).await.expect("revoked");
    let more = ear.next().await;
    assert!(more.is_none(), "{more:?}");
}

async fn whoever_listens_is_let_go_when_the_server_ends(fixture: Fixture) {
    let ending = tokio::sync::watch::Sender::new(false);
    let http = HttpClient::of(Api::new(fixture.client()).ending(ending.subscribe()));
    let mut ear = Ear::open(&http, None).await;
    ending.send_replace(true);
    assert!(ear.next().await.is_none());
}
