//! SQLite databases to measure on: files that go when the measurement is over.

use std::path::{Path, PathBuf};

use longshore::Client;
use serde_json::{Value, json};

use crate::{Result, raw_sqlite, scratch_folder};

/// Makes new files in the scratch folder.
pub(crate) struct Files {
    folder: PathBuf,
    name: &'static str,
    made: u32,
}

impl Files {
    pub(crate) fn new(name: &'static str) -> Result<Self> {
        Ok(Files { folder: scratch_folder()?, name, made: 0 })
    }

    /// Says what SQLite promises here.
    pub(crate) fn print_durability(&self) -> Result<Value> {
        let probe = self.folder.join("probe.db");
        let (mode, synchronous) = raw_sqlite::durability(&raw_sqlite::open(&probe)?)?;
        remove(&probe);
        let version = rusqlite::version();
        println!("SQLite {version}: journal_mode {mode}, synchronous {synchronous} (2 is full)");
        Ok(json!({ "version": version, "journal_mode": mode, "synchronous": synchronous }))
    }

    /// The name of a new file, which is not made.
    pub(crate) fn unmade(&mut self) -> File {
        self.made += 1;
        let name = format!("{}-{}-{}.db", self.name, std::process::id(), self.made);
        File { path: self.folder.join(name) }
    }

    /// A file that an earlier run may have left.
    pub(crate) fn kept(&self, name: &str) -> File {
        File { path: self.folder.join(name) }
    }

    /// A new file with empty tables.
    pub(crate) async fn fresh(&mut self) -> Result<File> {
        let file = self.unmade();
        file.client().await?.migrate().await?;
        Ok(file)
    }

    /// A new file with jobs that wait, all of it out of the log.
    pub(crate) async fn filled(&mut self, waiting: u64) -> Result<File> {
        let file = self.fresh().await?;
        let path = file.path.clone();
        blocking(move || {
            let mut connection = raw_sqlite::open(&path)?;
            raw_sqlite::enqueue(&mut connection, 0, waiting)?;
            connection.query_row("pragma wal_checkpoint(truncate)", [], |_| Ok(()))?;
            Ok(())
        })
        .await?;
        Ok(file)
    }
}

/// A database file that goes when it is dropped.
pub(crate) struct File {
    pub(crate) path: PathBuf,
}

impl File {
    pub(crate) fn url(&self) -> String {
        format!("sqlite:{}", self.path.display())
    }

    /// Leaves it for a later run.
    pub(crate) fn leave(self) {
        std::mem::forget(self);
    }

    pub(crate) async fn client(&self) -> Result<Client> {
        Ok(Client::connect(&self.url()).await?)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// Removes a database file and its companions, if they are there.
fn remove(path: &Path) {
    for end in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{end}", path.display()));
    }
}

pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work).await?
}
