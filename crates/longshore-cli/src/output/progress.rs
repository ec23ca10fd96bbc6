//! How far long work is, for whoever waits at a terminal; nothing for a file.

use std::io::{self, IsTerminal, Write};

/// A bar on standard error, if that is a terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    total: u64,
    done: u64,
    shown: bool,
}

impl Progress {
    pub(crate) fn of(total: u64) -> Self {
        let progress = Progress { total, done: 0, shown: total > 0 && is_wanted() };
        progress.draw();
        progress
    }

    pub(crate) fn advance(&mut self, by: u64) {
        self.done += by;
        self.draw();
    }

    fn draw(&self) {
        if self.shown {
            // Nobody is left to be told that standard error is gone.
            let _ = write!(io::stderr(), "\r{}\x1b[K", bar(self.done, self.total));
        }
    }
}

impl Drop for Progress {
    /// The bar was for the meantime.
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// Whether there is anybody to show a bar to: counting first what there is to do
/// is not worth it otherwise.
pub(crate) fn is_wanted() -> bool {
    io::stderr().is_terminal()
}

fn bar(done: u64, total: u64) -> String {
    const WIDTH: u64 = 30;
    // More may turn up than was counted first.
    let total = total.max(done).max(1);
    let full = (done * WIDTH / total) as usize;
    let empty = WIDTH as usize - full;
    format!("[{}{}] {}%  {done} of {total}", "#".repeat(full), "-".repeat(empty), done * 100 / total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_fills_from_nothing_to_all() {
        assert_eq!(bar(0, 200), "[------------------------------] 0%  0 of 200");
        assert_eq!(bar(100, 200), "[###############---------------] 50%  100 of 200");
        assert_eq!(bar(200, 200), "[##############################] 100%  200 of 200");
        assert_eq!(bar(7, 5), "[##############################] 100%  7 of 7", "more turned up");
        assert_eq!(bar(0, 0), "[------------------------------] 0%  0 of 1");
    }
}
