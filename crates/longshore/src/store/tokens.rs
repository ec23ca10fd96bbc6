//! API tokens and their scopes. Only the hash of a secret is stored, and no method returns it. Creating
//! secrets is not part of the store.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Datelike, Utc};
use serde::Serialize;
use uuid::Uuid;

use super::db::{Engine, How, Row, Rows, Sql, Statement, args, one};
use crate::error::{Error, Result};
use crate::rules::enqueue::{check_labels, check_name};

/// What a token permits. `admin` permits everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Enqueue jobs.
    Enqueue,
    /// Lease and settle jobs, as a worker.
    Work,
    /// Read everything.
    Read,
    /// Cancel, retry, edit and delete jobs; change queues and schedules; run sweeps.
    Operate,
    /// Change kinds, and everything above.
    Admin,
}

impl Scope {
    /// All scopes.
    pub const ALL: [Scope; 5] = [Scope::Enqueue, Scope::Work, Scope::Read, Scope::Operate, Scope::Admin];

    /// The scope's name in the API and in the database.
    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Enqueue => "enqueue",
            Scope::Work => "work",
            Scope::Read => "read",
            Scope::Operate => "operate",
            Scope::Admin => "admin",
        }
    }
}

impl std::str::FromStr for Scope {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Scope::ALL.into_iter().find(|scope| scope.as_str() == name).ok_or_else(|| {
            let names = Scope::ALL.map(Scope::as_str).join(", ");
            Error::invalid("scopes", format!("scopes: `{name}` does not exist; use {names}"))
        })
    }
}

/// How many sessions a token has at most. One more ends the oldest of them.
pub const MAX_SESSIONS: u32 = 100;

/// A login of a browser: a secret in a cookie that stands for a token until it expires or the token ends.
#[derive(Clone, Copy, Debug)]
pub struct NewSession {
    /// The hash of the secret.
    pub hash: [u8; 32],
    /// The token.
    pub token: Uuid,
    /// How long the session lasts.
    pub lasts: Duration,
}

/// A token to store.
///
/// ```
/// use longshore::NewToken;
///
/// let token = NewToken {
///     id: uuid::Uuid::now_v7(),
///     name: "the shop".into(),
///     hash: [7; 32],
///     scopes: vec!["enqueue".into()],
///     queues: Some(vec!["mail".into()]),
///     expires_at: None,
/// };
/// ```
#[derive(Clone, Debug)]
pub struct NewToken {
    /// Its id, used to revoke it.
    pub id: Uuid,
    /// A name for display, 1 to 128 bytes.
    pub name: String,
    /// The hash of the secret, used to find the token.
    pub hash: [u8; 32],
    /// The names of its [scopes](Scope).
    pub scopes: Vec<String>,
    /// The queues it may be used for; `None` means all.
    pub queues: Option<Vec<String>>,
    /// When it expires; `None` means never.
    pub expires_at: Option<DateTime<Utc>>,
}

impl NewToken {
    pub(crate) fn validate(&self) -> Result<()> {
        check_name("name", &self.name)?;
        if self.scopes.is_empty() {
            let names = Scope::ALL.map(Scope::as_str).join(", ");
            return Err(Error::invalid("scopes", format!("scopes: the list is empty; use {names}")));
        }
        check_labels("scopes", &self.scopes)?;
        for scope in &self.scopes {
            scope.parse::<Scope>()?;
        }
        if let Some(queues) = &self.queues {
            if queues.is_empty() {
                return Err(Error::invalid(
                    "queues",
                    "queues: the list is empty; leave it out to allow all queues",
                ));
            }
            check_labels("queues", queues)?;
        }
        match self.expires_at {
            Some(at) if !(1970..=9999).contains(&at.year()) => Err(Error::invalid(
                "expires_at",
                format!("expires_at: year {} is out of range; use 1970 to 9999", at.year()),
            )),
            _ => Ok(()),
        }
    }

    /// The error if the id or the hash belongs to another token.
    pub(crate) fn conflict(&self) -> Error {
        Error::conflict(format!(
            "token `{}`: its id or its secret belongs to another token; create a new one",
            self.name
        ))
    }
}

/// A token as operators see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenRecord {
    /// Its id, used to revoke it.
    pub id: Uuid,
    /// A name for display.
    pub name: String,
    /// The names of its scopes.
    pub scopes: Vec<String>,
    /// The queues it may be used for; absent means all.
    pub queues: Option<Vec<String>>,
    /// When it was created.
    pub created_at: DateTime<Utc>,
    /// When it expires; absent means never.
    pub expires_at: Option<DateTime<Utc>>,
    /// When it was revoked; absent if it was not.
    pub revoked_at: Option<DateTime<Utc>>,
}

/// Tokens, and the sessions of browsers.
#[async_trait]
pub trait Tokens {
    /// Stores a token. Storing the same token again changes nothing. Fails with a
    /// conflict if the id or the hash belongs to another token.
    async fn put_token(&self, token: &NewToken) -> Result<()>;

    /// Returns the tokens with these hashes, or with sessions that have them, in the same order. A token that is
    /// unknown, revoked or, by the engine's clock, expired is `None`, and so is an expired session.
    async fn tokens_by_hash(&self, hashes: &[[u8; 32]]) -> Result<Vec<Option<TokenRecord>>>;

    /// Lists all tokens, newest first, including revoked and expired ones.
    async fn tokens(&self) -> Result<Vec<TokenRecord>>;

    /// Revokes a token. Returns whether it exists. A token that was revoked before
    /// keeps its first revocation time.
    async fn revoke_token(&self, id: Uuid) -> Result<bool>;

    /// Stores a session of a token, and removes some that have expired. Returns when it expires.
    async fn put_session(&self, session: &NewSession) -> Result<DateTime<Utc>>;

    /// Removes a session. Returns whether it existed.
    async fn remove_session(&self, hash: &[u8; 32]) -> Result<bool>;
}

#[async_trait]
impl<E: Engine> Tokens for E {
    async fn put_token(&self, token: &NewToken) -> Result<()> {
        token.validate()?;
        self.call(How::QUICK, token.clone(), |rows, token| Box::pin(put_token(rows, token))).await
    }

    async fn tokens_by_hash(&self, hashes: &[[u8; 32]]) -> Result<Vec<Option<TokenRecord>>> {
        self.call(How::READ, hashes.to_vec(), |rows, hashes| Box::pin(tokens_by_hash(rows, hashes))).await
    }

    async fn tokens(&self) -> Result<Vec<TokenRecord>> {
        self.call(How::READ, (), |rows, ()| Box::pin(tokens(rows))).await
    }

    async fn revoke_token(&self, id: Uuid) -> Result<bool> {
        self.call(How::QUICK, id, |rows, id| Box::pin(revoke_token(rows, *id))).await
    }

    async fn put_session(&self, session: &NewSession) -> Result<DateTime<Utc>> {
        self.call(How::QUICK.together(), *session, |rows, session| Box::pin(put_session(rows, session))).await
    }

    async fn remove_session(&self, hash: &[u8; 32]) -> Result<bool> {
        self.call(How::QUICK, *hash, |rows, hash| Box::pin(remove_session(rows, hash))).await
    }
}

static PUT_TOKEN: Statement = Statement::new(
    "
    insert into longshore.tokens (id, name, hash, scopes, queues, created_at, expires_at)
    values ($1, $2, $3, $4, $5, longshore.clock(), $6)
        on conflict do nothing",
);

/// Whether an earlier call stored this token and only its reply was lost.
static IS_STORED: Statement = Statement::new(
    "
    select 1
      from longshore.tokens
     where id = $1
       and hash = $2",
);

async fn put_token(rows: &mut dyn Rows, token: &NewToken) -> Sql<()> {
    let NewToken { id, name, hash, scopes, queues, expires_at } = token;
    let put = rows.execute(&PUT_TOKEN, args![*id, name, hash, scopes, queues, *expires_at]).await? > 0;
    if put || rows.has_row(&IS_STORED, args![*id, hash]).await? {
        return Ok(());
    }
    Err(token.conflict().into())
}

static LIVE_TOKENS: Statement = Statement::new(
    "
    select named.secret, t.id, t.name, t.scopes, t.queues, t.created_at, t.expires_at, t.revoked_at
      from (select hash as secret, id
              from longshore.tokens
             where hash = any($1::bytea[])
             union all
            select hash, token
              from longshore.sessions
             where hash = any($1::bytea[])
               and expires_at > longshore.clock()) as named
      join longshore.tokens t
        on t.id = named.id
       and t.revoked_at is null
       and (t.expires_at is null or t.expires_at > longshore.clock())",
);

async fn tokens_by_hash(rows: &mut dyn Rows, hashes: &[[u8; 32]]) -> Sql<Vec<Option<TokenRecord>>> {
    let mut found = HashMap::new();
    for mut row in rows.rows(&LIVE_TOKENS, args![hashes]).await? {
        found.insert(row.take::<[u8; 32]>("secret")?, read_token(row)?);
    }
    Ok(hashes.iter().map(|hash| found.get(hash).cloned()).collect())
}

static TOKENS: Statement = Statement::new(
    "
    select id, name, scopes, queues, created_at, expires_at, revoked_at
      from longshore.tokens
     order by created_at desc, id desc",
);

async fn tokens(rows: &mut dyn Rows) -> Sql<Vec<TokenRecord>> {
    rows.rows(&TOKENS, &[]).await?.into_iter().map(read_token).collect()
}

static REVOKE_TOKEN: Statement = Statement::new(
    "
    update longshore.tokens
       set revoked_at = coalesce(revoked_at, longshore.clock())
     where id = $1",
);

async fn revoke_token(rows: &mut dyn Rows, id: Uuid) -> Sql<bool> {
    Ok(rows.execute(&REVOKE_TOKEN, args![id]).await? > 0)
}

static REMOVE_EXPIRED: Statement = Statement::new(
    "
    delete from longshore.sessions
     where hash = any(array(
             select hash
               from longshore.sessions
              where expires_at <= longshore.clock()
              limit 100
                for update skip locked))",
);

static REMOVE_OLDEST: Statement = Statement::new(
    "
    delete from longshore.sessions
     where hash = any(array(
             select hash
               from longshore.sessions
              where hash = any(array(
                      select hash
                        from longshore.sessions
                       where token = $1
                         and hash <> $2
                       order by created_at desc, hash
                       limit 1000 offset $3))
                for update skip locked))",
);

static PUT_SESSION: Statement = Statement::new(
    "
    insert into longshore.sessions (hash, token, created_at, expires_at)
    values ($1, $2, longshore.clock(), longshore.clock() + $3)
        on conflict (hash) do update
       set token = excluded.token   -- an earlier call whose reply was lost
    returning expires_at",
);

async fn put_session(rows: &mut dyn Rows, session: &NewSession) -> Sql<DateTime<Utc>> {
    let NewSession { hash, token, lasts } = session;
    rows.execute(&REMOVE_EXPIRED, &[]).await?;
    rows.execute(&REMOVE_OLDEST, args![*token, hash, MAX_SESSIONS - 1]).await?;
    one(rows.row(&PUT_SESSION, args![hash, *token, *lasts]).await?)?.take("expires_at")
}

static REMOVE_SESSION: Statement = Statement::new("delete from longshore.sessions where hash = $1");

async fn remove_session(rows: &mut dyn Rows, hash: &[u8; 32]) -> Sql<bool> {
    Ok(rows.execute(&REMOVE_SESSION, args![hash]).await? > 0)
}

fn read_token(mut row: Row) -> Sql<TokenRecord> {
    Ok(TokenRecord {
        id: row.take("id")?,
        name: row.take("name")?,
        scopes: row.take("scopes")?,
        queues: row.take("queues")?,
        created_at: row.take("created_at")?,
        expires_at: row.take("expires_at")?,
        revoked_at: row.take("revoked_at")?,
    })
}
