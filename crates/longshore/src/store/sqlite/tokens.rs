//! API tokens, stored by the hash of their secret.

use chrono::{DateTime, Utc};
use rusqlite::{Row, params};
use uuid::Uuid;

use super::tx::{Columns, Sql, Tx, json_list};
use crate::store::{MAX_SESSIONS, NewSession, NewToken, TokenRecord, millis};

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
         where id in (select id from tokens where hash = ?1
                      union all
                      select token from sessions where hash = ?1 and expires_at > ?2)
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

pub(super) fn put_session(tx: &Tx<'_>, session: &NewSession) -> Sql<DateTime<Utc>> {
    const REMOVE_EXPIRED: &str = "
        delete from sessions
         where hash in (select hash from sessions where expires_at <= ?1 limit 100)";
    const REMOVE_OLDEST: &str = "
        delete from sessions
         where hash in (
               select hash
                 from sessions
                where token = ?1
                  and hash <> ?2
                order by created_at desc, hash
                limit -1 offset ?3)";
    const PUT: &str = "
        insert into sessions (hash, token, created_at, expires_at)
        values (?1, ?2, ?3, ?4)
            on conflict (hash) do update
           set token = excluded.token   -- an earlier call whose reply was lost
        returning expires_at";
    let now = tx.now()?;
    tx.execute(REMOVE_EXPIRED, [now])?;
    tx.execute(REMOVE_OLDEST, params![session.token.as_bytes(), session.hash, MAX_SESSIONS - 1])?;
    let expires_at = now + millis(session.lasts) * 1000;
    let params = params![session.hash, session.token.as_bytes(), now, expires_at];
    let stored = tx.row(PUT, params, |row| row.time(0))?;
    Ok(stored.unwrap_or_default())
}

pub(super) fn remove_session(tx: &Tx<'_>, hash: &[u8; 32]) -> Sql<bool> {
    const REMOVE: &str = "
        delete from sessions
         where hash = ?1";
    Ok(tx.execute(REMOVE, [hash])? > 0)
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
