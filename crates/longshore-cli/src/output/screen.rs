//! Redraws a terminal in place. Each frame overwrites the last one in a single write, so
//! that nothing flickers.

use std::io::{self, Write};

/// Keeps the cursor hidden until it is dropped.
#[derive(Debug)]
pub(crate) struct Cursor(());

impl Cursor {
    /// Hides the cursor and clears the screen.
    pub(crate) fn hide() -> Self {
        write("\x1b[?25l\x1b[2J");
        Cursor(())
    }
}

impl Drop for Cursor {
    fn drop(&mut self) {
        write("\x1b[?25h");
    }
}

/// Draws text from the top left corner, as much as fits.
pub(super) fn draw(text: &str, height: Option<usize>) {
    write(&frame(text, height));
}

fn frame(text: &str, height: Option<usize>) -> String {
    // Keep the last line free: a line break there would scroll the screen.
    let room = height.map_or(usize::MAX, |height| height.saturating_sub(1).max(1));
    let mut frame = String::from("\x1b[H");
    for line in text.lines().take(room) {
        frame.push_str(line);
        frame.push_str("\x1b[K\n");
    }
    frame.push_str("\x1b[J");
    frame
}

fn write(text: &str) {
    let mut stdout = io::stdout().lock();
    // If the terminal is closed, nobody can see the frame anyway.
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_frame_overwrites_the_last_and_clears_the_rest() {
        assert_eq!(frame("a\nb\n", None), "\x1b[Ha\x1b[K\nb\x1b[K\n\x1b[J");
    }

    #[test]
    fn lines_that_do_not_fit_are_dropped_so_that_nothing_scrolls() {
        assert_eq!(frame("a\nb\nc", Some(3)), "\x1b[Ha\x1b[K\nb\x1b[K\n\x1b[J");
        assert_eq!(frame("a\nb", Some(0)), "\x1b[Ha\x1b[K\n\x1b[J");
    }
}
