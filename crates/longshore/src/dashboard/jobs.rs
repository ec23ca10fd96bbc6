//! The list of jobs: filters in the URL, pages by key, and actions on some or all of them.

use axum::response::Response;
use maud::{Markup, html};

use super::job_filter::{Ended, FIELDS, JobFilter, KEYS, parse_time};
use super::layout::Section;
use super::url::Params;
use super::widgets::{self, dash, empty, group_url, heading, job_link, queue_link, snippet, time};
use super::{Frame, View, format};
use crate::api::problem::ApiResult;
use crate::job::{JobRecord, Status};
use crate::rules::lifecycle::FAR_FUTURE;
use crate::store::{Count, FailureFilter, Page};

/// The maximum number of kinds and queues that the filters suggest.
const MAX_SUGGESTED: usize = 200;
/// The statuses in the order of the tabs.
const TABS: [Status; 6] = [
    Status::Queued,
    Status::Running,
    Status::Retrying,
    Status::FailedPermanent,
    Status::Succeeded,
    Status::Cancelled,
];

/// What the page shows.
struct Jobs {
    filter: JobFilter,
    page: Page,
    counts: Vec<Count>,
    kinds: Vec<String>,
    queues: Vec<String>,
    /// The error of the failure in the filter.
    error: Option<String>,
}

pub(super) async fn page(view: View) -> ApiResult<Response> {
    let jobs = load(&view).await?;
    Ok(view.respond(Section::Jobs, "Jobs", render(&view.frame, &jobs)))
}

async fn load(view: &View) -> ApiResult<Jobs> {
    let filter = JobFilter::of(&view.frame);
    if let Some(queue) = &filter.list.queue {
        view.caller.may_use(queue)?;
    }
    let (page, counts) = tokio::try_join!(view.data.jobs(&filter.list), view.data.counts())?;
    let covered = counts.iter().filter(|count| view.frame.rights.covers(&count.queue));
    let counts: Vec<Count> = covered.cloned().collect();
    let names = |name: fn(&Count) -> &String| {
        let mut names: Vec<String> = counts.iter().map(|count| name(count).clone()).collect();
        names.sort();
        names.dedup();
        names
    };
    let (kinds, queues) = (names(|count| &count.kind), names(|count| &count.queue));
    let error = match filter.list.failure.filter(|_| view.frame.rights.covers_all()) {
        Some(fingerprint) => {
            let group =
                FailureFilter { fingerprint: Some(fingerprint), limit: 1, ..FailureFilter::default() };
            view.data.failures(&group).await?.first().map(|group| group.error.clone())
        }
        None => None,
    };
    Ok(Jobs { filter, page: (*page).clone(), counts, kinds, queues, error })
}

fn render(frame: &Frame, jobs: &Jobs) -> Markup {
    let enqueue = html! {
        @if frame.rights.enqueue { a .button .primary href=(frame.url("/ui/new")) { "Enqueue a job" } }
    };
    html! {
        (heading("Jobs", "Newest first", enqueue))
        (covered_queues(frame, jobs))
        (tabs(frame, jobs))
        (filters(frame, jobs))
        @for problem in &jobs.filter.problems { p .notice .is-warning { (problem) } }
        (operation(frame))
        @if jobs.page.jobs.is_empty() { (nothing(frame, jobs)) } @else { (table(frame, jobs)) }
        (paging(frame, jobs))
    }
}

/// For a token that covers several queues: the list shows one of them, and links to the others. Other pages show
/// sums over all covered queues and link here.
fn covered_queues(frame: &Frame, jobs: &Jobs) -> Markup {
    let queues = frame.rights.queues.as_deref().unwrap_or_default();
    let (shown, first_page) = (jobs.filter.list.queue.as_ref(), frame.params.without(&["cursor"]));
    html! {
        @if queues.len() > 1 {
            p .notice .is-info {
                "Your token covers " (format::number(queues.len() as u64)) " queues. The list shows one of them: "
                @for (i, queue) in queues.iter().enumerate() {
                    @if i > 0 { ", " }
                    @if Some(queue) == shown { strong { (queue) } }
                    @else { a href=(first_page.with("queue", queue).url(&frame.url("/ui/jobs"))) { (queue) } }
                }
            }
        }
    }
}

// ---- filters ---------------------------------------------------------------

/// How many jobs have a status and match the kind and the queue of the filter; whether it is an estimate.
fn count(jobs: &Jobs, status: Option<Status>) -> (u64, bool) {
    let list = &jobs.filter.list;
    let matching = jobs.counts.iter().filter(|count| {
        status.is_none_or(|status| count.status == status)
            && list.kind.as_ref().is_none_or(|kind| count.kind == *kind)
            && list.queue.as_ref().is_none_or(|queue| count.queue == *queue)
    });
    matching.fold((0, false), |(jobs, estimated), count| (jobs + count.jobs, estimated || count.estimated))
}

fn tabs(frame: &Frame, jobs: &Jobs) -> Markup {
    let first_page = frame.params.without(&["cursor"]);
    let selected = &jobs.filter.list.statuses;
    let tab = |name: &str, status: Option<Status>, params: Params, is_current: bool| {
        let (count, estimated) = count(jobs, status);
        let is_alarming = status == Some(Status::FailedPermanent) && count > 0;
        let exact = format!("{}{}", if estimated { "about " } else { "" }, format::number(count));
        html! {
            a href=(frame.here(&params)) aria-current=[is_current.then_some("true")] {
                (name)
                // There are no counts for other filters than kind and queue.
                @if !jobs.filter.is_detailed() {
                    " " span .count .is-alarming[is_alarming] title=(exact) {
                        @if estimated { "~" }
                        (format::compact(count))
                    }
                }
            }
        }
    };
    html! {
        nav #tabs .tabs aria-label="Status" {
            (tab("All", None, first_page.without(&["status"]), selected.is_empty()))
            @for status in TABS {
                (tab(widgets::status_word(status), Some(status), first_page.with("status", status.as_str()),
                     selected.contains(&status)))
            }
        }
    }
}

fn filters(frame: &Frame, jobs: &Jobs) -> Markup {
    let value = |name: &str| frame.params.get(name).unwrap_or_default();
    let (first, more) = FIELDS.split_at(2);
    let more = more.iter().filter(|(name, _)| *name != "error" && !name.starts_with("ended_"));
    let is_open = more.clone().any(|(name, _)| frame.params.get(name).is_some());
    let ended = jobs.filter.ended;
    html! {
        form #filters .filters role="search" aria-label="Filter jobs" action=(frame.url(&frame.path)) {
            // What the form does not show is kept, too.
            @for name in ["status"].into_iter().chain(KEYS.map(|(name, _)| name)) {
                @if let Some(value) = frame.params.get(name) { input type="hidden" name=(name) value=(value); }
            }
            @for (name, label) in first {
                label { span { (label) }
                    input name=(name) value=(value(name)) list=(format!("list-{name}")) placeholder="any" autocomplete="off";
                }
            }
            label { span { "Error contains" }
                input name="error" value=(value("error")) placeholder="any text" autocomplete="off";
            }
            label { span { "Ended (UTC)" }
                select #ended name="ended" {
                    @for choice in Ended::ALL { option value=(choice.value()) selected[choice == ended] { (choice.label()) } }
                }
            }
            // The stylesheet shows these for the choice `custom`.
            @for (name, label) in [("ended_after", "Ended after (UTC)"), ("ended_before", "Ended before (UTC)")] {
                label .custom { span { (label) } (time_input(frame, name)) }
            }
            button .button { "Filter" }
            details #more-filters open[is_open] {
                summary { "More filters" }
                div .fields {
                    @for (name, label) in more {
                        @if name.ends_with("_than") { label { span { (label) " (UTC)" } (time_input(frame, name)) } }
                        @else { label { span { (label) } input name=(name) value=(value(name)) type="text" autocomplete="off"; } }
                    }
                }
            }
            // The suggestions do not change often, and there may be many.
            datalist #list-kind data-keep { @for kind in jobs.kinds.iter().take(MAX_SUGGESTED) { option value=(kind) {} } }
            datalist #list-queue data-keep { @for queue in jobs.queues.iter().take(MAX_SUGGESTED) { option value=(queue) {} } }
        }
        p #chips .chips {
            @for (names, label, value) in chips(frame, jobs) {
                a .chip href=(frame.here(&frame.params.without(&names).without(&["cursor"]))) title="Remove this filter" {
                    (label) ": " b { (value) } " ×"
                }
            }
        }
    }
}

fn time_input(frame: &Frame, name: &str) -> Markup {
    let value = frame.params.get(name).and_then(for_time_input);
    html! { input name=(name) type="datetime-local" step="1" value=[value] autocomplete="off"; }
}

/// The active filters in words: the parameters that make each of them, its label and its value.
fn chips(frame: &Frame, jobs: &Jobs) -> Vec<(Vec<&'static str>, String, String)> {
    let in_words = |value: &str| parse_time(value).map_or_else(|| value.to_owned(), format::in_words);
    let mut chips = Vec::new();
    for (name, label) in FIELDS.iter().chain(&KEYS).filter(|(name, _)| !name.starts_with("ended_")) {
        let Some(value) = frame.params.get(name) else { continue };
        let value = match *name {
            name if name.ends_with("_than") => in_words(value),
            "failure" => match &jobs.error {
                Some(error) => format::shortened(error.lines().next().unwrap_or_default(), 60),
                None => value.to_owned(),
            },
            _ => value.to_owned(),
        };
        chips.push((vec![*name], (*label).to_owned(), value));
    }
    match jobs.filter.ended {
        Ended::Any => {}
        Ended::Custom => {
            for (name, label) in [("ended_after", "Ended after"), ("ended_before", "Ended before")] {
                if let Some(value) = frame.params.get(name) {
                    chips.push((vec![name], label.to_owned(), in_words(value)));
                }
            }
        }
        ended => {
            let names = vec!["ended", "ended_after", "ended_before"];
            chips.push((names, "Ended".to_owned(), format!("{} (UTC)", ended.label())));
        }
    }
    chips
}

/// A time as browsers accept it in a field. Links of other pages have a zone and milliseconds.
fn for_time_input(text: &str) -> Option<String> {
    parse_time(text).map(|time| time.format("%Y-%m-%dT%H:%M:%S").to_string())
}

// ---- the table -------------------------------------------------------------

/// Jobs in a table that offers no selection.
pub(super) fn rows(frame: &Frame, jobs: &[JobRecord]) -> Markup {
    html! {
        table .list .jobs {
            (columns(false))
            tbody { @for job in jobs { (row(frame, job, false)) } }
        }
    }
}

fn columns(can_act: bool) -> Markup {
    html! {
        thead { tr {
            @if can_act {
                th .select { input type="checkbox" data-select-page aria-label="Select all jobs on this page"; }
            }
            th .c-status { "Status" } th .c-kind { "Kind" } th .c-id { "Id" } th .c-queue { "Queue" }
            th .c-number { "Attempts" } th .c-time { "Created" } th .c-when { "When" } th { "Note" }
        } }
    }
}

fn table(frame: &Frame, jobs: &Jobs) -> Markup {
    let can_act = frame.rights.operate;
    html! {
        div .panel .flush {
            table #jobs .list .jobs {
                (columns(can_act))
                tbody { @for job in &jobs.page.jobs { (row(frame, job, can_act)) } }
            }
        }
        @if can_act { (bulk(frame, jobs)) }
    }
}

fn row(frame: &Frame, job: &JobRecord, can_act: bool) -> Markup {
    html! {
        tr #(format!("job-{}", job.id)) data-row data-status=(widgets::status_word(job.status)) {
            @if can_act {
                td .select { input type="checkbox" name="id" value=(job.id) aria-label=(format!("Select job {}", format::id_ends(job.id.0))); }
            }
            td .c-status { (widgets::status(job.status)) }
            td .c-kind { a .strong data-open href=(frame.url(&format!("/ui/jobs/{}", job.id))) { (job.kind) } }
            td .c-id { (job_link(job.id, frame)) }
            td .c-queue {
                (queue_link(&job.queue, frame))
                @if let Some(group) = &job.group { span .faint { " / " } a .quiet href=(group_url(&job.queue, group, frame)) { (group) } }
            }
            td .c-number { (job.attempts) span .faint { " / " (job.max_attempts) } }
            td .c-time { (time(job.created_at, frame)) }
            td .c-when { (when(frame, job)) }
            td .c-note title=[note_title(job)] { (note(job)) }
        }
    }
}

/// The time that matters for a status: since when it runs, when it is due, when it ended.
fn when(frame: &Frame, job: &JobRecord) -> Markup {
    match job.status {
        Status::Running => match job.locked_at {
            Some(at) => html! { "for " (widgets::since(at, frame)) },
            None => dash(),
        },
        Status::Queued | Status::Retrying if job.run_at >= FAR_FUTURE => {
            html! { span .faint { "waits for tasks" } }
        }
        Status::Queued | Status::Retrying => html! { "due " (time(job.run_at, frame)) },
        _ => match job.finished_at {
            Some(at) => html! { "ended " (time(at, frame)) },
            None => dash(),
        },
    }
}

fn note_title(job: &JobRecord) -> Option<String> {
    let error = job.last_error.as_deref().filter(|_| job.status != Status::Succeeded)?;
    Some(format::shortened(error, 1000))
}

/// The newest error, or else the tags.
fn note(job: &JobRecord) -> Markup {
    let error = job.last_error.as_deref().filter(|_| job.status != Status::Succeeded);
    html! {
        @if job.cancel_requested && job.status == Status::Running { span .tag { "stopping" } " " }
        @match error {
            Some(error) => span .error { (format::shortened(error.lines().next().unwrap_or_default(), 160)) },
            None => @for tag in &job.tags { span .tag { (tag) } " " },
        }
    }
}

/// The bar for actions on the selected jobs. The script shows it when something is selected.
fn bulk(frame: &Frame, jobs: &Jobs) -> Markup {
    let filter = jobs.filter.to_json(&frame.params);
    let matching = (!jobs.filter.is_detailed()).then(|| match jobs.filter.list.statuses.as_slice() {
        [] => count(jobs, None),
        statuses => {
            let counts = statuses.iter().map(|status| count(jobs, Some(*status)));
            counts.fold((0, false), |sum, one| (sum.0 + one.0, sum.1 || one.1))
        }
    });
    // The page has all of them.
    let is_whole = jobs.page.next.is_none() && frame.params.get("cursor").is_none();
    let matching = if is_whole { Some((jobs.page.jobs.len() as u64, false)) } else { matching };
    let is_estimated = matching.is_some_and(|(_, estimated)| estimated);
    let matching = matching.map(|(jobs, _)| jobs);
    let filtered = &jobs.filter.list.statuses;
    let statuses = if filtered.is_empty() { TABS.as_slice() } else { filtered };
    let statuses: Vec<&str> = statuses.iter().map(|status| widgets::status_word(*status)).collect();
    // An operation needs a filter, so that nobody deletes everything by accident.
    // Without a part that cannot be understood, the filter would match more jobs than were meant.
    let can_match =
        filter.as_object().is_some_and(|filter| !filter.is_empty()) && jobs.filter.problems.is_empty();
    html! {
        form #bulk .bulk hidden data-keep-hidden method="post" action=(frame.url("/operations")) data-filter=[can_match.then(|| filter.to_string())]
            data-matching=[matching] data-estimated[is_estimated] data-statuses=(statuses.join(" ")) data-kind=[&jobs.filter.list.kind]
            aria-label="Actions on the selected jobs" {
            p { b #bulk-count { "0 selected" }
                @if can_match {
                    " " button .link type="button" data-select-matching {
                        "Select all matching" @if let Some(matching) = matching {
                            " (" @if is_estimated { "about " } (format::number(matching)) ")"
                        }
                    }
                }
            }
            div .buttons {
                button .button name="action" value="retry" { "Retry" }
                button .button name="action" value="cancel" { "Cancel jobs" }
                button .button .danger name="action" value="delete" { "Delete" }
                button .button .quiet type="button" data-select-none { "Clear" }
            }
        }
    }
}

/// The progress of an operation that was started here. The script reads it and fills this in.
pub(super) fn operation(frame: &Frame) -> Markup {
    html! {
        @if let Some(id) = frame.params.get("operation") {
            section #operation .panel .operation data-operation=(id) data-keep aria-label="Operation" hidden {
                p { b data-operation-text {} " " span .faint data-operation-numbers {} }
                progress data-operation-bar max="100" {}
                div .buttons {
                    @if frame.rights.operate {
                        button .button .small type="button" data-operation-stop hidden { "Stop" }
                        button .button .small type="button" data-operation-resume hidden { "Continue" }
                    }
                    a .button .small .quiet href=(frame.here(&frame.params.without(&["operation"]))) { "Dismiss" }
                }
            }
        }
    }
}

// ---- the end of the page ---------------------------------------------------

fn nothing(frame: &Frame, jobs: &Jobs) -> Markup {
    let is_filtered = jobs.filter.is_filtered();
    html! {
        div #nothing {
            @if jobs.page.next.is_some() {
                (empty("No match so far", html! { p { "The search continues with older jobs." } }))
            } @else if is_filtered {
                (empty("No job matches", html! {
                    p { "Remove a filter above, or " a href=(frame.url("/ui/jobs")) { "show all jobs" } "." }
                }))
            } @else {
                (empty("No jobs yet", html! {
                    p { "Enqueue the first one. It appears here at once:" }
                    (snippet(&first_curl(frame)))
                    p { "A worker runs it: " code { "longshore worker" } ", or your own program." }
                }))
            }
        }
    }
}

/// The request that enqueues a first job. The script replaces the host by that of the page.
pub(super) fn first_curl(frame: &Frame) -> String {
    format!(
        "curl -X POST http://localhost:8080{}/jobs -H 'content-type: application/json' \\\n  \
         -d '{{\"kind\": \"summarize_text\", \"payload\": {{\"text\": \"Ships come. Ships go.\"}}}}'",
        frame.base
    )
}

fn paging(frame: &Frame, jobs: &Jobs) -> Markup {
    let page = &jobs.page;
    let is_short = page.jobs.len() < jobs.filter.list.limit as usize;
    let searched = page.next.filter(|_| is_short).and_then(|next| next.created_at());
    html! {
        nav #paging .paging aria-label="Older and newer" {
            @if frame.params.get("cursor").is_some() {
                a .button .small href=(frame.here(&frame.params.without(&["cursor"]))) { "Newest" }
            }
            @if let Some(next) = page.next {
                a .button .small rel="next" href=(frame.here(&frame.params.with("cursor", next.to_string()))) {
                    @if is_short { "Search on" } @else { "Older" }
                }
            }
            @if let Some(at) = searched { span .faint { "Searched jobs created since " (time(at, frame)) "." } }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::value::RawValue;

    use super::super::{HOSTILE, assert_escaped};
    use super::*;
    use crate::job::JobId;

    /// A job in which every text is hostile.
    pub(in super::super) fn hostile_job(status: Status) -> JobRecord {
        let at = "2031-05-06T07:00:00Z".parse().unwrap();
        let json = || RawValue::from_string(serde_json::to_string(HOSTILE).unwrap()).unwrap();
        JobRecord {
            id: "01990a2b-0000-7000-8000-0123456789ab".parse().unwrap(),
            kind: HOSTILE.into(),
            queue: HOSTILE.into(),
            status,
            priority: 0,
            attempts: 1,
            max_attempts: 3,
            last_error: Some(HOSTILE.into()),
            last_failed_at: Some(at),
            payload: json(),
            result: Some(json()),
            run_at: at,
            locked_at: Some(at),
            locked_by: None,
            locked_by_name: Some(HOSTILE.into()),
            cancel_requested: false,
            idempotency_key: Some(HOSTILE.into()),
            unique_key: Some(HOSTILE.into()),
            group: Some(HOSTILE.into()),
            flow: None,
            task: Some(HOSTILE.into()),
            tags: vec![HOSTILE.into()],
            flags: vec![HOSTILE.into()],
            context: Some(HOSTILE.into()),
            metadata: Some(json()),
            progress: Some(json()),
            timeout: None,
            retry: None,
            interruptions: 0,
            lease_no: 1,
            created_at: at,
            updated_at: at,
            started_at: Some(at),
            finished_at: Some(at),
            errors: Vec::new(),
            errors_omitted: 0,
        }
    }

    fn jobs(frame: &Frame, listed: Vec<JobRecord>) -> Jobs {
        let next: Option<JobId> = Some("01990a2b-0000-7000-8000-0123456789ab".parse().unwrap());
        Jobs {
            filter: JobFilter::of(frame),
            page: Page { jobs: listed, next, next_offset: 0 },
            counts: vec![Count {
                status: Status::Queued,
                queue: HOSTILE.into(),
                kind: HOSTILE.into(),
                jobs: 12_345,
                estimated: true,
            }],
            kinds: vec![HOSTILE.into()],
            queues: vec![HOSTILE.into()],
            error: Some(HOSTILE.into()),
        }
    }

    #[test]
    fn hostile_texts_of_jobs_and_urls_are_escaped() {
        let mut frame = Frame::of_operator("/ui/jobs");
        let names =
            FIELDS.iter().chain(&KEYS).map(|(name, _)| *name).chain(["status", "operation", "cursor"]);
        frame.params = Params::new(names.map(|name| (name.to_owned(), HOSTILE.to_owned())).collect());
        for status in Status::ALL {
            assert_escaped(&render(&frame, &jobs(&frame, vec![hostile_job(status)])));
        }
        assert_escaped(&render(&frame, &jobs(&frame, Vec::new())));
    }

    #[test]
    fn a_reader_sees_no_checkboxes_and_no_buttons_for_actions() {
        let frame = Frame::of_reader("/ui/jobs");
        let page = render(&frame, &jobs(&frame, vec![hostile_job(Status::Queued)])).0;
        assert!(!page.contains("type=\"checkbox\"") && !page.contains("/operations"), "{page}");
        assert!(!page.contains("Enqueue a job"), "{page}");
    }

    #[test]
    fn a_token_for_several_queues_sees_which_one_is_listed_and_links_to_the_others() {
        let mut frame = Frame::of_reader("/ui/jobs");
        frame.params = Params::new(vec![("status".into(), "queued".into()), ("cursor".into(), "x".into())]);
        frame.rights.queues = Some(vec!["mail".into()]);
        let listed = |frame: &Frame| {
            let listed = jobs(frame, vec![hostile_job(Status::Queued)]);
            render(frame, &Jobs { filter: JobFilter::of(frame), ..listed }).0
        };
        assert!(!listed(&frame).contains("Your token covers"));
        frame.rights.queues = Some(vec!["mail".into(), "a b".into()]);
        let page = listed(&frame);
        assert!(page.contains("<strong>mail</strong>, "), "{page}");
        assert!(page.contains("href=\"/q/ui/jobs?status=queued&amp;queue=a%20b\">a b</a>"), "{page}");
    }

    #[test]
    fn links_to_other_pages_and_statuses_keep_the_filters() {
        let mut frame = Frame::of_operator("/ui/jobs");
        frame.params = Params::new(vec![("queue".into(), "mail".into()), ("cursor".into(), "x".into())]);
        let page = render(&frame, &jobs(&frame, vec![hostile_job(Status::Queued)])).0;
        assert!(page.contains("href=\"/q/ui/jobs?queue=mail&amp;status=running\""), "{page}");
        assert!(
            page.contains("href=\"/q/ui/jobs?queue=mail&amp;cursor=01990a2b-0000-7000-8000-0123456789ab\""),
            "{page}"
        );
    }

    #[test]
    fn counts_are_shown_only_if_they_obey_every_filter() {
        let page = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            let frame = Frame { params: Params::new(pairs), ..Frame::of_operator("/ui/jobs") };
            render(&frame, &jobs(&frame, vec![hostile_job(Status::Queued)])).0
        };
        assert!(page(&[("kind", HOSTILE), ("ended", "any")]).contains("about 12,345"));
        assert!(!page(&[("kind", HOSTILE), ("ended", "today")]).contains("class=\"count"));
        assert!(!page(&[("tag", "x")]).contains("class=\"count"));
        assert!(!page(&[]).contains("is-alarming"), "no job has failed");
    }

    #[test]
    fn chips_are_words() {
        let fingerprint = crate::rules::fingerprint::Fingerprint::of("a", "b").to_string();
        let pairs = [
            ("failure", fingerprint.as_str()),
            ("newer_than", "2031-05-06T07:08:09.000Z"),
            ("ended", "yesterday"),
        ];
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let frame = Frame { params: Params::new(pairs), ..Frame::of_operator("/ui/jobs") };
        let mut jobs = jobs(&frame, Vec::new());
        jobs.error = Some("550 unknown user\nat line 7".into());
        let values: Vec<String> = chips(&frame, &jobs).into_iter().map(|(_, _, value)| value).collect();
        assert_eq!(values, ["6 May 2031 07:08 UTC", "550 unknown user", "yesterday (UTC)"]);
    }

    #[test]
    fn the_bar_says_what_the_filter_selects() {
        let mut frame = Frame::of_operator("/ui/jobs");
        frame.params =
            Params::new(vec![("status".into(), "failed_permanent".into()), ("kind".into(), "mail".into())]);
        let mut jobs = jobs(&frame, vec![hostile_job(Status::FailedPermanent)]);
        let page = render(&frame, &jobs).0;
        assert!(page.contains("data-statuses=\"failed\" data-kind=\"mail\""), "{page}");
        jobs.page.next = None;
        let page = render(&frame, &jobs).0;
        assert!(page.contains("data-matching=\"1\""), "the page has all of them: {page}");
    }

    #[test]
    fn all_jobs_cannot_be_selected_without_a_filter() {
        let mut frame = Frame::of_operator("/ui/jobs");
        let page = render(&frame, &jobs(&frame, vec![hostile_job(Status::Queued)])).0;
        assert!(!page.contains("data-select-matching"), "{page}");
        frame.params = Params::new(vec![("status".into(), "queued".into())]);
        let page = render(&frame, &jobs(&frame, vec![hostile_job(Status::Queued)])).0;
        assert!(page.contains("data-filter=\"{&quot;status&quot;:[&quot;queued&quot;]}\""), "{page}");
        assert!(page.contains("Select all matching (about 12,345)"), "an estimate: {page}");
        frame.params = Params::new(vec![("status".into(), "bogus".into()), ("kind".into(), "mail".into())]);
        let page = render(&frame, &jobs(&frame, vec![hostile_job(Status::Queued)])).0;
        assert!(!page.contains("data-select-matching"), "the filter would match more than was meant: {page}");
    }
}
