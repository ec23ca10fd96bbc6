//! Finding the Postgres server programs, or installing them.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{debian, run::Result};

/// The directory that contains the server programs.
#[derive(Debug)]
pub(crate) struct Binaries {
    dir: PathBuf,
}

impl Binaries {
    /// Finds the programs, or installs them with apt-get if that is possible.
    /// `alternative` is the environment variable that would make them unnecessary;
    /// error messages mention it.
    pub(crate) fn find_or_install(alternative: &str) -> Result<Binaries> {
        if let Some(binaries) = Binaries::find() {
            return Ok(binaries);
        }
        debian::install("postgresql").map_err(|error| format!("{error}; {}", missing(alternative)))?;
        Binaries::find().ok_or_else(|| {
            "apt-get installed `postgresql`, but initdb, postgres and pg_ctl were still not found; \
             put their directory on PATH"
                .into()
        })
    }

    pub(crate) fn find() -> Option<Binaries> {
        search_path().iter().find_map(|dir| Binaries::in_dir(dir))
    }

    /// The path of one of the programs.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Whether a server module is installed where packages and builds put modules.
    pub(crate) fn have_library(&self, name: &str) -> bool {
        let Some(root) = self.dir.parent() else { return false };
        let exists = |folder: &str| root.join(folder).join(format!("{name}.so")).is_file();
        ["lib", "lib/postgresql"].into_iter().any(exists)
    }

    fn in_dir(dir: &Path) -> Option<Binaries> {
        let complete =
            |dir: &Path| ["initdb", "postgres", "pg_ctl"].iter().all(|program| dir.join(program).is_file());
        if !complete(dir) {
            return None;
        }
        // A directory on PATH may contain links to only some of the programs. The
        // directory that the links point to also contains psql.
        let linked = dir.join("postgres").canonicalize().ok();
        let dir = linked.as_deref().and_then(Path::parent).filter(|target| complete(target)).unwrap_or(dir);
        Some(Binaries { dir: dir.to_path_buf() })
    }
}

/// The directories to search, most explicit choice first: PATH, what pg_config
/// prints, where packages install (newest version first), where a build from source
/// installs.
fn search_path() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = env::split_paths(&path).collect();
    dirs.extend(pg_config_bindir());
    dirs.extend(versions_under(Path::new("/usr/lib/postgresql")));
    dirs.extend(["/usr/local/pgsql/bin", "/usr/local/bin"].map(PathBuf::from));
    dirs
}

fn pg_config_bindir() -> Option<PathBuf> {
    let output = Command::new("pg_config").arg("--bindir").stderr(Stdio::null()).output().ok()?;
    let bindir = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| PathBuf::from(bindir.trim()))
}

/// `<root>/<version>/bin` for each version in `root`, newest first.
fn versions_under(root: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    newest_first(names).iter().map(|version| root.join(version).join("bin")).collect()
}

fn newest_first(mut names: Vec<String>) -> Vec<String> {
    // Compare numbers: as text, 9.6 would be newer than 15.
    let version =
        |name: &str| -> Option<Vec<u32>> { name.split('.').map(|part| part.parse().ok()).collect() };
    names.retain(|name| version(name).is_some());
    names.sort_by_key(|name| std::cmp::Reverse(version(name)));
    names
}

fn missing(alternative: &str) -> String {
    format!(
        "the Postgres server programs (initdb, postgres, pg_ctl) were not found. Install them \
         (Debian, Ubuntu: apt-get install postgresql; Fedora: dnf install postgresql-server; \
         macOS: brew install postgresql), put their directory on PATH if it is an unusual one, \
         or set {alternative} to the URL of a database that may be written to"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers_and_other_names_ignored() {
        let names = ["9.6", "15", "common", "14", "17"].map(String::from);
        assert_eq!(newest_first(names.to_vec()), ["17", "15", "14", "9.6"]);
    }

    #[test]
    fn path_is_searched_before_the_default_directories() {
        let dirs = search_path();
        let first_on_path = env::var_os("PATH").and_then(|path| env::split_paths(&path).next());
        assert_eq!(dirs.first().cloned(), first_on_path);
        assert_eq!(dirs.last(), Some(&PathBuf::from("/usr/local/bin")));
    }

    #[test]
    fn a_directory_with_only_some_of_the_programs_is_skipped() {
        let dir = env::temp_dir().join(format!("longshore-binaries-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("temp dir is writable");
        fs::write(dir.join("postgres"), "").expect("temp dir is writable");
        assert!(Binaries::in_dir(&dir).is_none());
        for program in ["initdb", "pg_ctl"] {
            fs::write(dir.join(program), "").expect("temp dir is writable");
        }
        assert!(Binaries::in_dir(&dir).is_some());
        fs::remove_dir_all(&dir).expect("the test created it");
    }

    #[test]
    fn the_error_names_the_package_and_the_variable() {
        let message = missing("LONGSHORE_TEST_DATABASE_URL");
        assert!(message.contains("apt-get install postgresql"));
        assert!(message.contains("LONGSHORE_TEST_DATABASE_URL"));
    }
}
