//! Installs Debian packages that tasks need, where apt-get may be used.

use std::{
    env,
    path::PathBuf,
    process::{Command, Stdio},
};

use crate::{
    postgres::Owner,
    run::{self, Result},
};

/// Installs a package, but prevents it from starting a server, and Postgres from creating a cluster.
const INSTALL: &str = "
    set -e
    export DEBIAN_FRONTEND=noninteractive
    policy=/usr/sbin/policy-rc.d
    clusters=/etc/postgresql-common/createcluster.d
    mkdir -p $clusters
    echo 'create_main_cluster = false' > $clusters/longshore.conf
    trap 'rm -f $clusters/longshore.conf' EXIT
    if [ ! -e $policy ]; then
      trap 'rm -f $policy $clusters/longshore.conf' EXIT
      printf '#!/bin/sh\\nexit 101\\n' > $policy
      chmod +x $policy
    fi
    install() { apt-get install -y --no-install-recommends \"$1\"; }
    install \"$1\" || { apt-get update && install \"$1\"; }
";

/// Installs `package` as root, or with sudo if it needs no password.
pub(crate) fn install(package: &str) -> Result {
    let privilege: &[&str] = match Owner::is_root() {
        Ok(true) => &[],
        _ if run::succeeds(Command::new("sudo").args(["-n", "true"])) => &["sudo", "-n"],
        _ => return Err("only root, or sudo without a password, can install packages".into()),
    };
    if find_program("apt-get").is_none() {
        return Err("apt-get was not found".into());
    }
    eprintln!("==> {package}: not found; installing Debian's package `{package}`");
    let line = [privilege, &["sh", "-c", INSTALL, "sh", package]].concat();
    let mut install = Command::new(line[0]);
    install.args(&line[1..]).stdout(std::io::stderr()).stdin(Stdio::null());
    if install.status().is_ok_and(|status| status.success()) {
        Ok(())
    } else {
        Err(format!("apt-get could not install `{package}`").into())
    }
}

/// The path of a program on PATH or in `/usr/sbin`.
pub(crate) fn find_program(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut folders = env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    folders.find_map(|folder| Some(folder.join(program)).filter(|path| path.is_file()))
}
