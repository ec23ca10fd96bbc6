//! Who may call the server, and what is known of each kind of job.

use serde_json::value::RawValue;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::inspect::raw;
use super::{Done, PostgresStore};
use crate::store::{KindRecord, NewKind, NewToken, TokenRecord, by_name};

// ---- tokens -------------------------------------------------------------

const PUT_TOKEN: &str = "
    insert into longshore.tokens (id, name, hash, scopes, queues, created_at, expires_at)
    values ($1, $2, $3, $4, $5, longshore.clock(), $6)
        on conflict do nothing";

/// Whether it was stored before, and only the answer was lost.
const IS_STORED: &str = "
    select exists (
             select 1
               from longshore.tokens
              where id = $1
                and hash = $2)";

const LIVE_TOKEN: &str = "
    select id, name, scopes, queues, created_at, expires_at, revoked_at
      from longshore.tokens
     where hash = $1
       and revoked_at is null
       and (expires_at is null or expires_at > longshore.clock())";

const TOKENS: &str = "
    select id, name, scopes, queues, created_at, expires_at, revoked_at
      from longshore.tokens
     order by created_at desc, id desc";

const REVOKE_TOKEN: &str = "
    update longshore.tokens
       set revoked_at = coalesce(revoked_at, longshore.clock())
     where id = $1";

impl PostgresStore {
    pub(super) async fn put_token_on(&self, connection: &mut PgConnection, token: &NewToken) -> Done<()> {
        let put = sqlx::query(self.sql(PUT_TOKEN))
            .bind(token.id)
            .bind(&token.name)
            .bind(token.hash.as_slice())
            .bind(&token.scopes)
            .bind(&token.queues)
            .bind(token.expires_at)
            .execute(&mut *connection)
            .await?;
        if put.rows_affected() > 0 {
            return Ok(());
        }
        let stored: bool = sqlx::query_scalar(self.sql(IS_STORED))
            .bind(token.id)
            .bind(token.hash.as_slice())
            .fetch_one(connection)
            .await?;
        if stored { Ok(()) } else { Err(token.taken().into()) }
    }

    pub(super) async fn token_on(
        &self,
        connection: &mut PgConnection,
        hash: &[u8; 32],
    ) -> Done<Option<TokenRecord>> {
        let row = sqlx::query(self.sql(LIVE_TOKEN)).bind(hash.as_slice()).fetch_optional(connection).await?;
        row.as_ref().map(read_token).transpose()
    }

    pub(super) async fn tokens_on(&self, connection: &mut PgConnection) -> Done<Vec<TokenRecord>> {
        let rows = sqlx::query(self.sql(TOKENS)).fetch_all(connection).await?;
        rows.iter().map(read_token).collect()
    }

    pub(super) async fn revoke_token_on(&self, connection: &mut PgConnection, id: Uuid) -> Done<bool> {
        let revoked = sqlx::query(self.sql(REVOKE_TOKEN)).bind(id).execute(connection).await?;
        Ok(revoked.rows_affected() > 0)
    }
}

fn read_token(row: &PgRow) -> Done<TokenRecord> {
    Ok(TokenRecord {
        id: row.try_get(0)?,
        name: row.try_get(1)?,
        scopes: row.try_get(2)?,
        queues: row.try_get(3)?,
        created_at: row.try_get(4)?,
        expires_at: row.try_get(5)?,
        revoked_at: row.try_get(6)?,
    })
}

// ---- kinds --------------------------------------------------------------

const PUT_KINDS: &str = "
    insert into longshore.kinds as k (name, schema, defaults, updated_at)
    select i.name, i.schema::json, i.defaults::json, longshore.clock()
      from unnest($1::text[], $2::text[], $3::text[]) as i(name, schema, defaults)
        on conflict (name) do update
       set schema = coalesce(excluded.schema, k.schema),
           defaults = coalesce(excluded.defaults, k.defaults),
           updated_at = excluded.updated_at";

const KINDS: &str = "
    select name, schema::text, defaults::text, updated_at
      from longshore.kinds
     order by name collate \"C\"";

impl PostgresStore {
    pub(super) async fn put_kinds_on(&self, connection: &mut PgConnection, kinds: &[NewKind]) -> Done<()> {
        let said = by_name(kinds);
        sqlx::query(self.sql(PUT_KINDS))
            .bind(said.keys().copied().collect::<Vec<_>>())
            .bind(said.values().map(|(schema, _)| *schema).collect::<Vec<_>>())
            .bind(said.values().map(|(_, defaults)| *defaults).collect::<Vec<_>>())
            .execute(connection)
            .await?;
        Ok(())
    }

    pub(super) async fn kinds_on(&self, connection: &mut PgConnection) -> Done<Vec<KindRecord>> {
        let rows = sqlx::query(self.sql(KINDS)).fetch_all(connection).await?;
        rows.iter().map(read_kind).collect()
    }

    pub(super) async fn remove_kind_on(&self, connection: &mut PgConnection, name: &str) -> Done<bool> {
        let gone = sqlx::query(self.sql("delete from longshore.kinds where name = $1"))
            .bind(name)
            .execute(connection)
            .await?;
        Ok(gone.rows_affected() > 0)
    }
}

fn read_kind(row: &PgRow) -> Done<KindRecord> {
    let json = |column: usize| -> Done<Option<Box<RawValue>>> {
        Ok(row.try_get::<Option<String>, _>(column)?.map(raw).transpose()?)
    };
    Ok(KindRecord {
        name: row.try_get(0)?,
        schema: json(1)?,
        defaults: json(2)?,
        updated_at: row.try_get(3)?,
    })
}
