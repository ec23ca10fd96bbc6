//! Tokens, versions, configuration and the health of the database.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};

use super::layout::Section;
use super::widgets::{self, Action, Look, MAX_ROWS, dash, empty, heading, optional_time, snippet, time};
use super::{Frame, View, format};
use crate::api::Server;
use crate::api::problem::ApiResult;
use crate::job::Status;
use crate::store::{Durability, SCHEMA_VERSION, TokenRecord};

/// What the page shows.
struct Settings {
    requires_tokens: bool,
    /// Only for administrators.
    tokens: Option<Arc<Vec<TokenRecord>>>,
    schema_version: i64,
    durability: Arc<Durability>,
    /// How long a small query took.
    reply: Duration,
}

pub(super) async fn page(view: View, State(server): State<Server>) -> ApiResult<Response> {
    let started = Instant::now();
    view.data.client.now().await?;
    let reply = started.elapsed();
    let (schema_version, durability) = tokio::try_join!(view.data.schema_version(), view.data.durability())?;
    let is_admin = view.frame.rights.admin && view.frame.rights.covers_all();
    let tokens = if is_admin { Some(view.data.tokens().await?) } else { None };
    let requires_tokens = server.guard.requires_tokens();
    let settings = Settings { requires_tokens, tokens, schema_version: *schema_version, durability, reply };
    Ok(view.respond(Section::Settings, "Settings", render(&view.frame, &settings)))
}

fn render(frame: &Frame, settings: &Settings) -> Markup {
    html! {
        (heading("Settings", "", html! {}))
        div .columns {
            div { (tokens(frame, settings)) }
            aside aria-label="Server" { (database(settings)) (server(frame, settings)) (configuration(frame)) }
        }
    }
}

fn tokens(frame: &Frame, settings: &Settings) -> Markup {
    let Some(tokens) = &settings.tokens else {
        return html! { section .panel { (empty("Tokens", html! { p { "Only a token with the scope " code { "admin" } " can list tokens." } })) } };
    };
    html! {
        section .panel .flush {
            div .panel-head { h2 { "Tokens" } span .faint { (tokens.len()) } }
            @if tokens.is_empty() {
                (empty("No tokens", html! {
                    p { "A token lets a program or a person use the API. Its secret is shown once:" }
                    (snippet("longshore tokens create shop --scope enqueue"))
                }))
            } @else {
                table #tokens .list {
                    thead { tr { th { "Token" } th { "Scopes" } th { "Queues" } th .c-time { "Created" } th .c-time { "Expires" } th .c-status { "State" } th .c-actions { span .unseen { "Actions" } } } }
                    tbody { @for token in tokens.iter().take(MAX_ROWS) { (token_row(frame, token)) } }
                }
                @if tokens.len() > MAX_ROWS {
                    p .panel-body .faint { "The first " (MAX_ROWS) " of " (format::number(tokens.len() as u64)) " tokens." }
                }
            }
            @if !settings.requires_tokens { p .panel-body .faint { "This server accepts requests without a token." } }
        }
    }
}

fn token_row(frame: &Frame, token: &TokenRecord) -> Markup {
    let is_expired = token.expires_at.is_some_and(|at| at <= frame.now);
    let is_valid = token.revoked_at.is_none() && !is_expired;
    let revoke = Action::post(frame.url(&format!("/tokens/{}", token.id)), "Revoke", "The token is revoked.")
        .method("DELETE")
        .look(Look::Small)
        .confirm(format!(
            "Revoke the token {}? Programs that use it are refused within seconds.",
            token.name
        ));
    html! {
        tr #(format!("token-{}", token.id)) {
            td .strong title=(token.id) { (token.name) }
            td data-label="Scopes" { @for scope in &token.scopes { span .tag { (scope) } " " } }
            td data-label="Queues" { @match &token.queues {
                Some(queues) => @for queue in queues { span .tag { (queue) } " " },
                None => span .faint { "all" },
            } }
            td .c-time data-label="Created" { (time(token.created_at, frame)) }
            td .c-time data-label="Expires" { @match token.expires_at { Some(_) => (optional_time(token.expires_at, frame)), None => span .faint { "never" } } }
            td .c-status { @if token.revoked_at.is_some() { (widgets::state(Status::Cancelled, "revoked")) }
                @else if is_expired { (widgets::state(Status::Cancelled, "expired")) }
                @else { (widgets::state(Status::Succeeded, "valid")) } }
            td .c-actions { @if is_valid && frame.rights.admin { (revoke) } }
        }
    }
}

fn database(settings: &Settings) -> Markup {
    let Durability { risks, warnings, accepted } = &*settings.durability;
    let is_current = settings.schema_version == SCHEMA_VERSION;
    html! {
        section #database .panel {
            div .panel-head { h2 { "Database" } (widgets::state(Status::Succeeded, "replies")) }
            dl .facts {
                dt { "Reply" } dd { (format::duration(settings.reply)) }
                dt { "Tables" } dd { "version " (settings.schema_version)
                    @if !is_current { " " span .tag .is-warning { "this program expects " (SCHEMA_VERSION) } } }
                dt { "Durability" } dd {
                    @if risks.is_empty() { "a crash loses no stored job" }
                    @else if *accepted { "relaxed on purpose" }
                    @else { span .tag .is-warning { "at risk" } }
                }
            }
            @if !risks.is_empty() || !warnings.is_empty() {
                ul .panel-body { @for text in risks.iter().chain(warnings) { li { (text) } } }
            }
        }
    }
}

fn server(frame: &Frame, settings: &Settings) -> Markup {
    let redacted: Vec<&String> = frame.dashboard.redacted.keys().collect();
    html! {
        section .panel {
            div .panel-head { h2 { "Server" } }
            dl .facts {
                dt { "Longshore" } dd { (env!("CARGO_PKG_VERSION")) }
                dt { "Access" } dd { @if settings.requires_tokens { "with a token" } @else { "open" } }
                dt { "Payloads" } dd { @if frame.dashboard.hides_payloads { "hidden" } @else { "shown" } }
                dt { "Redacted" } dd { @if redacted.is_empty() { (dash()) } @else { @for kind in redacted { span .tag { (kind) } " " } } }
                dt { "API" } dd { a .quiet href=(frame.url("/api-docs/openapi.json")) { "OpenAPI document" } }
                dt { "Numbers" } dd { a .quiet href=(frame.url("/stats")) { "as JSON" } }
            }
        }
    }
}

/// The settings that the program has passed.
fn configuration(frame: &Frame) -> Markup {
    let settings = &frame.dashboard.configuration;
    html! {
        @if !settings.is_empty() {
            section .panel {
                div .panel-head { h2 { "Configuration" } }
                dl .facts .wide { @for (name, value) in settings { dt { (name) } dd { (value) } } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HOSTILE, assert_escaped};
    use super::*;

    fn settings() -> Settings {
        let token = TokenRecord {
            id: uuid::Uuid::nil(),
            name: HOSTILE.into(),
            scopes: vec![HOSTILE.into()],
            queues: Some(vec![HOSTILE.into()]),
            created_at: "2031-05-06T07:00:00Z".parse().unwrap(),
            expires_at: None,
            revoked_at: None,
        };
        Settings {
            requires_tokens: true,
            tokens: Some(Arc::new(vec![token])),
            schema_version: SCHEMA_VERSION,
            durability: Arc::default(),
            reply: Duration::from_millis(2),
        }
    }

    #[test]
    fn names_of_tokens_are_escaped_and_only_administrators_revoke() {
        let page = render(&Frame::of_operator("/ui/settings"), &settings());
        assert_escaped(&page);
        assert!(page.0.contains("Revoke"), "{}", page.0);
        assert!(!render(&Frame::of_reader("/ui/settings"), &settings()).0.contains("Revoke"));
    }
}
