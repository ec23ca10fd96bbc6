//! Which jobs a list shows: the parameters of its URL, which are those of `GET /jobs`.

use chrono::{DateTime, Days, NaiveDateTime, NaiveTime, TimeDelta, Utc};
use serde_json::{Map, Value};

use super::url::Params;
use super::{Frame, Rights};
use crate::job::{JobId, Status};
use crate::rules::fingerprint::Fingerprint;
use crate::store::{ListFilter, Payloads};

/// The number of jobs on a page.
pub(super) const PAGE_SIZE: u32 = 50;

/// The parameters that select jobs, with their labels. Status is not among them: it has tabs.
pub(super) const FIELDS: [(&str, &str); 9] = [
    ("kind", "Kind"),
    ("queue", "Queue"),
    ("group", "Group"),
    ("tag", "Tag"),
    ("error", "Error contains"),
    ("newer_than", "Created after"),
    ("older_than", "Created before"),
    ("ended_after", "Ended after"),
    ("ended_before", "Ended before"),
];
/// When jobs ended, as the form offers it. All days are days in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Any,
    LastHour,
    Today,
    Yesterday,
    LongAgo,
    /// Between `ended_after` and `ended_before`.
    Custom,
}

/// For how long a job must have ended for [`Ended::LongAgo`].
const LONG_AGO: TimeDelta = TimeDelta::hours(12);

impl Ended {
    pub(super) const ALL: [Ended; 6] =
        [Ended::Any, Ended::LastHour, Ended::Today, Ended::Yesterday, Ended::LongAgo, Ended::Custom];

    /// The choice that the URL names. Links of other pages name only the times.
    pub(super) fn of(params: &Params) -> Self {
        let named = params.get("ended");
        let has_times = ["ended_after", "ended_before"].iter().any(|name| params.get(name).is_some());
        match Ended::ALL.into_iter().find(|ended| named == Some(ended.value())) {
            Some(Ended::Custom) | None if has_times => Ended::Custom,
            Some(Ended::Custom) | None => Ended::Any,
            Some(ended) => ended,
        }
    }

    /// The value of the parameter `ended`.
    pub(super) fn value(self) -> &'static str {
        match self {
            Ended::Any => "any",
            Ended::LastHour => "hour",
            Ended::Today => "today",
            Ended::Yesterday => "yesterday",
            Ended::LongAgo => "over-12h",
            Ended::Custom => "custom",
        }
    }

    pub(super) fn label(self) -> &'static str {
        match self {
            Ended::Any => "any time",
            Ended::LastHour => "last hour",
            Ended::Today => "today",
            Ended::Yesterday => "yesterday",
            Ended::LongAgo => "more than 12 hours ago",
            Ended::Custom => "custom…",
        }
    }

    /// The first instant, and the one after the last.
    fn bounds(self, now: DateTime<Utc>) -> (Option<DateTime<Utc>>, Option<DateTime<Utc>>) {
        let midnight = now.date_naive().and_time(NaiveTime::MIN).and_utc();
        match self {
            Ended::Any | Ended::Custom => (None, None),
            Ended::LastHour => (Some(now - TimeDelta::hours(1)), None),
            Ended::Today => (Some(midnight), None),
            Ended::Yesterday => (midnight.checked_sub_days(Days::new(1)), Some(midnight)),
            Ended::LongAgo => (None, Some(now - LONG_AGO)),
        }
    }
}

/// Further parameters that select jobs. Links of other pages use them.
pub(super) const KEYS: [(&str, &str); 3] =
    [("unique_key", "Unique key"), ("idempotency_key", "Idempotency key"), ("failure", "Failure")];

/// The filter of a list, and what is wrong with its URL.
pub(super) struct JobFilter {
    pub(super) list: ListFilter,
    pub(super) ended: Ended,
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
        let ended = Ended::of(params);
        let (ended_after, ended_before) = match ended {
            Ended::Custom => (time("ended_after"), time("ended_before")),
            ended => ended.bounds(frame.now),
        };
        let list = ListFilter {
            statuses,
            kind: text("kind"),
            queue: text("queue").or_else(|| only_queue(&frame.rights)),
            group: text("group"),
            tag: text("tag"),
            error: text("error"),
            failure,
            idempotency_key: text("idempotency_key"),
            unique_key: text("unique_key"),
            newer_than: time("newer_than"),
            older_than: time("older_than"),
            ended_after,
            ended_before,
            cursor: params.get("cursor").and_then(|cursor| cursor.parse::<JobId>().ok()),
            limit: PAGE_SIZE,
            payloads: Payloads::Omit,
            ..ListFilter::default()
        };
        JobFilter { list, ended, problems }
    }

    /// Whether not all jobs are selected.
    pub(super) fn is_filtered(&self) -> bool {
        let list = &self.list;
        self.is_detailed() || !list.statuses.is_empty() || list.kind.is_some() || list.queue.is_some()
    }

    /// Whether jobs are selected by more than status, kind and queue, for which there are counts.
    pub(super) fn is_detailed(&self) -> bool {
        let list = &self.list;
        [&list.group, &list.tag, &list.error, &list.idempotency_key, &list.unique_key]
            .into_iter()
            .any(Option::is_some)
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
        for (name, _) in FIELDS.iter().chain(&KEYS).filter(|(name, _)| !name.starts_with("ended_")) {
            if let Some(value) = params.get(name) {
                let value = match parse_time(value).filter(|_| name.ends_with("_than")) {
                    Some(time) => super::format::machine(time),
                    None => value.to_owned(),
                };
                body.insert((*name).to_owned(), value.into());
            }
        }
        for (name, time) in [("ended_after", self.list.ended_after), ("ended_before", self.list.ended_before)]
        {
            if let Some(time) = time {
                body.insert(name.into(), super::format::machine(time).into());
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
    fn times_of_the_end_are_chosen_in_words_and_in_utc() {
        // It is 07:08:09 on 6 May.
        let bounds = |pairs: &[(&str, &str)]| {
            let frame = frame(pairs);
            let filter = JobFilter::of(&frame);
            assert!(filter.problems.is_empty(), "{:?}", filter.problems);
            let time =
                |time: Option<DateTime<Utc>>| time.map(super::super::format::machine).unwrap_or_default();
            (filter.ended, time(filter.list.ended_after), time(filter.list.ended_before))
        };
        let expected = |ended, after: &str, before: &str| (ended, after.to_owned(), before.to_owned());
        for (name, ended, after, before) in [
            ("hour", Ended::LastHour, "2031-05-06T06:08:09.000Z", ""),
            ("today", Ended::Today, "2031-05-06T00:00:00.000Z", ""),
            ("yesterday", Ended::Yesterday, "2031-05-05T00:00:00.000Z", "2031-05-06T00:00:00.000Z"),
            ("over-12h", Ended::LongAgo, "", "2031-05-05T19:08:09.000Z"),
            ("any", Ended::Any, "", ""),
            ("nonsense", Ended::Any, "", ""),
        ] {
            assert_eq!(bounds(&[("ended", name)]), expected(ended, after, before));
        }
        let times = [("ended_after", "2031-05-04T10:00"), ("ended_before", "2031-05-04T11:00:01.500Z")];
        let custom = expected(Ended::Custom, "2031-05-04T10:00:00.000Z", "2031-05-04T11:00:01.500Z");
        assert_eq!(bounds(&times), custom, "links of other pages name only the times");
        assert_eq!(bounds(&[("ended", "custom"), times[0], times[1]]), custom);
        // The form sends the fields also if they are hidden.
        assert_eq!(bounds(&[("ended", "any"), times[0]]), expected(Ended::Any, "", ""));
        let frame = frame(&[("ended", "yesterday"), ("kind", "a")]);
        assert_eq!(
            JobFilter::of(&frame).to_json(&frame.params).to_string(),
            r#"{"ended_after":"2031-05-05T00:00:00.000Z","ended_before":"2031-05-06T00:00:00.000Z","kind":"a"}"#
        );
    }

    #[test]
    fn values_that_cannot_be_used_are_reported_and_ignored() {
        let filter = JobFilter::of(&frame(&[("status", "done"), ("older_than", "soon")]));
        assert_eq!(filter.problems.len(), 2, "{:?}", filter.problems);
        assert!(filter.list.statuses.is_empty());
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
