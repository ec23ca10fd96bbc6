//! A folder for the files that jobs produce. A file appears only when it is complete,
//! and the file of a settled job survives a power failure.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::private_file;
use crate::worker::{Context, Failure};

pub(super) struct Folder {
    path: PathBuf,
    /// The setting of the path, for messages.
    field: &'static str,
}

impl Folder {
    /// Accepts a folder that exists or can be created with the first file.
    pub(super) fn new(field: &'static str, path: &Path) -> Result<Self> {
        if path.as_os_str().is_empty() || (path.exists() && !path.is_dir()) {
            let path = path.display();
            return Err(Error::invalid(
                field,
                format!(
                    "{field}: `{path}` is not a folder; use an existing folder or a path that can be created"
                ),
            ));
        }
        // Job results contain the path, so it must not depend on the working directory.
        let path =
            std::path::absolute(path).map_err(|error| Error::invalid(field, format!("{field}: {error}")))?;
        Ok(Folder { path, field })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a job's file as `<job id>.<extension>`. A later attempt replaces it.
    pub(super) async fn write<S>(
        &self,
        ctx: &Context<S>,
        extension: &str,
        bytes: Vec<u8>,
    ) -> Result<PathBuf, Failure> {
        let path = self.path.join(format!("{}.{extension}", ctx.id()));
        // The name contains the lease number, so that an attempt that has lost its lease
        // does not write to the same file as its successor.
        let partial = self.path.join(format!(".{}.{}.part", ctx.id(), ctx.job().lease().lease_no));
        let (folder, complete) = (self.path.clone(), path.clone());
        let result =
            ctx.spawn_blocking(move || write_atomically(&folder, &partial, &complete, &bytes)).await?;
        result.map_err(|error| {
            let (path, field) = (self.path.display(), self.field);
            Failure::retry(format!("{path}: {error}; make sure that the worker may write there (`{field}`)"))
        })?;
        Ok(path)
    }
}

fn write_atomically(folder: &Path, partial: &Path, complete: &Path, bytes: &[u8]) -> io::Result<()> {
    create_folder(folder)?;
    let result = private_file::options()
        .create(true)
        .truncate(true)
        .open(partial)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(partial, complete));
    if result.is_err() {
        let _ = fs::remove_file(partial);
    }
    result?;
    // Syncing the folder makes the new name durable.
    #[cfg(unix)]
    File::open(folder)?.sync_all()?;
    Ok(())
}

/// Creates a folder that only the user of the process may read, unless it exists.
fn create_folder(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use super::*;
    use crate::builtin::testing::TempFolder;

    #[test]
    fn a_file_appears_complete_or_not_at_all() {
        let temp = TempFolder::new();
        let folder = temp.path().join("created/when/needed");
        let (partial, complete) = (folder.join(".1.part"), folder.join("1.png"));
        write_atomically(&folder, &partial, &complete, b"first").unwrap();
        write_atomically(&folder, &partial, &complete, b"second").unwrap();
        assert_eq!(fs::read(&complete).unwrap(), b"second");

        let taken = folder.join("taken");
        fs::create_dir(&taken).unwrap();
        write_atomically(&folder, &partial, &taken, b"third").unwrap_err();
        let files: Vec<_> = fs::read_dir(&folder).unwrap().map(|file| file.unwrap().file_name()).collect();
        assert_eq!(files.len(), 2, "no partial file is left: {files:?}");
    }

    #[cfg(unix)]
    #[test]
    fn only_the_owner_may_read_what_jobs_write() {
        use std::os::unix::fs::PermissionsExt;
        let temp = TempFolder::new();
        let folder = temp.path().join("outbox");
        let complete = folder.join("1.eml");
        write_atomically(&folder, &folder.join(".1.part"), &complete, b"Dear Ada").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&folder), mode(&complete)), (0o700, 0o600));
    }

    #[test]
    fn an_invalid_folder_is_refused_with_the_name_of_its_setting() {
        let temp = TempFolder::new();
        let file = temp.path().join("file");
        fs::write(&file, "").unwrap();
        for invalid in [file.as_path(), Path::new("")] {
            let error = Folder::new("outbox", invalid).err().unwrap();
            assert_eq!(error.field(), Some("outbox"), "{error}");
        }
        assert!(Folder::new("outbox", Path::new("later")).unwrap().path().is_absolute());
    }
}
