//! A folder that results are left in, each as one whole file: whoever looks sees
//! all of it or nothing, and what a settled job promised survives a power cut.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use longshore::worker::{Context, Failure};

use crate::failure;

pub(super) struct Folder {
    path: PathBuf,
    /// The flag that names it.
    flag: &'static str,
}

impl Folder {
    /// A folder that is there, or can come to be with the first file.
    pub(super) fn new(flag: &'static str, path: &Path) -> Result<Self, failure::Failure> {
        if path.as_os_str().is_empty() || (path.exists() && !path.is_dir()) {
            let path = path.display();
            return Err(failure::Failure::usage(format_args!(
                "{flag}: `{path}` is not a folder; name one, or one that may be made"
            )));
        }
        // The path in a job's result has to mean something elsewhere.
        let path = std::path::absolute(path)
            .map_err(|error| failure::Failure::usage(format_args!("{flag}: {error}")))?;
        Ok(Folder { path, flag })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves a job's file, as `<job id>.<ending>`. A later attempt replaces it.
    pub(super) async fn put<S>(
        &self,
        ctx: &Context<S>,
        ending: &str,
        bytes: Vec<u8>,
    ) -> Result<PathBuf, Failure> {
        let path = self.path.join(format!("{}.{ending}", ctx.id()));
        // Numbered by the lease, so that an attempt that has lost its own writes
        // to another file than the one that follows it.
        let part = self.path.join(format!(".{}.{}.part", ctx.id(), ctx.job().lease().lease_no));
        let (folder, whole) = (self.path.clone(), path.clone());
        let written = ctx.spawn_blocking(move || write(&folder, &part, &whole, &bytes)).await?;
        written.map_err(|error| {
            let (path, flag) = (self.path.display(), self.flag);
            Failure::retry(format!("{path}: {error}; see that the worker may write there ({flag})"))
        })?;
        Ok(path)
    }
}

fn write(folder: &Path, part: &Path, whole: &Path, bytes: &[u8]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let written = File::create(part)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(part, whole));
    if written.is_err() {
        let _ = fs::remove_file(part);
    }
    written?;
    // The name is durable when the folder is.
    #[cfg(unix)]
    File::open(folder)?.sync_all()?;
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::builtin::testing::Scratch;

    #[test]
    fn a_file_is_there_whole_or_not_at_all() {
        let scratch = Scratch::new();
        let folder = scratch.path().join("made/when/needed");
        let (part, whole) = (folder.join(".1.part"), folder.join("1.png"));
        write(&folder, &part, &whole, b"first").unwrap();
        write(&folder, &part, &whole, b"second").unwrap();
        assert_eq!(fs::read(&whole).unwrap(), b"second");

        let taken = folder.join("taken");
        fs::create_dir(&taken).unwrap();
        write(&folder, &part, &taken, b"third").unwrap_err();
        let left: Vec<_> = fs::read_dir(&folder).unwrap().map(|file| file.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "nothing half written is left: {left:?}");
    }

    #[test]
    fn what_is_no_folder_is_refused_by_its_flag() {
        let scratch = Scratch::new();
        let file = scratch.path().join("file");
        fs::write(&file, "").unwrap();
        for wrong in [file.as_path(), Path::new("")] {
            let refused = Folder::new("--outbox", wrong).err().unwrap().to_string();
            assert!(refused.starts_with("--outbox: "), "{refused}");
        }
        assert!(Folder::new("--outbox", Path::new("later")).unwrap().path().is_absolute());
    }
}
