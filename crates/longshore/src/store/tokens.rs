//! API tokens and their scopes. Only the hash of a secret is stored, and no operation
//! returns it. Creating secrets is not part of the store.

use std::time::Duration;

use chrono::{DateTime, Datelike, Utc};
use serde::Serialize;
use uuid::Uuid;

use crate::enqueue::{check_labels, check_name};
use crate::error::{Error, Result};

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
