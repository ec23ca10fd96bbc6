//! Small pictures, drawn here. They are decoration: the text next to them has the meaning.

use maud::{Markup, PreEscaped, html};

/// An icon of 16 by 16, drawn with lines in the colour of the text.
fn lines(path: &'static str) -> Markup {
    html! {
        svg .icon viewBox="0 0 16 16" width="16" height="16" fill="none" stroke="currentColor" stroke-width="1.5"
            stroke-linecap="round" stroke-linejoin="round" aria-hidden="true" { (PreEscaped(path)) }
    }
}

macro_rules! icons {
    ($($name:ident = $path:literal;)*) => {
        $(pub(super) fn $name() -> Markup { lines($path) })*
    };
}

icons! {
    overview = r#"<path d="M2 13.5h12M4 11V8m4 3V3m4 8V6"/>"#;
    jobs = r#"<path d="M2.5 4h11M2.5 8h11M2.5 12h7"/>"#;
    queues = r#"<rect x="2" y="2.5" width="12" height="3" rx="1"/><rect x="2" y="6.5" width="12" height="3" rx="1"/><rect x="2" y="10.5" width="12" height="3" rx="1"/>"#;
    flows = r#"<circle cx="3.5" cy="8" r="1.5"/><circle cx="12.5" cy="3.5" r="1.5"/><circle cx="12.5" cy="12.5" r="1.5"/><path d="M5 8h1.5c3 0 1.5-4.5 4.5-4.5M6.5 8c3 0 1.5 4.5 4.5 4.5"/>"#;
    kinds = r#"<rect x="2.5" y="2.5" width="4.5" height="4.5" rx="1"/><rect x="9" y="2.5" width="4.5" height="4.5" rx="1"/><rect x="2.5" y="9" width="4.5" height="4.5" rx="1"/><circle cx="11.2" cy="11.2" r="2.3"/>"#;
    workers = r#"<rect x="3" y="4.5" width="10" height="7" rx="1.5"/><path d="M6 2v2.5M10 2v2.5M6 11.5V14m4-2.5V14M1 7h2M1 9.5h2M13 7h2m-2 2.5h2"/>"#;
    cron = r#"<circle cx="8" cy="8" r="5.8"/><path d="M8 4.8V8l2.2 1.6"/>"#;
    settings = r#"<path d="M2 4.5h7m3 0h2M2 11.5h2m3 0h7"/><circle cx="10.5" cy="4.5" r="1.5"/><circle cx="5.5" cy="11.5" r="1.5"/>"#;
    search = r#"<circle cx="7" cy="7" r="4.3"/><path d="m10.3 10.3 3.2 3.2"/>"#;
    theme = r#"<circle cx="8" cy="8" r="5.8"/><path d="M8 2.2a5.8 5.8 0 0 1 0 11.6z" fill="currentColor"/>"#;
    copy = r#"<rect x="5.5" y="5.5" width="8" height="8" rx="1.5"/><path d="M10.5 5.5v-2a1 1 0 0 0-1-1h-6a1 1 0 0 0-1 1v6a1 1 0 0 0 1 1h2"/>"#;
    warning = r#"<path d="M8 2.2 14.2 13H1.8zM8 6.4v3M8 11.2v.1"/>"#;
    good = r#"<circle cx="8" cy="8" r="5.8"/><path d="m5.4 8.2 1.8 1.8 3.4-3.8"/>"#;
}
