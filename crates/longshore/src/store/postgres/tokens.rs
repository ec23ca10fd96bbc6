//! API tokens, stored by the hash of their secret.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::tx::{Sql, Tx};
use crate::store::{MAX_SESSIONS, NewSession, NewToken, TokenRecord, millis};

const PUT_TOKEN: &str = "
    insert into longshore.tokens (id, name, hash, scopes, queues, created_at, expires_at)
    values ($1, $2, $3, $4, $5, longshore.clock(), $6)
        on conflict do nothing";

/// Whether an earlier call stored this token and only its reply was lost.
const IS_STORED: &str = "
    select exists (
             select 1
               from longshore.tokens
              where id = $1
                and hash = $2)";

pub(super) async fn put_token(tx: &mut Tx<'_>, token: &NewToken) -> Sql<()> {
    let put = sqlx::query(tx.sql(PUT_TOKEN))
        .bind(token.id)
        .bind(&token.name)
        .bind(token.hash.as_slice())
        .bind(&token.scopes)
        .bind(&token.queues)
        .bind(token.expires_at)
        .execute(&mut *tx.connection)
        .await?;
    if put.rows_affected() > 0 {
        return Ok(());
    }
    let stored: bool = sqlx::query_scalar(tx.sql(IS_STORED))
        .bind(token.id)
        .bind(token.hash.as_slice())
        .fetch_one(&mut *tx.connection)
        .await?;
    if stored { Ok(()) } else { Err(token.conflict().into()) }
}

const LIVE_TOKENS: &str = "
    select wanted.nth, t.id, t.name, t.scopes, t.queues, t.created_at, t.expires_at, t.revoked_at
      from unnest($1::bytea[]) with ordinality as wanted(hash, nth)
     cross join lateral (
             select id
               from longshore.tokens
              where hash = wanted.hash
             union all
             select token
               from longshore.sessions
              where hash = wanted.hash
                and expires_at > longshore.clock()) as named
      join longshore.tokens t
        on t.id = named.id
       and t.revoked_at is null
       and (t.expires_at is null or t.expires_at > longshore.clock())";

pub(super) async fn tokens_by_hash(tx: &mut Tx<'_>, hashes: &[[u8; 32]]) -> Sql<Vec<Option<TokenRecord>>> {
    let wanted: Vec<&[u8]> = hashes.iter().map(|hash| hash.as_slice()).collect();
    let rows = sqlx::query(tx.sql(LIVE_TOKENS)).bind(wanted).fetch_all(&mut *tx.connection).await?;
    let mut found = vec![None; hashes.len()];
    for row in &rows {
        found[row.try_get::<i64, _>("nth")? as usize - 1] = Some(read_token(row)?);
    }
    Ok(found)
}

const TOKENS: &str = "
    select id, name, scopes, queues, created_at, expires_at, revoked_at
      from longshore.tokens
     order by created_at desc, id desc";

pub(super) async fn tokens(tx: &mut Tx<'_>) -> Sql<Vec<TokenRecord>> {
    let rows = sqlx::query(tx.sql(TOKENS)).fetch_all(&mut *tx.connection).await?;
    rows.iter().map(read_token).collect()
}

const REVOKE_TOKEN: &str = "
    update longshore.tokens
       set revoked_at = coalesce(revoked_at, longshore.clock())
     where id = $1";

pub(super) async fn revoke_token(tx: &mut Tx<'_>, id: Uuid) -> Sql<bool> {
    let revoked = sqlx::query(tx.sql(REVOKE_TOKEN)).bind(id).execute(&mut *tx.connection).await?;
    Ok(revoked.rows_affected() > 0)
}

const PUT_SESSION: &str = "
    with expired as (
      delete from longshore.sessions
       where hash = any(array(
               select hash
                 from longshore.sessions
                where expires_at <= longshore.clock()
                limit 100
                  for update skip locked))),
    too_many as (
      delete from longshore.sessions
       where hash = any(array(
               select hash
                 from longshore.sessions
                where hash = any(array(
                        select hash
                          from longshore.sessions
                         where token = $2
                           and hash <> $1
                         order by created_at desc, hash
                        offset $4))
                  for update skip locked)))
    insert into longshore.sessions (hash, token, created_at, expires_at)
    values ($1, $2, longshore.clock(), longshore.clock() + $3::int8 * interval '1 millisecond')
        on conflict (hash) do update
       set token = excluded.token   -- an earlier call whose reply was lost
    returning expires_at";

pub(super) async fn put_session(tx: &mut Tx<'_>, session: &NewSession) -> Sql<DateTime<Utc>> {
    let put = sqlx::query_scalar(tx.sql(PUT_SESSION))
        .bind(session.hash.as_slice())
        .bind(session.token)
        .bind(millis(session.lasts))
        .bind(i64::from(MAX_SESSIONS) - 1);
    Ok(put.fetch_one(&mut *tx.connection).await?)
}

pub(super) async fn remove_session(tx: &mut Tx<'_>, hash: &[u8; 32]) -> Sql<bool> {
    let removed = sqlx::query(tx.sql("delete from longshore.sessions where hash = $1"))
        .bind(hash.as_slice())
        .execute(&mut *tx.connection)
        .await?;
    Ok(removed.rows_affected() > 0)
}

fn read_token(row: &PgRow) -> Sql<TokenRecord> {
    Ok(TokenRecord {
        id: row.try_get("id")?,
        name: row.try_get("name")?,
        scopes: row.try_get("scopes")?,
        queues: row.try_get("queues")?,
        created_at: row.try_get("created_at")?,
        expires_at: row.try_get("expires_at")?,
        revoked_at: row.try_get("revoked_at")?,
    })
}
