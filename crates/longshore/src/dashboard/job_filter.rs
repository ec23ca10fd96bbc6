//! Which jobs a list shows: the parameters of its URL, which are those of `GET /jobs`.

use chrono::{DateTime, NaiveDateTime, Utc};
use serde_json::{Map, Value};

use super::url::Params;
use super::{Frame, Rights};
use crate::failure::Fingerprint;
use crate::id_pattern::IdPattern;
use crate::job::{JobId, Status};
use crate::store::{ListFilter, Payloads};

/// The number of jobs on a page.
pub(super) const PAGE_SIZE: u32 = 50;

/// The parameters that select jobs, with their labels. Status is not among them: it has tabs.
pub(super) const FIELDS: [(&str, &str); 10] = [
    ("kind", "Kind"),
    ("queue", "Queue"),
    ("group", "Group"),
    ("tag", "Tag"),
    ("error", "Error contains"),
    ("id", "Id begins with"),
    ("newer_than", "Created after"),
    ("older_than", "Created before"),
    ("ended_after", "Ended after"),
    ("ended_before", "Ended before"),
];
/// Further parameters that select jobs. Links of other pages use them.
pub(super) const KEYS: [(&str, &str); 3] =
    [("unique_key", "Unique key"), ("idempotency_key", "Idempotency key"), ("failure", "Failure")];

/// The filter of a list, and what is wrong with its URL.
pub(super) struct JobFilter {
    pub(super) list: ListFilter,
    /// Values that cannot be used, for people.
    pub(super) problems: Vec<String>,
}

impl JobFilter {
    pub(super) fn of(frame: &Frame) -> Self {
        let params = &frame.params;
        let mut problems = Vec::new();
        let text = |name: &str| params.get(name).map(str::to_owned);
        let mut statuses = Vec::new();
        for status in params.list("status") {
            match status.parse::<Status>() {
                Ok(status) if statuses.contains(&status) => {}
                Ok(status) => statuses.push(status),
                Err(error) => problems.push(error.to_string()),
            }
        }
        let mut id = None;
        if let Some(pattern) = params.get("id") {
            match pattern.parse::<IdPattern>() {
                Ok(pattern) => id = Some(pattern),
                Err(error) => problems.push(error.to_string()),
            }
        }
        let mut failure = None;
        if let Some(fingerprint) = params.get("failure") {
            match fingerprint.parse::<Fingerprint>() {
                Ok(fingerprint) => failure = Some(fingerprint),
                Err(error) => problems.push(error.to_string()),
            }
        }
        let mut time = |name: &str| {
            let text = params.get(name)?;
            let parsed = parse_time(text);
            if parsed.is_none() {
                problems.push(format!("{name}: `{text}` is not a time; use 2031-05-06T07:08"));
            }
            parsed
        };
        let list = ListFilter {
            statuses,
            kind: text("kind"),
            queue: text("queue").or_else(|| only_queue(&frame.rights)),
            group: text("group"),
            tag: text("tag"),
            error: text("error"),
            failure,
            id,
            idempotency_key: text("idempotency_key"),
            unique_key: text("unique_key"),
            newer_than: time("newer_than"),
            older_than: time("older_than"),
            ended_after: time("ended_after"),
            ended_before: time("ended_before"),
            cursor: params.get("cursor").and_then(|cursor| cursor.parse::<JobId>().ok()),
            limit: PAGE_SIZE,
            payloads: Payloads::Omit,
            ..ListFilter::default()
        };
        JobFilter { list, problems }
    }

    /// Whether jobs are selected by more than status, kind and queue, for which there are counts.
    pub(super) fn is_detailed(&self) -> bool {
        let list = &self.list;
        [&list.group, &list.tag, &list.error, &list.idempotency_key, &list.unique_key]
            .into_iter()
            .any(Option::is_some)
            || list.id.is_some()
            || list.failure.is_some()
            || [list.newer_than, list.older_than, list.ended_after, list.ended_before]
                .into_iter()
                .any(|time| time.is_some())
    }

    /// The filter as the body of an operation on all matching jobs.
    pub(super) fn to_json(&self, params: &Params) -> Value {
        let mut body = Map::new();
        if !self.list.statuses.is_empty() {
            let statuses = self.list.statuses.iter().map(|status| Value::from(status.as_str()));
            body.insert("status".into(), statuses.collect());
        }
        for (name, _) in FIELDS.iter().chain(&KEYS) {
            if let Some(value) = params.get(name) {
                let value = match parse_time(value)
                    .filter(|_| name.ends_with("_than") || name.starts_with("ended_"))
                {
                    Some(time) => super::format::machine(time),
                    None => value.to_owned(),
                };
                body.insert((*name).to_owned(), value.into());
            }
        }
        if let (false, Some(queue)) = (body.contains_key("queue"), &self.list.queue) {
            body.insert("queue".into(), queue.as_str().into());
        }
        Value::Object(body)
    }
}

/// A token that covers one queue, or several, starts with the first of them: the API does not list
/// jobs of all queues for it.
fn only_queue(rights: &Rights) -> Option<String> {
    rights.queues.as_ref()?.first().cloned()
}

/// A time with a zone, or one in UTC as the input of a form sends it.
pub(super) fn parse_time(text: &str) -> Option<DateTime<Utc>> {
    if let Ok(time) = text.parse::<DateTime<Utc>>() {
        return Some(time);
    }
    let formats = ["%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M"];
    formats
        .iter()
        .find_map(|format| NaiveDateTime::parse_from_str(text, format).ok())
        .map(|time| time.and_utc())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(pairs: &[(&str, &str)]) -> Frame {
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Frame { params: Params::new(pairs), ..Frame::of_operator("/ui/jobs") }
    }

    #[test]
    fn the_url_selects_jobs_like_the_api() {
        let frame = frame(&[
            ("status", "queued,retrying"),
            ("queue", "mail"),
            ("newer_than", "2031-05-06T07:08"),
            ("colour", "red"),
        ]);
        let filter = JobFilter::of(&frame);
        assert_eq!(filter.list.statuses, [Status::Queued, Status::Retrying]);
        assert_eq!(filter.list.queue.as_deref(), Some("mail"));
        assert!(filter.problems.is_empty() && filter.is_detailed());
        let body = filter.to_json(&frame.params).to_string();
        assert_eq!(
            body,
            r#"{"newer_than":"2031-05-06T07:08:00.000Z","queue":"mail","status":["queued","retrying"]}"#
        );
    }

    #[test]
    fn values_that_cannot_be_used_are_reported_and_ignored() {
        let filter = JobFilter::of(&frame(&[("status", "done"), ("id", "xyz"), ("older_than", "soon")]));
        assert_eq!(filter.problems.len(), 3, "{:?}", filter.problems);
        assert!(filter.list.statuses.is_empty() && filter.list.id.is_none());
    }

    #[test]
    fn a_token_for_some_queues_starts_with_one_of_them() {
        let mut frame = frame(&[]);
        frame.rights.queues = Some(vec!["mail".into(), "images".into()]);
        let filter = JobFilter::of(&frame);
        assert_eq!(filter.list.queue.as_deref(), Some("mail"));
        assert_eq!(filter.to_json(&frame.params).to_string(), r#"{"queue":"mail"}"#);
    }
}
