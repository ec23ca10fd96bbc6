//! Installs PgBouncer for the tests that run through it. They are skipped without it.

use crate::debian;

/// Installs PgBouncer if it is missing and apt-get may be used. Otherwise prints that its
/// tests are skipped.
pub(crate) fn install_if_missing() {
    if debian::find_program("pgbouncer").is_some() {
        return;
    }
    if let Err(reason) = debian::install("pgbouncer") {
        eprintln!(
            "==> pgbouncer: SKIPPED, {reason}; its tests need the program (Debian, Ubuntu: apt-get install \
             pgbouncer; Fedora: dnf install pgbouncer; macOS: brew install pgbouncer)"
        );
    }
}
