//! The benchmark: built in release mode, run on a Postgres that keeps its
//! promises.

use std::{env, ffi::OsString};

use crate::{
    postgres::{Binaries, Scratch, ThrowAway, Tuning},
    run::{Result, cargo, last_step, step},
};

const URL_VARIABLE: &str = "DATABASE_URL";

/// `cargo xtask bench`.
pub(crate) fn bench(args: &[OsString]) -> Result {
    let given = env::var_os(URL_VARIABLE).is_some_and(|url| !url.is_empty());
    let binaries = if given { None } else { Some(Binaries::find_or_install(URL_VARIABLE)?) };

    // Apart from the run, so that the run's output is the benchmark's alone.
    step("build", &mut cargo(["build", "--release", "-p", "bench"]))?;

    let mut bench = cargo(["run", "--quiet", "--release", "-p", "bench", "--"]);
    bench.args(args);
    let cluster =
        binaries.map(|binaries| ThrowAway::start(binaries, Tuning::Durable, Scratch::OnDisk)).transpose()?;
    if let Some(cluster) = &cluster {
        bench.env(URL_VARIABLE, cluster.url());
    }
    last_step("bench", &mut bench)
}
