//! `longshore tokens`: creates, lists and revokes the tokens of the API.

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use chrono::{DateTime, Utc};
use longshore::api::hash_token;
use longshore::{Client, NewToken, TokenRecord};
use serde_json::json;
use uuid::Uuid;

use crate::args::{CreateToken, Tokens};
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Fit, Out, Table};

pub(super) async fn run(client: &Client, command: Tokens, out: &Out) -> Outcome {
    match command {
        Tokens::Create(args) => create(client, args, out).await,
        Tokens::List => list(client, out).await,
        Tokens::Revoke { ids } => revoke(client, &ids, out).await,
    }
}

async fn create(client: &Client, args: CreateToken, out: &Out) -> Outcome {
    let secret = new_secret()?;
    let expires_at = match args.expires_in {
        None => None,
        Some(time) => {
            let time = chrono::Duration::from_std(time).map_err(|_| {
                Failure::usage("--expires-in: too long; leave it out for a token that never expires")
            })?;
            Some(client.now().await? + time)
        }
    };
    let token = NewToken {
        id: Uuid::now_v7(),
        name: args.name,
        hash: hash_token(&secret),
        scopes: args.scopes,
        queues: (!args.queues.is_empty()).then_some(args.queues),
        expires_at,
    };
    client.create_token(&token).await?;
    if out.json {
        out.document(&json!({ "id": token.id, "name": token.name, "token": secret }));
    } else {
        out.line(&secret);
        if !out.write_failed() {
            out.note(format_args!(
                "token {} is shown only this once; send it as `Authorization: Bearer <token>`, \
                     or set LONGSHORE_TOKEN for this command",
                token.id
            ));
        }
    }
    if out.write_failed() {
        out.note(format_args!(
            "token {id} was created but could not be printed; revoke it with `longshore tokens revoke {id}`",
            id = token.id
        ));
    }
    Ok(Code::Done)
}

/// A new token with 256 random bits.
fn new_secret() -> Result<String, Failure> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| {
        Failure::new(
            Code::Problem,
            format_args!("cannot get random numbers from the operating system: {error}"),
        )
    })?;
    Ok(format!("longshore_{}", BASE64_URL_SAFE_NO_PAD.encode(bytes)))
}

async fn list(client: &Client, out: &Out) -> Outcome {
    let tokens = client.tokens().await?;
    if out.json {
        out.document(&tokens);
    } else {
        let now = client.now().await?;
        out.table(
            &table(&tokens, now, out),
            "no tokens; `longshore tokens create --help` shows how to create one",
        );
    }
    Ok(Code::Done)
}

fn table(tokens: &[TokenRecord], now: DateTime<Utc>, out: &Out) -> Table {
    let mut table = Table::new([
        ("id", Fit::Whole),
        ("name", Fit::Cut),
        ("state", Fit::Whole),
        ("scopes", Fit::Cut),
        ("queues", Fit::CutOrOmitted),
        ("created", Fit::WholeOrOmitted),
        ("expires", Fit::WholeOrOmitted),
    ]);
    for token in tokens {
        let state = if token.revoked_at.is_some() {
            "revoked"
        } else if token.expires_at.is_some_and(|at| at <= now) {
            "expired"
        } else {
            "active"
        };
        table.row([
            token.id.to_string(),
            token.name.clone(),
            state.into(),
            token.scopes.join(","),
            token.queues.as_ref().map_or_else(|| "all".into(), |queues| queues.join(",")),
            out.time(token.created_at),
            out.time(token.expires_at),
        ]);
    }
    table
}

async fn revoke(client: &Client, ids: &[Uuid], out: &Out) -> Outcome {
    let mut code = Code::Done;
    let mut revoked = Vec::new();
    let mut fail = |failed: Code, message: String| {
        out.note(format_args!("error: {message}"));
        if code == Code::Done {
            code = failed;
        }
    };
    let tokens = client.tokens().await?;
    for id in ids {
        if tokens.iter().any(|token| token.id == *id) {
            client.revoke_token(*id).await?;
            revoked.push(*id);
        } else {
            fail(
                Code::NotFound,
                format!("token {id} does not exist; `longshore tokens list` shows all tokens"),
            );
        }
    }
    if out.json {
        out.document(&json!({ "revoked": revoked }));
    } else {
        revoked.iter().for_each(|id| out.line(format_args!("revoked {id}")));
    }
    Ok(code)
}
