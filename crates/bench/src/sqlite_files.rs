//! SQLite database files to measure on, removed after the measurement.

use std::path::{Path, PathBuf};

use longshore::Client;
use serde_json::{Value, json};

use crate::{Result, raw_sqlite, scratch_folder};

/// Creates files in the scratch folder.
pub(crate) struct Files {
    folder: PathBuf,
    name: &'static str,
    created: u32,
}

impl Files {
    pub(crate) fn new(name: &'static str) -> Result<Self> {
        Ok(Files { folder: scratch_folder()?, name, created: 0 })
    }

    /// Prints and returns SQLite's durability settings.
    pub(crate) fn print_durability(&self) -> Result<Value> {
        let probe = self.folder.join("probe.db");
        let (mode, synchronous) = raw_sqlite::durability(&raw_sqlite::open(&probe)?)?;
        remove(&probe);
        let version = rusqlite::version();
        println!("SQLite {version}: journal_mode {mode}, synchronous {synchronous} (2 is full)");
        Ok(json!({ "version": version, "journal_mode": mode, "synchronous": synchronous }))
    }

    /// The path of a new file, which is not created yet.
    pub(crate) fn new_path(&mut self) -> File {
        self.created += 1;
        let name = format!("{}-{}-{}.db", self.name, std::process::id(), self.created);
        File { path: self.folder.join(name) }
    }

    /// The path of a file that an earlier run may have kept.
    pub(crate) fn kept(&self, name: &str) -> File {
        File { path: self.folder.join(name) }
    }

    /// A new file with empty tables.
    pub(crate) async fn fresh(&mut self) -> Result<File> {
        let file = self.new_path();
        file.client().await?.migrate().await?;
        Ok(file)
    }

    /// A new file with waiting jobs, fully checkpointed.
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

/// A database file that is removed when this is dropped.
pub(crate) struct File {
    pub(crate) path: PathBuf,
}

impl File {
    pub(crate) fn url(&self) -> String {
        format!("sqlite:{}", self.path.display())
    }

    /// Keeps the file for a later run.
    pub(crate) fn keep(self) {
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

/// Removes a database file, its write-ahead log and its shared memory, if they exist.
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
