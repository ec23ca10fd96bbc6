//! The form that enqueues a job. The server checks the payload against the schema of the kind.

use std::sync::Arc;

use axum::response::Response;
use maud::{Markup, html};
use serde_json::{Map, Value, json};

use super::kinds::visible;
use super::layout::Section;
use super::widgets::{Action, Look, heading, json_block};
use super::{Frame, View, json as json_text};
use crate::api::problem::{ApiResult, Problem, Slug};
use crate::job::{JobId, JobRecord};
use crate::store::{KindRecord, Scope};

/// What the page shows.
struct NewJob {
    kinds: Vec<KindRecord>,
    /// The job to clone.
    from: Option<Arc<JobRecord>>,
}

pub(super) async fn page(view: View) -> ApiResult<Response> {
    view.caller.must_have(Scope::Enqueue)?;
    let from = match view.frame.params.get("from") {
        Some(id) => {
            let job = view.data.job(id.parse::<JobId>().map_err(Problem::in_url)?).await?;
            view.caller.may_access(&job.queue)?;
            let dashboard = &view.frame.dashboard;
            if dashboard.hides_payloads || !dashboard.redacted(&job.kind).is_empty() {
                return Err(Problem::new(
                    Slug::Forbidden,
                    "this dashboard does not show the whole payload of this job",
                ));
            }
            Some(job)
        }
        None => None,
    };
    let kinds = view.data.kinds().await?;
    let kinds = visible(&kinds, &view.frame.rights).cloned().collect();
    let content = render(&view.frame, &NewJob { kinds, from });
    Ok(view.respond(Section::Jobs, "Enqueue a job", content))
}

fn render(frame: &Frame, new: &NewJob) -> Markup {
    let from = new.from.as_deref();
    let kind = from.map(|job| job.kind.as_str()).or(frame.params.get("kind")).unwrap_or_default();
    let registered = new.kinds.iter().find(|registered| registered.name == kind);
    let schema = registered.and_then(|registered| registered.schema.as_ref());
    let payload = match (from, schema) {
        (Some(job), _) => {
            json_text::indent(job.payload.get(), &[]).unwrap_or_else(|| job.payload.get().to_owned())
        }
        (None, Some(schema)) => example(schema.get()),
        (None, None) => "{}".into(),
    };
    let enqueue = Action::post(frame.url("/jobs"), "Enqueue", "The job is enqueued.")
        .look(Look::Primary)
        .then(frame.url("/ui/jobs/{id}"))
        .fields(fields(new, kind, &payload));
    let title = if from.is_some() { "Clone and edit" } else { "Enqueue a job" };
    let note = match from {
        Some(job) => {
            html! { "A copy of " (super::widgets::job_link(job.id, frame)) "; that job stays as it is" }
        }
        None => html! { "The server checks the payload against the schema of the kind" },
    };
    html! {
        p .crumbs { a href=(frame.url("/ui/jobs")) { "Jobs" } }
        (heading(title, note, html! {}))
        div .columns {
            section .panel .panel-body { (enqueue) }
            aside aria-label="Kind" {
                @match schema {
                    Some(schema) => (json_block("Schema of the payload", schema.get(), &[], &frame.url("/kinds"))),
                    None => p .notice .is-info { "Choose a kind with a schema, and its schema is shown here." },
                }
            }
        }
    }
}

fn fields(new: &NewJob, kind: &str, payload: &str) -> Markup {
    let from = new.from.as_deref();
    let text = |name: &str, label: &str, value: Option<&str>, hint: &str| {
        html! {
            label { span { (label) } input name=(name) value=[value] placeholder=(hint) autocomplete="off" data-keep; }
        }
    };
    let number = |name: &str, label: &str, value: Option<String>, hint: &str| {
        html! {
            label { span { (label) }
                input name=(name) type="number" data-json="number" value=[value] placeholder=(hint) data-keep; }
        }
    };
    // A tag with a comma would become two.
    let has_plain_tags =
        from.is_none_or(|job| job.tags.iter().all(|tag| !tag.contains(',') && tag.trim() == tag));
    let tags = from.filter(|_| has_plain_tags).map(|job| job.tags.join(", "));
    let defaults = defaults_of(new, kind);
    // What applies if the field stays empty.
    let hint = |name: &str, otherwise: &str| match &defaults[name] {
        Value::Null => otherwise.to_owned(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    };
    html! {
        label { span { "Kind" }
            input name="kind" value=(kind) required list="kinds" autocomplete="off" data-kind data-keep; }
        datalist #kinds { @for kind in &new.kinds { option value=(kind.name) {} } }
        label { span { "Payload (JSON)" }
            textarea name="payload" data-json="raw" rows="14" spellcheck="false" required data-keep { (payload) } }
        div .fields {
            (text("queue", "Queue", from.map(|job| job.queue.as_str()), &hint("queue", "default")))
            (text("group", "Group", from.and_then(|job| job.group.as_deref()), "none"))
            (number("priority", "Priority", from.map(|job| job.priority.to_string()), &hint("priority", "0")))
            (number("max_attempts", "Attempts", from.map(|job| job.max_attempts.to_string()), &hint("max_attempts", "3")))
            (number("delay_seconds", "Start after (seconds)", None, "now"))
            @if has_plain_tags {
                label { span { "Tags" }
                    input name="tags" data-json="list" value=[tags] placeholder="separated by commas" autocomplete="off" data-keep; }
            }
            (text("unique_key", "Unique key", None, "none"))
        }
        @if let Some(job) = from {
            @let also = also_copied(job, has_plain_tags);
            @for (name, value) in &also { input type="hidden" name=(name) data-json="raw" value=(value); }
            p .faint { "Also copied: " (also.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")) "." }
        }
    }
}

/// The settings of a job that a clone has too and that have no field of their own in the form, as JSON.
fn also_copied(job: &JobRecord, has_plain_tags: bool) -> Vec<(&'static str, String)> {
    let timeout = job.timeout.map_or_else(|| json!("none"), |timeout| json!(timeout.as_secs_f64()));
    [
        ("tags", (!has_plain_tags).then(|| json!(job.tags).to_string())),
        ("flags", (!job.flags.is_empty()).then(|| json!(job.flags).to_string())),
        ("timeout_seconds", Some(timeout.to_string())),
        ("context", job.context.as_ref().map(|context| json!(context).to_string())),
        ("retry", job.retry.as_ref().map(|retry| json!(retry).to_string())),
        // As it is stored, so that no number changes.
        ("metadata", job.metadata.as_ref().map(|metadata| metadata.get().to_owned())),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name, value?)))
    .collect()
}

/// The settings of a kind's jobs that name no others.
fn defaults_of(new: &NewJob, kind: &str) -> Value {
    let registered = new.kinds.iter().find(|registered| registered.name == kind);
    let defaults = registered.and_then(|registered| registered.defaults.as_ref());
    defaults.and_then(|defaults| serde_json::from_str(defaults.get()).ok()).unwrap_or_default()
}

/// A payload with the properties of a schema, to fill in.
fn example(schema: &str) -> String {
    let schema: Value = serde_json::from_str(schema).unwrap_or_default();
    let text = serde_json::to_string(&value_for(&schema, 0)).unwrap_or_default();
    json_text::indent(&text, &[]).unwrap_or(text)
}

/// A value that has the type of the schema.
fn value_for(schema: &Value, depth: u8) -> Value {
    let given = [
        &schema["default"],
        &schema["example"],
        &schema["examples"][0],
        &schema["const"],
        &schema["enum"][0],
    ];
    if let Some(given) = given.into_iter().find(|given| !given.is_null()) {
        return given.clone();
    }
    match schema["type"].as_str() {
        Some("string") => "".into(),
        Some("integer" | "number") => 0.into(),
        Some("boolean") => false.into(),
        Some("array") => Value::Array(Vec::new()),
        Some("object") | None if depth < 4 && schema["properties"].is_object() => {
            let required = |name: &str| {
                let listed = schema["required"].as_array();
                listed.is_none_or(|listed| listed.iter().any(|one| one == name))
            };
            let properties = schema["properties"].as_object().into_iter().flatten();
            let wanted = properties.filter(|(name, _)| required(name));
            wanted
                .map(|(name, schema)| (name.clone(), value_for(schema, depth + 1)))
                .collect::<Map<_, _>>()
                .into()
        }
        Some("object") => Value::Object(Map::new()),
        None if depth == 0 => Value::Object(Map::new()),
        _ => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::super::jobs::tests::hostile_job;
    use super::super::{HOSTILE, assert_escaped};
    use super::*;
    use crate::job::Status;

    #[test]
    fn a_clone_has_the_fields_of_the_job_and_everything_is_escaped() {
        let new = NewJob { kinds: Vec::new(), from: Some(Arc::new(hostile_job(Status::Succeeded))) };
        assert_escaped(&render(&Frame::of_operator("/ui/new"), &new));
        let mut frame = Frame::of_operator("/ui/new");
        frame.params = super::super::url::Params::new(vec![("kind".into(), HOSTILE.into())]);
        assert_escaped(&render(&frame, &NewJob { kinds: Vec::new(), from: None }));
    }

    #[test]
    fn a_clone_loses_no_setting() {
        let mut job = hostile_job(Status::Succeeded);
        job.tags = vec!["x,y".into()];
        job.flags = vec!["infrastructure_resilient".into()];
        job.timeout = None;
        job.metadata = serde_json::value::RawValue::from_string(r#"{"n":9223372036854775809}"#.into()).ok();
        let also = also_copied(&job, false);
        let of = |name| also.iter().find(|(one, _)| *one == name).map(|(_, value)| value.as_str());
        assert_eq!(of("tags"), Some(r#"["x,y"]"#));
        assert_eq!(of("flags"), Some(r#"["infrastructure_resilient"]"#));
        assert_eq!(
            (of("timeout_seconds"), of("metadata")),
            (Some("\"none\""), Some(r#"{"n":9223372036854775809}"#))
        );
    }

    #[test]
    fn a_schema_gives_a_payload_to_fill_in() {
        let schema = r#"{"type":"object","required":["to","size"],"properties":{
            "to":{"type":"string"},"size":{"type":"integer","default":9007199254740993},"note":{"type":"string"}}}"#;
        assert_eq!(example(schema), "{\n  \"size\": 9007199254740993,\n  \"to\": \"\"\n}");
        assert_eq!(example("true"), "{}");
    }
}
