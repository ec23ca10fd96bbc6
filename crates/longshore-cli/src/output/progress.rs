//! A progress bar for long operations, shown only if standard error is a terminal.

use std::io::{self, Write};

use super::has_escapes;

/// A bar on standard error, if that is a terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    total: u64,
    done: u64,
    visible: bool,
}

impl Progress {
    /// Whether a bar would be visible. If not, callers skip counting the work in advance.
    pub(crate) fn is_visible() -> bool {
        has_escapes(&io::stderr())
    }

    pub(crate) fn of(total: u64) -> Self {
        let progress = Progress { total, done: 0, visible: total > 0 && Progress::is_visible() };
        progress.draw();
        progress
    }

    pub(crate) fn advance(&mut self, by: u64) {
        self.done += by;
        self.draw();
    }

    fn draw(&self) {
        if self.visible {
            // If standard error is closed, there is nowhere to report that.
            let _ = write!(io::stderr(), "\r{}\x1b[K", bar(self.done, self.total));
        }
    }
}

impl Drop for Progress {
    /// Removes the bar when the operation is over.
    fn drop(&mut self) {
        if self.visible {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

fn bar(done: u64, total: u64) -> String {
    const WIDTH: u64 = 30;
    // There may be more than was counted in advance.
    let total = total.max(done).max(1);
    let full = (done * WIDTH / total) as usize;
    let empty = WIDTH as usize - full;
    format!("[{}{}] {}%  {done} of {total}", "#".repeat(full), "-".repeat(empty), done * 100 / total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_fills_up_with_progress() {
        assert_eq!(bar(0, 200), "[------------------------------] 0%  0 of 200");
        assert_eq!(bar(100, 200), "[###############---------------] 50%  100 of 200");
        assert_eq!(bar(200, 200), "[##############################] 100%  200 of 200");
        assert_eq!(bar(7, 5), "[##############################] 100%  7 of 7", "more than was counted");
        assert_eq!(bar(0, 0), "[------------------------------] 0%  0 of 1");
    }
}
