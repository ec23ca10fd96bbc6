//! Files that only the user of the process may read: they contain payloads.

use std::fs::OpenOptions;

/// Options to create such a file. A file that exists keeps its permissions.
pub(crate) fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}
