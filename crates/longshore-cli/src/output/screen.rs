//! A terminal that is drawn anew again and again: what was there is written over
//! in one go, so that nothing flickers.

use std::io::{self, Write};

/// Hidden, until this is dropped.
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

/// Draws a text from the top left corner, as much of it as there is room for.
pub(super) fn draw(text: &str, height: Option<usize>) {
    write(&frame(text, height));
}

fn frame(text: &str, height: Option<usize>) -> String {
    // The last line stays free: a line break in it would push up all others.
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
    // Whoever closed the terminal sees nothing either way.
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_frame_writes_over_the_last_and_clears_what_is_left() {
        assert_eq!(frame("a\nb\n", None), "\x1b[Ha\x1b[K\nb\x1b[K\n\x1b[J");
    }

    #[test]
    fn what_does_not_fit_is_cut_and_never_scrolls() {
        assert_eq!(frame("a\nb\nc", Some(3)), "\x1b[Ha\x1b[K\nb\x1b[K\n\x1b[J");
        assert_eq!(frame("a\nb", Some(0)), "\x1b[Ha\x1b[K\n\x1b[J");
    }
}
