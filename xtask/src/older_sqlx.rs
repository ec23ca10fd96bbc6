//! Checks that a program on an older sqlx can use Longshore with Postgres, as README.md
//! says: Cargo must be able to choose versions for both. Nothing is built.

use std::fs;

use crate::run::{Result, Unavailable, cargo, target_dir, workspace};

/// The features of Longshore that such a program may use: all except `sqlite`, which links
/// to another SQLite than the one that sqlx 0.8 requires, even if that is not used.
const FEATURES: [&str; 7] = ["api", "builtin", "otel", "postgres", "swagger", "tls", "worker"];

/// Resolves the dependencies of a program with sqlx 0.8.
pub(crate) fn check() -> Result {
    let folder = target_dir().join("older-sqlx");
    fs::create_dir_all(folder.join("src"))?;
    fs::write(folder.join("src/lib.rs"), "")?;
    fs::write(folder.join("Cargo.toml"), manifest())?;
    let _ = fs::remove_file(folder.join("Cargo.lock"));
    let mut resolve = cargo(["generate-lockfile"]);
    let output = resolve.current_dir(&folder).output()?;
    let message = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        eprintln!("==> sqlx 0.8: ok, a program that uses it can use Longshore with Postgres");
        return Ok(());
    }
    if message.contains("failed to select a version") {
        return Err(format!(
            "sqlx 0.8: a program that uses it cannot use Longshore; README.md says it can\n{message}"
        )
        .into());
    }
    Err(Unavailable(format!("sqlx 0.8: its dependencies cannot be looked up: {}", message.trim())).into())
}

fn manifest() -> String {
    let library = workspace().join("crates/longshore");
    format!(
        r#"[package]
name = "older-sqlx"
version = "0.0.0"
edition = "2024"

[workspace]

[dependencies]
longshore = {{ path = {library:?}, default-features = false, features = {FEATURES:?} }}
sqlx = {{ version = "0.8", features = ["runtime-tokio", "postgres", "chrono", "uuid", "migrate", "macros"] }}
"#
    )
}
