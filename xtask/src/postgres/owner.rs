//! The account that owns a cluster and runs its server. Postgres refuses to run as
//! root, so root uses an unprivileged account; every other user owns their clusters.

use std::{
    ffi::OsStr,
    fs,
    os::unix::{
        fs::{DirBuilderExt, MetadataExt, chown},
        process::CommandExt,
    },
    path::Path,
    process::Command,
};

use crate::run::{self, Result};

/// The account that runs the server and owns its files.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Owner {
    /// The user that runs this program.
    CurrentUser { uid: u32 },
    /// An unprivileged account, because this program runs as root.
    Account { uid: u32, gid: u32 },
}

impl Owner {
    pub(crate) fn choose() -> Result<Owner> {
        let uid = current_uid()?;
        if uid != 0 {
            return Ok(Owner::CurrentUser { uid });
        }
        let passwd = fs::read_to_string("/etc/passwd")?;
        ["postgres", "nobody"].iter().find_map(|name| account(&passwd, name)).ok_or_else(|| {
            "Postgres does not run as root, and there is neither a user `postgres` nor a user \
                 `nobody` to run it as; create one: useradd --system postgres"
                .into()
        })
    }

    pub(crate) fn is_root() -> Result<bool> {
        Ok(current_uid()? == 0)
    }

    /// A command that runs as the owner. Its messages are in English, because some
    /// of them are parsed.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("LC_ALL", "C");
        if let Owner::Account { uid, gid } = *self {
            command.uid(uid).gid(gid);
        }
        command
    }

    /// Whether the owner can reach files below `dir`. A `cd` finds out, because it
    /// depends on the permissions of every parent directory; /root is usually closed.
    pub(crate) fn can_reach(&self, dir: &Path) -> bool {
        run::succeeds(self.command("sh").args(["-c", "cd -- \"$1\"", "sh"]).arg(dir))
    }

    /// Creates `dir` for the owner alone, or accepts an existing one of the owner.
    pub(crate) fn make_dir(&self, dir: &Path) -> Result {
        let failed = |error: std::io::Error| format!("{}: {error}", dir.display());
        match fs::DirBuilder::new().mode(0o700).create(dir) {
            Ok(()) => self.give(dir),
            Err(_) if dir.exists() => {
                let found = fs::symlink_metadata(dir).map_err(failed)?;
                if found.is_dir() && found.uid() == self.uid() {
                    return Ok(());
                }
                // In a shared directory, another user may have created it first.
                Err(format!(
                    "{} exists but is not a directory owned by user {}; remove it",
                    dir.display(),
                    self.uid()
                )
                .into())
            }
            Err(error) => Err(failed(error).into()),
        }
    }

    /// Makes the owner own a file that this program created.
    pub(crate) fn give(&self, path: &Path) -> Result {
        if let Owner::Account { uid, gid } = *self {
            chown(path, Some(uid), Some(gid)).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }

    fn uid(&self) -> u32 {
        match *self {
            Owner::CurrentUser { uid } | Owner::Account { uid, .. } => uid,
        }
    }
}

fn current_uid() -> Result<u32> {
    let output = Command::new("id").arg("-u").output()?;
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}

fn account(passwd: &str, name: &str) -> Option<Owner> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next() != Some(name) {
            return None;
        }
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        Some(Owner::Account { uid, gid })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "\
root:x:0:0:root:/root:/bin/bash
postgres-exporter:x:997:996::/:/usr/sbin/nologin
nobody:x:65534:65533:nobody:/nonexistent:/usr/sbin/nologin
postgres:x:101:104:PostgreSQL administrator,,,:/var/lib/postgresql:/bin/bash
";

    #[test]
    fn an_account_is_found_by_its_whole_name() {
        assert_eq!(account(PASSWD, "postgres"), Some(Owner::Account { uid: 101, gid: 104 }));
        assert_eq!(account(PASSWD, "nobody"), Some(Owner::Account { uid: 65534, gid: 65533 }));
        assert_eq!(account(PASSWD, "postg"), None);
    }

    #[test]
    fn an_account_is_never_root() {
        let owner = Owner::choose().expect("the machine has a suitable account");
        assert_ne!(owner.uid(), 0);
    }
}
