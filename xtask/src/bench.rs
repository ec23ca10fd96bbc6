//! `cargo xtask bench`: builds the benchmark in release mode and runs it on a Postgres
//! with durable commits.

use std::{env, ffi::OsString, path::PathBuf, process::Command};

use crate::{
    postgres::{Binaries, Location, TemporaryCluster, Tuning},
    run::{Result, cargo, last_step, step, workspace},
};

const URL_VARIABLE: &str = "DATABASE_URL";

/// `cargo xtask bench`.
pub(crate) fn bench(args: &[OsString]) -> Result {
    let given = env::var_os(URL_VARIABLE).is_some_and(|url| !url.is_empty());
    let binaries = if given { None } else { Some(Binaries::find_or_install(URL_VARIABLE)?) };

    // A separate step, so that the last step prints only the benchmark's output.
    step("build", &mut cargo(["build", "--release", "-p", "bench"]))?;
    let args = match peers_without_program(args) {
        Some(at) => {
            step("build peers", &mut build_peers())?;
            let mut args = args.to_vec();
            args.insert(at + 1, peers_folder().join("release/bench-peers").into());
            args
        }
        None => args.to_vec(),
    };

    let mut bench = cargo(["run", "--quiet", "--release", "-p", "bench", "--"]);
    bench.args(args);
    let cluster = binaries
        .map(|binaries| TemporaryCluster::start(binaries, Tuning::Durable, Location::Disk))
        .transpose()?;
    if let Some(cluster) = &cluster {
        bench.env(URL_VARIABLE, cluster.url());
    }
    last_step("bench", &mut bench)
}

/// The position of a `--peers` that is not followed by a program. The program is then
/// built and inserted.
fn peers_without_program(args: &[OsString]) -> Option<usize> {
    let at = args.iter().position(|arg| arg == "--peers")?;
    let named = args.get(at + 1).is_some_and(|next| !next.to_string_lossy().starts_with('-'));
    (!named).then_some(at)
}

/// The other job queues are a separate workspace with its own lock file. They are
/// built under this workspace's `target`.
fn build_peers() -> Command {
    let mut build = cargo(["build", "--release", "--locked", "--manifest-path"]);
    build.arg(workspace().join("crates/bench-peers/Cargo.toml"));
    build.arg("--target-dir").arg(peers_folder());
    build
}

fn peers_folder() -> PathBuf {
    workspace().join("target/bench-peers")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn peers_are_built_unless_a_program_is_given() {
        assert_eq!(peers_without_program(&words("worker --peers")), Some(1));
        assert_eq!(peers_without_program(&words("worker --peers --quick")), Some(1));
        assert_eq!(peers_without_program(&words("worker --peers ./mine --quick")), None);
        assert_eq!(peers_without_program(&words("core")), None);
    }
}
