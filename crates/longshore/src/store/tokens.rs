//! API tokens. The secret is created and shown elsewhere; only its hash is stored,
//! and no operation returns it.

use chrono::{DateTime, Datelike, Utc};
use serde::Serialize;
use uuid::Uuid;

use crate::enqueue::{check_labels, check_name};
use crate::error::{Error, Result};

/// What a token may be for. `admin` may do everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Enqueue jobs.
    Enqueue,
    /// Lease and settle jobs, as a worker.
    Work,
    /// See everything.
    Read,
    /// Cancel, retry, edit, delete; queues, schedules, sweeps.
    Operate,
    /// Kinds, and all of the above.
    Admin,
}

impl Scope {
    /// All of them.
    pub const ALL: [Scope; 5] = [Scope::Enqueue, Scope::Work, Scope::Read, Scope::Operate, Scope::Admin];

    /// The word.
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

    fn from_str(word: &str) -> Result<Self> {
        Scope::ALL.into_iter().find(|scope| scope.as_str() == word).ok_or_else(|| {
            let words = Scope::ALL.map(Scope::as_str).join(", ");
            Error::invalid("scopes", format!("scopes: `{word}` does not exist; use {words}"))
        })
    }
}

/// A token to be stored.
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
    /// Its id: what people revoke it by.
    pub id: Uuid,
    /// A name for people, 1 to 128 bytes.
    pub name: String,
    /// The hash of the secret: what it is found by.
    pub hash: [u8; 32],
    /// What it allows; words of [`Scope`].
    pub scopes: Vec<String>,
    /// The queues that it is good for; `None` means all.
    pub queues: Option<Vec<String>>,
    /// When it ceases to be good; `None` means never.
    pub expires_at: Option<DateTime<Utc>>,
}

impl NewToken {
    pub(crate) fn validate(&self) -> Result<()> {
        check_name("name", &self.name)?;
        if self.scopes.is_empty() {
            let words = Scope::ALL.map(Scope::as_str).join(", ");
            return Err(Error::invalid("scopes", format!("scopes: none given; use {words}")));
        }
        check_labels("scopes", &self.scopes)?;
        for scope in &self.scopes {
            scope.parse::<Scope>()?;
        }
        if let Some(queues) = &self.queues {
            if queues.is_empty() {
                return Err(Error::invalid("queues", "queues: none named; leave the list out to mean all"));
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

    /// The refusal of one that would take another's place.
    pub(crate) fn taken(&self) -> Error {
        Error::conflict(format!(
            "token `{}`: its id or its secret belongs to another token; make a new one",
            self.name
        ))
    }
}

/// A token as operators see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenRecord {
    /// Its id: what people revoke it by.
    pub id: Uuid,
    /// A name for people.
    pub name: String,
    /// What it allows.
    pub scopes: Vec<String>,
    /// The queues that it is good for; absent means all.
    pub queues: Option<Vec<String>>,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it ceases to be good.
    pub expires_at: Option<DateTime<Utc>>,
    /// When it was revoked.
    pub revoked_at: Option<DateTime<Utc>>,
}
