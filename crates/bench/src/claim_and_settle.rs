//! Claims and settles in batches until no jobs are left, with the library and with raw
//! SQL, on either engine. The time starts once the claimers are warm.

use std::time::Instant;

use longshore::Client;
use longshore::store::ClaimCursor;

use crate::postgres_server::Admin;
use crate::report::Sample;
use crate::sqlite_files::{Files, blocking};
use crate::{Result, join_all, library, raw_postgres, raw_sqlite};

const BULK: u64 = 10_000;
/// Batches before the time starts. After them connections are open, statements are
/// prepared, and Postgres has chosen its plans.
pub(crate) const WARM_UP: u64 = 8;

/// The number of jobs to enqueue so that `jobs` are left after the warm-up.
pub(crate) fn with_warm_up(jobs: u64, batch: u32, claimers: usize) -> u64 {
    jobs + WARM_UP * u64::from(batch) * claimers as u64
}

/// Registers claimers and warms all of them up at the same time, so that each uses its
/// own connection and prepares its statements there.
pub(crate) async fn warm_claimers(
    client: &Client,
    batch: u32,
    claimers: usize,
) -> Result<Vec<library::Claimer>> {
    let mut tasks = Vec::new();
    for _ in 0..claimers {
        let mut claimer = library::Claimer::register(client, None, batch, ClaimCursor::default()).await?;
        tasks.push(tokio::spawn(async move {
            for _ in 0..WARM_UP {
                claimer.round().await?;
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(claimer)
        }));
    }
    let mut warm = Vec::new();
    for task in tasks {
        warm.push(task.await??);
    }
    Ok(warm)
}

pub(crate) async fn library_on_postgres(
    admin: &mut Admin,
    schema: &str,
    jobs: u64,
    batch: u32,
    claimers: usize,
) -> Result<Sample> {
    let client = admin.fresh_schema(schema).await?;
    library::enqueue_bulk(&client, with_warm_up(jobs, batch, claimers), BULK).await?;
    admin.vacuum_analyze(schema).await?;
    let warm = warm_claimers(&client, batch, claimers).await?;
    let drain = |claimer: library::Claimer| tokio::spawn(claimer.drain());
    admin.timed(async { join_all(warm.into_iter().map(drain).collect()).await }).await
}

pub(crate) async fn raw_on_postgres(
    admin: &mut Admin,
    jobs: u64,
    batch: u32,
    claimers: usize,
) -> Result<Sample> {
    admin.fresh_schema(raw_postgres::SCHEMA).await?;
    let mut connection = admin.raw_connection().await?;
    raw_postgres::insert_many(&mut connection, 0, with_warm_up(jobs, batch, claimers)).await?;
    admin.vacuum_analyze(raw_postgres::SCHEMA).await?;
    let mut warm = Vec::new();
    for _ in 0..claimers {
        let mut claimer = raw_postgres::Claimer::new(admin.raw_connection().await?, batch);
        for _ in 0..WARM_UP {
            claimer.round().await?;
        }
        warm.push(claimer);
    }
    let drain = |claimer: raw_postgres::Claimer| tokio::spawn(claimer.drain());
    admin.timed(async { join_all(warm.into_iter().map(drain).collect()).await }).await
}

pub(crate) async fn library_on_sqlite(
    files: &mut Files,
    jobs: u64,
    batch: u32,
    claimers: usize,
) -> Result<Sample> {
    let file = files.filled(with_warm_up(jobs, batch, claimers)).await?;
    let client = file.client().await?;
    let warm = warm_claimers(&client, batch, claimers).await?;
    let started = Instant::now();
    let drain = |claimer: library::Claimer| tokio::spawn(claimer.drain());
    let jobs = join_all(warm.into_iter().map(drain).collect()).await?;
    Ok(Sample::since(started, jobs))
}

pub(crate) async fn raw_on_sqlite(
    files: &mut Files,
    jobs: u64,
    batch: u32,
    claimers: usize,
) -> Result<Sample> {
    let file = files.filled(with_warm_up(jobs, batch, claimers)).await?;
    let mut warm = Vec::new();
    for _ in 0..claimers {
        let path = file.path.clone();
        let claimer = blocking(move || {
            let mut claimer = raw_sqlite::Claimer::open(&path, batch)?;
            for _ in 0..WARM_UP {
                claimer.round()?;
            }
            Ok(claimer)
        });
        warm.push(claimer.await?);
    }
    let started = Instant::now();
    let drain = |claimer: raw_sqlite::Claimer| tokio::task::spawn_blocking(|| claimer.drain());
    let jobs = join_all(warm.into_iter().map(drain).collect()).await?;
    Ok(Sample::since(started, jobs))
}
