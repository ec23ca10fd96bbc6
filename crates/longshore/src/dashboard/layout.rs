//! The frame around every page: navigation, search, dialogs, and the files it loads.

use chrono::{DateTime, Utc};
use maud::{DOCTYPE, Markup, html};

use super::{Frame, Rights, assets, format, icons};

/// The parts of the dashboard, as the navigation lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Section {
    Overview,
    Jobs,
    Queues,
    Flows,
    Failures,
    Kinds,
    Workers,
    Cron,
    Settings,
    /// A page outside of the navigation.
    Other,
}

impl Section {
    const LISTED: [Section; 9] = [
        Section::Overview,
        Section::Jobs,
        Section::Queues,
        Section::Flows,
        Section::Failures,
        Section::Kinds,
        Section::Workers,
        Section::Cron,
        Section::Settings,
    ];

    fn name(self) -> &'static str {
        match self {
            Section::Overview => "Overview",
            Section::Jobs => "Jobs",
            Section::Queues => "Queues",
            Section::Flows => "Flows",
            Section::Failures => "Failures",
            Section::Kinds => "Kinds",
            Section::Workers => "Workers",
            Section::Cron => "Cron",
            Section::Settings => "Settings",
            Section::Other => "",
        }
    }

    fn path(self) -> &'static str {
        match self {
            Section::Overview | Section::Other => "/ui",
            Section::Jobs => "/ui/jobs",
            Section::Queues => "/ui/queues",
            Section::Flows => "/ui/flows",
            Section::Failures => "/ui/failures",
            Section::Kinds => "/ui/kinds",
            Section::Workers => "/ui/workers",
            Section::Cron => "/ui/cron",
            Section::Settings => "/ui/settings",
        }
    }

    fn icon(self) -> Markup {
        match self {
            Section::Overview | Section::Other => icons::overview(),
            Section::Jobs => icons::jobs(),
            Section::Queues => icons::queues(),
            Section::Flows => icons::flows(),
            Section::Failures => icons::warning(),
            Section::Kinds => icons::kinds(),
            Section::Workers => icons::workers(),
            Section::Cron => icons::cron(),
            Section::Settings => icons::settings(),
        }
    }

    /// The sections that the caller may see. The API does not show everything to a token that is
    /// limited to queues.
    fn listed(rights: &Rights) -> impl Iterator<Item = Section> {
        let needs_all = |section: &Section| {
            matches!(section, Section::Flows | Section::Failures | Section::Workers | Section::Cron)
        };
        let is_visible = move |section: &Section| rights.covers_all() || !needs_all(section);
        Section::LISTED.into_iter().filter(is_visible)
    }
}

/// A whole page.
pub(super) fn whole(frame: &Frame, section: Section, title: &str, content: Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            (head(&frame.base, title))
            body data-base=(frame.base) data-live {
                a .skip href="#main" { "Skip to content" }
                (side(frame, section))
                (main(section, frame.now, content))
                (dialogs(frame))
            }
        }
    }
}

/// The part of a page that changes.
pub(super) fn main(section: Section, now: DateTime<Utc>, content: Markup) -> Markup {
    html! { main #main tabindex="-1" data-section=(section.name()) data-now=(format::machine(now)) { (content) } }
}

/// A page without navigation, for somebody who has not logged in.
pub(super) fn bare(base: &str, title: &str, content: Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            (head(base, title))
            body .bare data-base=(base) { main #main { (content) } (toasts()) }
        }
    }
}

fn head(base: &str, title: &str) -> Markup {
    html! {
        head {
            meta charset="utf-8";
            meta name="viewport" content="width=device-width, initial-scale=1";
            meta name="color-scheme" content="light dark";
            title { (title) " · Longshore" }
            link rel="icon" href=(format!("{base}{}", assets::ICON.path));
            link rel="stylesheet" href=(format!("{base}{}", assets::STYLES.path));
            // Sets the theme, so the page must not be shown before.
            script type="module" blocking="render" src=(format!("{base}{}", assets::SCRIPT.path)) {}
        }
    }
}

fn side(frame: &Frame, current: Section) -> Markup {
    let rights = &frame.rights;
    html! {
        header .side {
            a .brand href=(frame.url("/ui")) {
                img src=(frame.url(&assets::ICON.path)) width="24" height="24" alt="";
                "Longshore"
            }
            form .find role="search" action=(frame.url("/ui/search")) {
                (icons::search())
                input #find type="search" name="q" placeholder="Search" aria-label="Search jobs, kinds, queues and groups"
                    autocomplete="off";
                kbd { "⌘K" }
            }
            nav aria-label="Pages" {
                @for section in Section::listed(rights) {
                    a href=(frame.url(section.path())) aria-current=[(section == current).then_some("page")] {
                        (section.icon()) span { (section.name()) }
                    }
                }
            }
            div .foot {
                p #live .live title="This page updates itself." { i {} span { "Live" } }
                p .who {
                    @match &rights.token {
                        Some(token) => {
                            span title="The token that you logged in with" { (token) }
                            @if !rights.operate { span .tag { "read-only" } }
                            button .link type="button" data-logout { "Log out" }
                        }
                        None => span .faint title="This server requires no tokens." { "Open access" },
                    }
                }
                p {
                    button .icon-button type="button" data-theme-toggle aria-label="Change between light and dark" {
                        (icons::theme())
                    }
                    a .icon-button href=(frame.url("/ui/keys")) data-keys aria-label="Keyboard shortcuts" { "?" }
                    span .faint .version { (env!("CARGO_PKG_VERSION")) }
                }
            }
        }
    }
}

fn toasts() -> Markup {
    html! { div #toasts role="status" aria-live="polite" {} }
}

fn dialogs(frame: &Frame) -> Markup {
    html! {
        (toasts())
        dialog #confirm aria-labelledby="confirm-text" {
            form method="dialog" {
                p #confirm-text {}
                div .buttons {
                    button #confirm-no .button value="no" { "Do not" }
                    button #confirm-yes .button .primary value="yes" { "Continue" }
                }
            }
        }
        dialog #palette aria-label="Search and commands" {
            form method="dialog" .palette-head {
                input #palette-input type="text" role="combobox" aria-expanded="true" aria-controls="palette-list"
                    aria-label="Search pages, kinds, queues, groups and job ids" placeholder="Job id, kind, queue, group or page"
                    autocomplete="off" spellcheck="false";
                button .icon-button aria-label="Close" { "×" }
            }
            ul #palette-list role="listbox" aria-label="Results" {}
            p .faint { kbd { "↑" } kbd { "↓" } " choose " kbd { "↵" } " open " kbd { "esc" } " close" }
        }
        dialog #keys aria-labelledby="keys-title" {
            h2 #keys-title { "Keyboard shortcuts" }
            (super::search::key_table())
            form method="dialog" { div .buttons { button .button { "Close" } } }
        }
        template #pages {
            @for section in Section::listed(&frame.rights) {
                a href=(frame.url(section.path())) { (section.name()) }
            }
            @if frame.rights.enqueue { a href=(frame.url("/ui/new")) { "Enqueue a job" } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_no_inline_script_or_style_and_marks_the_current_section() {
        let page = whole(&Frame::of_operator("/ui/jobs"), Section::Jobs, "Jobs", html! { p { "content" } }).0;
        assert!(page.contains("href=\"/q/ui/jobs\" aria-current=\"page\""), "{page}");
        assert!(!page.contains("style="), "{page}");
        assert!(!page.contains("<style") && !page.contains(" onclick="), "{page}");
        assert_eq!(page.matches("<script").count(), 1);
        assert!(page.contains("src=\"/q/ui/assets/dashboard-"), "{page}");
    }

    #[test]
    fn a_token_for_some_queues_has_no_links_to_pages_that_it_cannot_read() {
        let mut frame = Frame::of_reader("/ui");
        frame.rights.queues = Some(vec!["mail".into()]);
        let page = whole(&frame, Section::Overview, "Overview", html! {}).0;
        assert!(!page.contains("/ui/workers") && page.contains("/ui/queues"), "{page}");
    }
}
