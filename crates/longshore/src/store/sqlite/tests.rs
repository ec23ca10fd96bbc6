//! Tests of this engine's internals: calls that share a commit, reads during a write, the
//! file's locks, the plan of a claim. The conformance suite tests the operations, on both
//! engines.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use serde_json::json;

use super::*;
use crate::job::JobId;
use crate::rules::enqueue::NewJob;
use crate::store::*;

/// A folder that is deleted when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("longshore-{}", Uuid::now_v7()));
        std::fs::create_dir(&folder).unwrap();
        Folder(folder)
    }

    fn url(&self) -> String {
        format!("sqlite:{}", self.path().display())
    }

    fn path(&self) -> PathBuf {
        self.0.join("queue.db")
    }

    async fn store(&self) -> SqliteStore {
        let store = SqliteStore::open(&self.url()).await.unwrap();
        store.migrate(store.migrations()).await.unwrap();
        store
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn memory() -> SqliteStore {
    let store = SqliteStore::open("sqlite::memory:").await.unwrap();
    store.migrate(store.migrations()).await.unwrap();
    store
}

fn job(kind: &str) -> NewJob {
    NewJob::new(kind, &json!({ "from": kind }))
}

fn run_async(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(test);
}

#[cfg(unix)]
#[test]
fn only_the_owner_may_read_the_files_of_a_database() {
    use std::os::unix::fs::PermissionsExt;
    run_async(async {
        let folder = Folder::new();
        let store = folder.store().await;
        let modes = || {
            let files = std::fs::read_dir(&folder.0).unwrap().map(|file| file.unwrap());
            let mode = |file: std::fs::DirEntry| file.metadata().unwrap().permissions().mode() & 0o777;
            files.map(|file| (file.file_name(), mode(file))).collect::<Vec<_>>()
        };
        assert_eq!(modes().len(), 3, "the database, its log and its shared memory: {:?}", modes());
        assert!(modes().iter().all(|(_, mode)| *mode == 0o600), "{:?}", modes());
        drop(store);
        // An operator may open it for others.
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o640)).unwrap();
        let _again = folder.store().await;
        assert!(modes().iter().any(|(_, mode)| *mode == 0o640), "{:?}", modes());
    });
}

/// Sends a call to its thread without waiting for the reply.
fn begin<T>(call: Pin<&mut (impl Future<Output = T> + ?Sized)>) {
    assert!(call.poll(&mut Context::from_waker(Waker::noop())).is_pending());
}

/// Holds the write lock, as another process would.
fn lock(folder: &Folder) -> Connection {
    let other = Connection::open(folder.path()).unwrap();
    other.execute_batch("begin immediate").unwrap();
    other
}

fn unlock(other: Connection) {
    other.execute_batch("rollback").unwrap();
}

#[test]
fn open_errors_name_the_problem() {
    run_async(async {
        let folder = Folder::new();
        let missing = format!("sqlite:{}/none/queue.db", folder.0.display());
        for url in
            [missing.as_str(), "sqlite:", "sqlite:a.db?mode=ro", &format!("sqlite:{}", folder.0.display())]
        {
            assert_eq!(SqliteStore::open(url).await.unwrap_err().field(), Some("url"), "{url}");
        }
        std::fs::write(folder.0.join("text"), "not a database, however long it may be".repeat(40)).unwrap();
        let text = SqliteStore::open(&format!("sqlite:{}/text", folder.0.display())).await;
        assert!(text.unwrap_err().to_string().contains("not an SQLite database"));
    });
}

#[test]
fn a_failed_call_is_undone_without_the_others_of_its_commit() {
    run_async(async {
        let folder = Folder::new();
        let store = folder.store().await;
        // While the lock is held the calls collect; then they share a commit.
        let other = lock(&folder);
        let mut calls: Vec<_> = (0..20)
            .map(|n| {
                let job = NewJob::new("a", &n).validate().unwrap();
                Box::pin(store.engine.write(move |tx| {
                    enqueue::enqueue(tx, &[job])?;
                    match n % 4 {
                        0 => Err(Error::conflict("on purpose").into()),
                        1 => panic!("on purpose"),
                        _ => Ok(()),
                    }
                }))
            })
            .collect();
        calls.iter_mut().for_each(|call| begin(call.as_mut()));
        unlock(other);
        let mut stored = 0;
        for call in calls {
            stored += u64::from(call.await.is_ok());
        }
        assert_eq!(stored, 10);
        assert_eq!(store.check().await.unwrap(), CheckReport { jobs: 10, problems: Vec::new() });
    });
}

#[test]
fn while_another_process_holds_the_write_lock_reads_succeed_and_writes_time_out() {
    run_async(async {
        let folder = Folder::new();
        let store = folder.store().await;
        let _other = lock(&folder);
        assert!(store.notify_others(&[Notice::Due("default".into())]).await.is_ok());
        assert!(store.get(JobId::new()).await.unwrap().is_none(), "readers do not wait");
        let refused = store.enqueue(&[job("a").validate().unwrap()], KeyWait::Long).await.unwrap_err();
        assert!(refused.is_unavailable());
    });
}

#[test]
fn a_claim_reads_due_jobs_from_its_index_without_scan_or_sort() {
    run_async(async {
        let store = memory().await;
        let plan = store.engine.write(|tx| {
            let sql = format!("explain query plan {}", super::claim::NEXT_DUE);
            let nulls = [(); 5].map(|()| rusqlite::types::Null);
            tx.rows(&sql, rusqlite::params_from_iter(nulls), |row| row.get::<_, String>(3))
        });
        let plan = plan.await.unwrap();
        let range = "COVERING INDEX ready_claim (queue=? AND priority=? AND (run_at,id)>(?,?) AND run_at<?)";
        assert!(plan.len() == 1 && plan[0].contains(range), "{plan:?}");
    });
}

/// SQLite reuses row numbers when the newest jobs are deleted. The ranges of those numbers
/// may have been forgotten by then.
#[test]
fn retention_removes_jobs_whose_row_numbers_are_used_again() {
    run_async(async {
        let store = Arc::new(memory().await);
        let client = crate::Client::new(store.clone());
        let add_many = async |count: usize| {
            let jobs: Vec<_> = (0..count).map(|_| job("a").validate().unwrap()).collect();
            let added = store.enqueue(&jobs, KeyWait::Long).await.unwrap().results;
            added.into_iter().map(|added| added.id).collect::<Vec<_>>()
        };
        let cancel_all = async |ids: &[JobId]| {
            for id in ids {
                client.cancel(*id).await.unwrap();
            }
        };
        let hour = Duration::from_secs(3600);
        let policy = Retention { succeeded: Some(hour), cancelled: Some(hour), failed_permanent: Some(hour) };
        let mut now = store.now().await.unwrap();
        let mut remove_expired = async || {
            now += 2 * hour;
            store.pin_clock(Some(now)).await.unwrap();
            client.retain(&policy, |_| async { true }).await.unwrap().removed
        };

        let (first, newest) = (add_many(1999).await, add_many(2).await);
        cancel_all(&first).await;
        assert_eq!(remove_expired().await, 1999);
        cancel_all(&newest).await;
        for id in newest {
            client.delete(id).await.unwrap();
        }
        let (second, _waiting) = (add_many(2500).await, add_many(1).await);
        cancel_all(&second).await;
        assert_eq!(remove_expired().await, 2500);
    });
}
