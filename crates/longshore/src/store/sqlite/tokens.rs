//! API tokens, stored by the hash of their secret.

use rusqlite::{Row, params};
use uuid::Uuid;

use super::tx::{Columns, Sql, Tx, json_list};
use crate::store::{NewToken, TokenRecord};

pub(super) fn put_token(tx: &Tx<'_>, token: &NewToken) -> Sql<()> {
    const PUT: &str = "
        insert into tokens (id, name, hash, scopes, queues, created_at, expires_at)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7)
            on conflict do nothing";
    // Whether an earlier call stored this token and only its reply was lost.
    const IS_STORED: &str = "
        select 1
          from tokens
         where id = ?1
           and hash = ?2";
    let params = params![
        token.id.as_bytes(),
        token.name,
        token.hash,
        json_list(&token.scopes)?,
        token.queues.as_deref().map(json_list).transpose()?,
        tx.now()?,
        token.expires_at.map(|at| at.timestamp_micros()),
    ];
    if tx.execute(PUT, params)? > 0 {
        return Ok(());
    }
    match tx.row(IS_STORED, params![token.id.as_bytes(), token.hash], |_| Ok(()))? {
        Some(()) => Ok(()),
        None => Err(token.conflict().into()),
    }
}

pub(super) fn tokens_by_hash(tx: &Tx<'_>, hashes: &[[u8; 32]]) -> Sql<Vec<Option<TokenRecord>>> {
    const LIVE: &str = "
        select id,
               name,
               scopes,
               queues,
               created_at,
               expires_at,
               revoked_at
          from tokens
         where hash = ?1
           and revoked_at is null
           and (expires_at is null or expires_at > ?2)";
    let now = tx.now()?;
    hashes.iter().map(|hash| tx.row(LIVE, params![hash, now], read_token)).collect()
}

pub(super) fn tokens(tx: &Tx<'_>) -> Sql<Vec<TokenRecord>> {
    const ALL: &str = "
        select id,
               name,
               scopes,
               queues,
               created_at,
               expires_at,
               revoked_at
          from tokens
         order by created_at desc, id desc";
    tx.rows(ALL, [], read_token)
}

pub(super) fn revoke_token(tx: &Tx<'_>, id: Uuid) -> Sql<bool> {
    const REVOKE: &str = "
        update tokens
           set revoked_at = coalesce(revoked_at, ?2)
         where id = ?1";
    Ok(tx.execute(REVOKE, params![id.as_bytes(), tx.now()?])? > 0)
}

fn read_token(row: &Row<'_>) -> rusqlite::Result<TokenRecord> {
    Ok(TokenRecord {
        id: row.uuid("id")?,
        name: row.get("name")?,
        scopes: row.list("scopes")?,
        queues: row.maybe_list("queues")?,
        created_at: row.time("created_at")?,
        expires_at: row.maybe_time("expires_at")?,
        revoked_at: row.maybe_time("revoked_at")?,
    })
}
