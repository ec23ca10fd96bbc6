//! The event stream, `GET /events`.

use axum::body::Body;
use http_body_util::BodyExt;
use longshore::api::{Access, Api, Limits};
use longshore::{NewJob, Scope, Status, UnknownKinds};
use serde_json::{Value, json};

use super::auth::token;
use super::client::HttpClient;
use crate::fixture::*;

cases! {
    each_change_of_a_job_is_an_event,
    a_running_job_has_events_even_if_it_is_not_among_the_newest,
    more_new_jobs_than_one_poll_reads_cause_a_gap_event,
    a_reconnecting_client_resumes_after_its_last_event_or_gets_a_reset,
    a_token_limited_to_queues_gets_no_events_of_other_queues,
    event_streams_end_when_the_server_stops,
}

/// An open event stream.
struct Stream {
    body: Body,
    /// Text that was received but not parsed yet.
    text: String,
}

#[derive(Debug)]
struct Event {
    id: String,
    event: String,
    data: Value,
}

impl Stream {
    async fn open(http: &HttpClient, last: Option<&str>) -> Self {
        let headers: Vec<_> = last.map(|id| ("last-event-id", id)).into_iter().collect();
        let (status, headers, body) = http.open("/events", &headers).await;
        assert_eq!((status, &headers["content-type"]), (200, &"text/event-stream".parse().expect("a value")));
        Stream { body, text: String::new() }
    }

    /// The next event, or `None` at the end of the stream. Keep-alive comments are not
    /// events, so a stream that sends nothing else runs into the timeout.
    async fn next(&mut self) -> Option<Event> {
        tokio::time::timeout(MAX_WAIT, self.read()).await.expect("an event or the end")
    }

    async fn read(&mut self) -> Option<Event> {
        loop {
            while let Some((block, rest)) = self.text.split_once("\n\n") {
                let (block, rest) = (block.to_owned(), rest.to_owned());
                self.text = rest;
                let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name));
                if let Some(event) = field("event: ") {
                    return Some(Event {
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

    /// The next event with this name.
    async fn next_named(&mut self, name: &str) -> Event {
        loop {
            let event = self.next().await.expect("an event");
            assert_ne!(event.event, "reset", "unexpected reset");
            if event.event == name {
                return event;
            }
        }
    }

    /// Waits for the event that this job is in this status.
    async fn next_of_job(&mut self, id: longshore::JobId, status: Status) -> Event {
        loop {
            let event = self.next_named("job").await;
            if event.data["id"] == id.to_string() && event.data["status"] == status.as_str() {
                return event;
            }
        }
    }
}

async fn each_change_of_a_job_is_an_event(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let before = fixture.add(job("greet")).await;
    let mut stream = Stream::open(&http, None).await;
    let id = fixture.add(job("greet").tags(["secret"])).await;
    let event = stream.next_of_job(id, Status::Queued).await;
    let expected = json!({
        "id": id.to_string(), "kind": "greet", "queue": "default", "status": "queued", "attempts": 0,
        "cancel_requested": false,
    });
    assert_eq!(event.data, expected, "an event must not contain payload or tags");
    let worker = fixture.worker().await;
    assert_eq!(stream.next_named("worker").await.data["state"], "alive");
    let claimed = fixture.claim(worker, 2).await;
    assert_eq!(claimed[0].lease().id, before);
    stream.next_of_job(before, Status::Running).await;
    for claimed in &claimed {
        fixture.must_finish(claimed, done()).await;
    }
    stream.next_of_job(id, Status::Succeeded).await;
    fixture.delete(id).await.expect("delete");
    assert_eq!(stream.next_named("job_removed").await.data["id"], id.to_string());
    fixture.pause("default").await.expect("pause");
    assert_eq!(stream.next_named("queue").await.data["paused"], true);
}

async fn a_running_job_has_events_even_if_it_is_not_among_the_newest(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let old = fixture.add(job("greet")).await;
    let jobs: Vec<NewJob> = (0..300).map(|_| job("later").queue("other")).collect();
    fixture.enqueue_many(jobs).await.expect("enqueue");
    let mut stream = Stream::open(&http, None).await;
    let claimed = fixture.claim_one(fixture.worker().await).await;
    stream.next_of_job(old, Status::Running).await;
    fixture.must_finish(&claimed, done()).await;
    stream.next_of_job(old, Status::Succeeded).await;
}

async fn more_new_jobs_than_one_poll_reads_cause_a_gap_event(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let mut stream = Stream::open(&http, None).await;
    let few = fixture.add(job("greet")).await;
    let event = stream.next().await.expect("an event");
    assert_eq!(
        (event.event.as_str(), &event.data["id"]),
        ("job", &json!(few.to_string())),
        "there must be no gap"
    );
    let jobs: Vec<NewJob> = (0..300).map(|_| job("greet")).collect();
    let created = fixture.enqueue_many(jobs).await.expect("enqueue");
    assert_eq!(stream.next_named("gap").await.data, json!({}));
    stream.next_of_job(created[299].id, Status::Queued).await;
}

async fn a_reconnecting_client_resumes_after_its_last_event_or_gets_a_reset(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    let mut stream = Stream::open(&http, None).await;
    let first = fixture.add(job("greet")).await;
    let seen = stream.next_of_job(first, Status::Queued).await;
    drop(stream);
    let second = fixture.add(job("greet")).await;
    let mut resumed = Stream::open(&http, Some(&seen.id)).await;
    let event = resumed.next_of_job(second, Status::Queued).await;
    // The missed event is sent again with the same id.
    assert_eq!(
        Stream::open(&http, Some(&seen.id)).await.next_of_job(second, Status::Queued).await.id,
        event.id
    );

    for unknown in ["ffff-1", "nonsense", "", "9".repeat(5000).as_str()] {
        let mut lost = Stream::open(&http, Some(unknown)).await;
        let reset = lost.next().await.expect("an event");
        assert_eq!((reset.event.as_str(), reset.data), ("reset", json!({})), "{unknown}");
        let third = fixture.add(job("greet")).await;
        lost.next_of_job(third, Status::Queued).await;
    }
}

async fn a_token_limited_to_queues_gets_no_events_of_other_queues(fixture: Fixture) {
    let api = Api::new(fixture.client()).access(Access::Tokens).unknown_kinds(UnknownKinds::Allow);
    let http = HttpClient::for_api(api);
    let (id, secret) = token(&fixture, Scope::Read, Some(&["mail"])).await;
    let mut stream = Stream::open(&http.with_token(&secret), None).await;
    fixture.worker().await;
    fixture.add(job("greet").queue("other")).await;
    let own = fixture.add(job("greet").queue("mail")).await;
    let event = stream.next().await.expect("an event");
    assert_eq!((event.event.as_str(), &event.data["id"]), ("job", &json!(own.to_string())));
    assert_eq!(stream.next().await.expect("an event").data["name"], "mail");
    // The stream ends once the token is revoked.
    fixture.revoke_token(id).await.expect("revoke");
    let more = stream.next().await;
    assert!(more.is_none(), "{more:?}");
}

async fn event_streams_end_when_the_server_stops(fixture: Fixture) {
    let ending = tokio::sync::watch::Sender::new(false);
    let http = HttpClient::for_api(Api::new(fixture.client()).ending(ending.subscribe()));
    let mut stream = Stream::open(&http, None).await;
    ending.send_replace(true);
    assert!(stream.next().await.is_none());
}
