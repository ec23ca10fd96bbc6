//! `cargo xtask pg`: a durable scratch database for each clone, for experiments and
//! benchmarks. It keeps running after the command that starts it, and `stop` keeps
//! its data.

use std::{
    env,
    ffi::OsString,
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    postgres::{Binaries, Cluster, Owner, Tuning},
    run::{self, Result},
};

/// What to do with the database.
#[derive(Debug, PartialEq)]
pub(crate) enum Action {
    Start,
    Stop,
    Status,
    Url,
    Psql(Vec<OsString>),
}

impl Action {
    pub(crate) fn parse(mut args: Vec<OsString>) -> std::result::Result<Action, String> {
        if args.is_empty() {
            return Ok(Action::Start);
        }
        let action = args.remove(0);
        let action = match action.to_string_lossy().as_ref() {
            "start" => Action::Start,
            "stop" => Action::Stop,
            "status" => Action::Status,
            "url" => Action::Url,
            "psql" => return Ok(Action::Psql(args)),
            other => {
                return Err(format!("`pg` takes start, stop, status, url or psql, not `{other}`"));
            }
        };
        match args.first() {
            None => Ok(action),
            Some(extra) => Err(format!("`pg`: unexpected argument `{}`", extra.to_string_lossy())),
        }
    }
}

/// `cargo xtask pg`.
pub(crate) fn run(action: Action) -> Result {
    let binaries = match action {
        Action::Start => Binaries::find_or_install("DATABASE_URL")?,
        _ => Binaries::find().ok_or("Postgres is not installed; `cargo xtask pg start` installs it")?,
    };
    let owner = Owner::choose()?;
    let cluster = Cluster::at(home(&owner), binaries, owner);
    match action {
        Action::Start => start(&cluster)?,
        Action::Stop => {
            let home = cluster.home().display();
            if cluster.stop()? {
                eprintln!("stopped; the data is kept in {home}");
            } else {
                eprintln!("the database was not running");
            }
        }
        Action::Status => match cluster.url() {
            Some(url) => println!("running in {}\n{}", cluster.home().display(), export(&url)),
            None => println!("not running; start it with: cargo xtask pg start"),
        },
        Action::Url => println!("{}", url(&cluster)?),
        Action::Psql(args) => {
            let psql = cluster.binaries().program("psql");
            let error = Command::new(&psql).arg(url(&cluster)?).args(args).exec();
            return Err(format!("{}: {error}", psql.display()).into());
        }
    }
    Ok(())
}

fn start(cluster: &Cluster) -> Result {
    if cluster.url().is_none() {
        if !cluster.exists() {
            eprintln!("creating a database in {}", cluster.home().display());
            cluster.create()?;
        }
        // Use the same port as last time, so that a saved URL still works.
        let port_file = cluster.home().join("port");
        let last_port = fs::read_to_string(&port_file).ok().and_then(|port| port.trim().parse().ok());
        cluster.start(Tuning::Durable, last_port)?;
        if let Some(port) = cluster.port() {
            fs::write(port_file, port.to_string())?;
        }
    }
    println!("{}", export(&url(cluster)?));
    Ok(())
}

fn url(cluster: &Cluster) -> Result<String> {
    cluster.url().ok_or_else(|| "the database is not running; start it with: cargo xtask pg start".into())
}

/// An assignment to paste into a shell.
fn export(url: &str) -> String {
    format!("DATABASE_URL={url}")
}

/// `target/pg`, or a directory for this clone in the temporary directory if the
/// account that runs Postgres cannot reach the clone.
fn home(owner: &Owner) -> PathBuf {
    let target = run::target_dir();
    if owner.can_reach(&target) {
        return target.join("pg");
    }
    env::temp_dir().join(format!("longshore-pg-{:016x}", fingerprint(&target)))
}

/// FNV-1a. Unlike the standard library's hash it is the same in every version of
/// Rust, so a new toolchain still finds the data.
fn fingerprint(path: &Path) -> u64 {
    path.as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_clones_have_two_databases() {
        let [one, two] = ["/root/one/target", "/root/two/target"].map(Path::new);
        assert_eq!(fingerprint(one), fingerprint(one));
        assert_ne!(fingerprint(one), fingerprint(two));
    }
}
