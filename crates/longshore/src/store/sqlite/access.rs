//! Who may call the server, and what is known of each kind of job.

use rusqlite::params;

use super::*;

// ---- tokens --------------------------------------------------------------

pub(super) fn put_token(tx: &Tx<'_>, token: &NewToken) -> Sql<()> {
    const PUT: &str = "
        insert into tokens (id, name, hash, scopes, queues, created_at, expires_at)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7)
            on conflict do nothing";
    // Whether it was stored before, and only the answer was lost.
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
        None => Err(token.taken().into()),
    }
}

pub(super) fn token(tx: &Tx<'_>, hash: &[u8; 32]) -> Sql<Option<TokenRecord>> {
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
    tx.row(LIVE, params![hash, tx.now()?], read_token)
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
        id: row.uuid(0)?,
        name: row.get(1)?,
        scopes: row.list(2)?,
        queues: row.maybe_list(3)?,
        created_at: row.time(4)?,
        expires_at: row.maybe_time(5)?,
        revoked_at: row.maybe_time(6)?,
    })
}

// ---- kinds ---------------------------------------------------------------

pub(super) fn put_kinds(tx: &Tx<'_>, kinds: &[NewKind]) -> Sql<()> {
    const PUT: &str = "
        insert into kinds (name, schema, defaults, updated_at)
        values (?1, ?2, ?3, ?4)
            on conflict (name) do update
           set schema = coalesce(excluded.schema, schema),
               defaults = coalesce(excluded.defaults, defaults),
               updated_at = excluded.updated_at";
    for (name, (schema, defaults)) in by_name(kinds) {
        tx.execute(PUT, params![name, schema, defaults, tx.now()?])?;
    }
    Ok(())
}

pub(super) fn kinds(tx: &Tx<'_>) -> Sql<Vec<KindRecord>> {
    const ALL: &str = "
        select name,
               schema,
               defaults,
               updated_at
          from kinds
         order by name";
    tx.rows(ALL, [], |row| {
        Ok(KindRecord {
            name: row.get(0)?,
            schema: row.json(1)?,
            defaults: row.json(2)?,
            updated_at: row.time(3)?,
        })
    })
}

pub(super) fn remove_kind(tx: &Tx<'_>, name: &str) -> Sql<bool> {
    const REMOVE: &str = "
        delete from kinds
         where name = ?1";
    Ok(tx.execute(REMOVE, [name])? > 0)
}
