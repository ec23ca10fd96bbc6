//! Who may call the server, and what is known of each kind of job. A secret is
//! made and shown elsewhere; only its hash comes here, and nothing gives it back.

use std::collections::BTreeMap;

use chrono::{DateTime, Datelike, Utc};
use serde::Serialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::enqueue::{check_json, check_labels, check_name};
use crate::error::{Error, Result};

// ---- tokens --------------------------------------------------------------

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
/// use longshore::store::NewToken;
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

// ---- kinds ---------------------------------------------------------------

/// The longest schema or defaults of a kind, in bytes of JSON.
pub const MAX_SCHEMA: usize = 64 * 1024;

/// What somebody says about a kind of job.
#[derive(Clone, Debug)]
pub struct NewKind {
    /// Its name.
    pub name: String,
    /// A JSON schema of its payload; `None` says nothing about it.
    pub schema: Option<Box<RawValue>>,
    /// What an enqueue of it begins with, as JSON; `None` says nothing about it.
    pub defaults: Option<Box<RawValue>>,
}

impl NewKind {
    /// Says only that the kind exists.
    pub fn new(name: impl Into<String>) -> Self {
        NewKind { name: name.into(), schema: None, defaults: None }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        check_name("name", &self.name)?;
        if let Some(schema) = &self.schema {
            check_json("schema", schema.get(), MAX_SCHEMA)?;
        }
        if let Some(defaults) = &self.defaults {
            check_json("defaults", defaults.get(), MAX_SCHEMA)?;
        }
        Ok(())
    }
}

/// What is said about each kind, by name: one order for the rows to be locked
/// in. Of two words about the same thing the last one counts.
pub(crate) fn by_name(kinds: &[NewKind]) -> BTreeMap<&str, (Option<&str>, Option<&str>)> {
    let mut said = BTreeMap::<&str, (Option<&str>, Option<&str>)>::new();
    for kind in kinds {
        let (schema, defaults) = said.entry(&kind.name).or_default();
        *schema = kind.schema.as_deref().map(RawValue::get).or(*schema);
        *defaults = kind.defaults.as_deref().map(RawValue::get).or(*defaults);
    }
    said
}

/// A kind of job as it is known.
#[derive(Clone, Debug, Serialize)]
pub struct KindRecord {
    /// Its name.
    pub name: String,
    /// A JSON schema of its payload.
    pub schema: Option<Box<RawValue>>,
    /// What an enqueue of it begins with.
    pub defaults: Option<Box<RawValue>>,
    /// When somebody last said something about it.
    pub updated_at: DateTime<Utc>,
}
