//! Installs PgBouncer for the tests that run through it. They are skipped without it.

use std::{
    env,
    path::PathBuf,
    process::{Command, Stdio},
};

use crate::{postgres::Owner, run};

/// Installs Debian's package, but prevents it from starting a server.
const INSTALL: &str = "
    set -e
    export DEBIAN_FRONTEND=noninteractive
    policy=/usr/sbin/policy-rc.d
    if [ ! -e $policy ]; then
      trap 'rm -f $policy' EXIT
      printf '#!/bin/sh\\nexit 101\\n' > $policy
      chmod +x $policy
    fi
    install() { apt-get install -y --no-install-recommends pgbouncer; }
    install || { apt-get update && install; }
";

/// Installs PgBouncer if it is missing and apt-get may be used. Otherwise prints that its
/// tests are skipped.
pub(crate) fn install_if_missing() {
    if is_installed("pgbouncer") {
        return;
    }
    let privilege: &[&str] = match Owner::is_root() {
        Ok(true) => &[],
        _ if run::succeeds(Command::new("sudo").args(["-n", "true"])) => &["sudo", "-n"],
        _ => return print_skipped(),
    };
    if !is_installed("apt-get") {
        return print_skipped();
    }
    eprintln!("==> pgbouncer: not found; installing Debian's package `pgbouncer`");
    let line = [privilege, &["sh", "-c", INSTALL]].concat();
    let mut install = Command::new(line[0]);
    install.args(&line[1..]).stdout(std::io::stderr()).stdin(Stdio::null());
    if !install.status().is_ok_and(|status| status.success()) {
        print_skipped();
    }
}

fn print_skipped() {
    eprintln!(
        "==> pgbouncer: SKIPPED, its tests need the program (Debian, Ubuntu: apt-get install pgbouncer; \
         Fedora: dnf install pgbouncer; macOS: brew install pgbouncer)"
    );
}

fn is_installed(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut folders = env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    folders.any(|folder| folder.join(program).is_file())
}
