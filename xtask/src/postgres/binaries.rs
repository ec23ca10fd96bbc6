//! Finding Postgres' server programs, or installing them.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::Owner;
use crate::run::{self, Result};

/// The directory with the server's programs.
#[derive(Debug)]
pub(crate) struct Binaries {
    dir: PathBuf,
}

impl Binaries {
    /// Finds the programs, or has apt-get install them where it may.
    /// `alternative` is the variable that would have made them unnecessary.
    pub(crate) fn find_or_install(alternative: &str) -> Result<Binaries> {
        if let Some(binaries) = Binaries::find() {
            return Ok(binaries);
        }
        install(alternative)?;
        Binaries::find().ok_or_else(|| {
            "apt-get installed `postgresql`, yet initdb, postgres and pg_ctl are nowhere to be \
             found; put their directory on PATH"
                .into()
        })
    }

    /// Finds the programs.
    pub(crate) fn find() -> Option<Binaries> {
        places().iter().find_map(|dir| Binaries::in_dir(dir))
    }

    /// The path of one of the programs.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Whether a module for the server lies where packages and builds put them.
    pub(crate) fn have_library(&self, name: &str) -> bool {
        let Some(root) = self.dir.parent() else { return false };
        let there = |folder: &str| root.join(folder).join(format!("{name}.so")).is_file();
        ["lib", "lib/postgresql"].into_iter().any(there)
    }

    fn in_dir(dir: &Path) -> Option<Binaries> {
        let complete =
            |dir: &Path| ["initdb", "postgres", "pg_ctl"].iter().all(|program| dir.join(program).is_file());
        if !complete(dir) {
            return None;
        }
        // A directory on PATH may only hold links to some of the programs;
        // where they point to is where psql is too.
        let linked = dir.join("postgres").canonicalize().ok();
        let dir = linked.as_deref().and_then(Path::parent).filter(|behind| complete(behind)).unwrap_or(dir);
        Some(Binaries { dir: dir.to_path_buf() })
    }
}

/// Where to look, most deliberate choice first: what the user put on PATH, what
/// pg_config says, what packages install (newest version first), what a build
/// from source installs.
fn places() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = env::split_paths(&path).collect();
    places.extend(pg_config_bindir());
    places.extend(versions_under(Path::new("/usr/lib/postgresql")));
    places.extend(["/usr/local/pgsql/bin", "/usr/local/bin"].map(PathBuf::from));
    places
}

fn pg_config_bindir() -> Option<PathBuf> {
    let output = Command::new("pg_config").arg("--bindir").stderr(Stdio::null()).output().ok()?;
    let bindir = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| PathBuf::from(bindir.trim()))
}

/// `<root>/<version>/bin` for every version there, newest first.
fn versions_under(root: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    newest_first(names).iter().map(|version| root.join(version).join("bin")).collect()
}

fn newest_first(mut names: Vec<String>) -> Vec<String> {
    // By number: as text, 9.6 would be newer than 15.
    let version =
        |name: &str| -> Option<Vec<u32>> { name.split('.').map(|part| part.parse().ok()).collect() };
    names.retain(|name| version(name).is_some());
    names.sort_by_key(|name| std::cmp::Reverse(version(name)));
    names
}

/// Installs the server without the running cluster that Debian's package would
/// otherwise set up.
const INSTALL: &str = "
    set -e
    export DEBIAN_FRONTEND=noninteractive
    defaults=/etc/postgresql-common/createcluster.d
    mkdir -p $defaults
    echo 'create_main_cluster = false' > $defaults/longshore.conf
    trap 'rm -f $defaults/longshore.conf' EXIT
    install() { apt-get install -y --no-install-recommends postgresql; }
    install || { apt-get update && install; }
";

fn install(alternative: &str) -> Result {
    let on_path = |program: &str| {
        let path = env::var_os("PATH").unwrap_or_default();
        env::split_paths(&path).any(|dir| dir.join(program).is_file())
    };
    let privilege: &[&str] = if Owner::we_are_root()? {
        &[]
    } else if run::succeeds(Command::new("sudo").args(["-n", "true"])) {
        &["sudo", "-n"]
    } else {
        return Err(missing(alternative).into());
    };
    if !on_path("apt-get") {
        return Err(missing(alternative).into());
    }

    eprintln!("==> postgres: none found; installing Debian's package `postgresql`");
    let line = [privilege, &["sh", "-c", INSTALL]].concat();
    let status = Command::new(line[0])
        .args(&line[1..])
        // apt-get's chatter is for stderr, like everything that is no answer.
        .stdout(std::io::stderr())
        .stdin(Stdio::null())
        .status()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("apt-get could not install it. {}", missing(alternative)).into())
    }
}

fn missing(alternative: &str) -> String {
    format!(
        "Postgres' server programs (initdb, postgres, pg_ctl) were not found. Install them \
         (Debian, Ubuntu: apt-get install postgresql; Fedora: dnf install postgresql-server; \
         macOS: brew install postgresql), put their directory on PATH if they are somewhere \
         unusual, or set {alternative} to a database that may be written to"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers_and_strangers_ignored() {
        let names = ["9.6", "15", "common", "14", "17"].map(String::from);
        assert_eq!(newest_first(names.to_vec()), ["17", "15", "14", "9.6"]);
    }

    #[test]
    fn path_is_searched_before_the_usual_places() {
        let places = places();
        let first_on_path = env::var_os("PATH").and_then(|path| env::split_paths(&path).next());
        assert_eq!(places.first().cloned(), first_on_path);
        assert_eq!(places.last(), Some(&PathBuf::from("/usr/local/bin")));
    }

    #[test]
    fn a_directory_with_only_some_of_the_programs_is_passed_over() {
        let dir = env::temp_dir().join(format!("longshore-binaries-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("temp dir is writable");
        fs::write(dir.join("postgres"), "").expect("temp dir is writable");
        assert!(Binaries::in_dir(&dir).is_none());
        for program in ["initdb", "pg_ctl"] {
            fs::write(dir.join(program), "").expect("temp dir is writable");
        }
        assert!(Binaries::in_dir(&dir).is_some());
        fs::remove_dir_all(&dir).expect("it is ours");
    }

    #[test]
    fn the_refusal_names_the_package_and_the_variable() {
        let message = missing("LONGSHORE_TEST_DATABASE_URL");
        assert!(message.contains("apt-get install postgresql"));
        assert!(message.contains("LONGSHORE_TEST_DATABASE_URL"));
    }
}
