//! The kinds that a worker describes: how they are checked, and how much time that may take.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use utoipa::ToSchema;

use super::register::kind_queues;
use super::*;
use crate::api::kinds::{Defaults, check_kind};
use crate::api::refusals;
use crate::error::Error;
use crate::rules::enqueue::check_name;
use crate::store::{KindQueues, NewKind, check_queue_kinds};

/// How long a call waits until the kinds of others are checked.
const MAX_TURN_WAIT: Duration = Duration::from_secs(5);
/// The pause after a turn, as a multiple of its duration, and its maximum.
const PAUSE_FACTOR: u32 = 9;
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// A kind that a worker describes.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct AnnouncedKind {
    #[schema(min_length = 1, max_length = 128)]
    name: String,
    /// A JSON Schema that payloads must match. If absent or null, the stored one stays.
    #[schema(value_type = Option<serde_json::Value>)]
    schema: Option<Box<RawValue>>,
    /// Values for the fields that a request leaves out. If absent or null, the stored ones stay.
    #[schema(value_type = Option<Defaults>)]
    defaults: Option<Box<RawValue>>,
}

/// Checked kinds that are not stored yet.
#[derive(Default)]
pub(super) struct Announced {
    pub(super) kinds: Vec<NewKind>,
    /// Ends when they are stored.
    _turn: Option<Turn>,
}

/// The turns of tokens that are limited to queues. To check and to store a schema costs much more than to send it, so one
/// call at a time does it, and all of them together take about a tenth of the time. Other tokens do not wait.
pub(in crate::api) struct Announcements(Arc<Semaphore>);

impl Default for Announcements {
    fn default() -> Self {
        Announcements(Arc::new(Semaphore::new(1)))
    }
}

impl Announcements {
    async fn turn(&self) -> ApiResult<Turn> {
        match tokio::time::timeout(MAX_TURN_WAIT, self.0.clone().acquire_owned()).await {
            Ok(Ok(permit)) => Ok(Turn { began: Instant::now(), permit: Some(permit) }),
            Ok(Err(_)) | Err(_) => Err(Error::overloaded(
                "the server checks the kinds of other workers; send the request again after a moment",
            )
            .into()),
        }
    }
}

struct Turn {
    began: Instant,
    permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (permit, pause) = (self.permit.take(), (self.began.elapsed() * PAUSE_FACTOR).min(MAX_PAUSE));
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            drop(permit);
        });
    }
}

/// Checks the kinds that a worker describes. It may describe only those that it handles. If there are too many, the
/// worker works without them.
pub(super) async fn check_announced(
    server: &Server,
    caller: &Caller,
    handled: Option<&[String]>,
    announced: Vec<AnnouncedKind>,
) -> ApiResult<Announced> {
    check_count("announce", announced.len())?;
    check_names(handled, &announced)?;
    let mut kinds = Vec::with_capacity(announced.len());
    for AnnouncedKind { name, schema, defaults } in announced {
        kinds.push(NewKind { name, schema, defaults });
    }
    let mut turn = None;
    if let KindQueues::Only(queues) = kind_queues(caller) {
        if let Err(error) = check_queue_kinds(&kinds, &queues) {
            refusals::report_kinds(&error);
            return Ok(Announced::default());
        }
        if kinds.iter().any(|kind| kind.schema.is_some()) {
            turn = Some(server.announcements.turn().await?);
        }
    }
    for (i, kind) in kinds.iter().enumerate() {
        check_one(caller, kind).await.map_err(|problem| problem.at(format_args!("announce[{i}]")))?;
    }
    Ok(Announced { kinds, _turn: turn })
}

fn check_names(handled: Option<&[String]>, announced: &[AnnouncedKind]) -> ApiResult<()> {
    let mut names = HashSet::new();
    for (i, AnnouncedKind { name, .. }) in announced.iter().enumerate() {
        let problem = if let Err(error) = check_name("name", name) {
            error.into()
        } else if handled.is_some_and(|handled| !handled.contains(name)) {
            Problem::validation(format!(
                "name: `{name}` is not one of the worker's kinds; add it to `kinds`, or leave it out here"
            ))
        } else if !names.insert(name.as_str()) {
            Problem::validation(format!("name: `{name}` is described twice; describe each kind once"))
        } else {
            continue;
        };
        return Err(problem.at(format_args!("announce[{i}]")));
    }
    Ok(())
}

async fn check_one(caller: &Caller, kind: &NewKind) -> ApiResult<()> {
    let defaults = check_kind(&kind.name, kind.schema.as_deref(), kind.defaults.as_deref()).await?;
    match defaults.and_then(|defaults| defaults.queue) {
        Some(queue) => caller.may_use(&queue).map_err(|problem| problem.at("defaults")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn turns_take_about_a_tenth_of_the_time() {
        let announcements = Announcements::default();
        let began = Instant::now();
        let first = announcements.turn().await.ok();
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(first);
        let second = announcements.turn().await.ok();
        assert!((490..=520).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
        tokio::time::sleep(Duration::from_secs(1)).await;
        let ended = Instant::now();
        drop(second);
        assert!(announcements.turn().await.is_ok());
        assert!(ended.elapsed() <= MAX_PAUSE + Duration::from_millis(20), "{:?}", ended.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_waits_too_long_for_its_turn_is_to_be_sent_again() {
        let announcements = Announcements::default();
        let _first = announcements.turn().await;
        let refused = announcements.turn().await.err().expect("refused").into_response();
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    }
}
