//! Schema versions: which scripts tables still need, and which tables a build refuses. The engines run the scripts.
//!
//! Each version has one script. Until the first release there is one version, whose script is edited in
//! place. So the database also stores the revision of the scripts, and a build refuses tables that another
//! revision made.

use std::sync::Arc;

use async_trait::async_trait;
use chrono::{DateTime, Utc};

use super::Store;
use crate::error::{Error, Result};
use crate::rules::fingerprint::Fnv;

/// The schema version that this build supports, the same on both engines.
pub const SCHEMA_VERSION: i64 = 1;

/// The step from one schema version to the next.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    /// The version of the tables after it.
    pub version: i64,
    /// The statements that change the tables.
    pub script: &'static str,
    /// The oldest schema version whose workers may use these tables. Others would misread them, so they must have
    /// stopped, and cannot register or send a heartbeat afterwards.
    pub oldest_worker: i64,
}

/// What [`migrate`](Migrating::migrate) did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Migrated {
    /// The schema version before; 0 means there were no tables.
    pub from: i64,
    /// The schema version after.
    pub to: i64,
}

/// The tables, the clock, and further connections.
#[async_trait]
pub trait Migrating {
    /// The migrations of this engine.
    fn migrations(&self) -> &'static [Migration];

    /// Runs the migrations that the tables still need and returns the versions before and
    /// after. It can be interrupted and run again, and several processes can run it at the
    /// same time. Fails if the tables are newer than the migrations, or made by another revision.
    async fn migrate(&self, migrations: &'static [Migration]) -> Result<Migrated>;

    /// Returns the version of the tables, or 0 if there are none.
    async fn schema_version(&self) -> Result<i64>;

    /// Returns the time on the engine's clock.
    async fn now(&self) -> Result<DateTime<Utc>>;

    /// Stops the engine's clock at `at`; `None` makes it run again. For tests: every
    /// process that uses these tables sees the pinned time.
    async fn pin_clock(&self, at: Option<DateTime<Utc>>) -> Result<()>;

    /// Returns a store for the same tables with its own connection, for
    /// heartbeats, which must not wait behind other operations.
    fn with_own_connection(&self) -> Arc<dyn Store>;
}

/// A row of the table `migrations`.
#[derive(Clone, Debug)]
pub(crate) struct Applied {
    pub(crate) version: i64,
    /// `None` in tables that were made before there were revisions.
    pub(crate) revision: Option<String>,
}

/// The scripts of an engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scripts {
    /// In the order of their versions.
    pub(crate) migrations: &'static [Migration],
    /// The views and functions, which each migration replaces.
    pub(crate) replaced: &'static str,
}

impl Scripts {
    /// The version of the tables after all migrations.
    pub(crate) fn version(&self) -> i64 {
        self.migrations.last().map_or(0, |migration| migration.version)
    }

    /// A hash of the newest migration and of what it replaces.
    pub(crate) fn revision(&self) -> String {
        let mut hash = Fnv::default();
        for text in [self.migrations.last().map_or("", |migration| migration.script), self.replaced] {
            // A checkout may change the ends of lines.
            text.lines().for_each(|line| hash.add(line.as_bytes()));
        }
        format!("{:016x}", hash.0)
    }

    /// Returns the version of the tables, or 0 if there are none. Fails if this build cannot use them.
    pub(crate) fn version_of(&self, applied: &[Applied]) -> Result<i64> {
        let Some(newest) = applied.iter().max_by_key(|applied| applied.version) else { return Ok(0) };
        let is_own = |revision: &String| newest.version != self.version() || *revision == self.revision();
        if !newest.revision.as_ref().is_some_and(is_own) {
            return Err(Error::schema(
                "the tables were made by another revision of longshore before its first release, and this one cannot \
                 use them; nothing was changed. To keep their jobs, run the revision that made the tables until all \
                 jobs have ended. Then name another file or schema in the database URL, or remove these tables (SQLite: \
                 delete the file if nothing else is in it; Postgres: drop the schema that the URL names, `longshore` \
                 if it names none), and run `longshore migrate`",
            ));
        }
        if newest.version > self.version() {
            return Err(Error::schema(format!(
                "the database has schema version {}, newer than this build's {}; upgrade longshore",
                newest.version,
                self.version()
            )));
        }
        Ok(newest.version)
    }

    /// The migrations that tables of version `from` still need.
    pub(crate) fn missing(&self, from: i64) -> impl Iterator<Item = &'static Migration> + use<> {
        self.migrations.iter().filter(move |migration| migration.version > from)
    }

    /// The oldest version whose workers may use the tables after the migrations, if workers of version `from` may not.
    pub(crate) fn excludes_workers(&self, from: i64) -> Option<i64> {
        let oldest = self.missing(from).map(|migration| migration.oldest_worker).max()?;
        Some(oldest).filter(|oldest| (1..*oldest).contains(&from))
    }
}

/// The error for a migration that workers of an earlier version would not follow.
pub(crate) fn older_workers_live(oldest: i64, names: &[String]) -> Error {
    Error::schema(format!(
        "workers that were built for tables before schema version {oldest} are running: {}; stop them before you \
         migrate, because they would misread the tables",
        names.join(", ")
    ))
}
