//! `--watch`: repeats a command at an interval until a signal.

use chrono::Utc;
use longshore::worker::Signals;

use crate::args::Repeat;
use crate::duration;
use crate::failure::{Code, Outcome};
use crate::output::{Cursor, Out, instant};

/// Runs `show` once, or repeatedly if `--watch` is given.
pub(super) async fn repeat(every: &Repeat, out: &Out, show: impl AsyncFn(&Out) -> Outcome) -> Outcome {
    let Some(interval) = every.interval else { return show(out).await };
    let mut signals = Signals::new()?;
    let out = out.repeated();
    let mut cursor = None;
    let mut first = true;
    loop {
        if out.is_redrawn() {
            out.line(format_args!(
                "every {}, last update {}; press Ctrl-C to stop",
                duration::show(interval),
                instant(Utc::now())
            ));
            out.line("");
        }
        let shown = tokio::select! {
            shown = show(&out) => shown,
            () = signals.next() => return Ok(Code::Done),
        };
        match shown {
            Ok(_) => {}
            // Keep going if the queue becomes unavailable later, so that the user sees when it
            // is back.
            Err(failure) if failure.code == Code::Unavailable && !first => {
                out.note(format_args!("error: {failure}; trying again"));
            }
            Err(failure) => return Err(failure),
        }
        if out.is_redrawn() && cursor.is_none() {
            cursor = Some(Cursor::hide());
        }
        out.end_frame();
        if out.is_closed() {
            return Ok(Code::Done);
        }
        first = false;
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            () = signals.next() => return Ok(Code::Done),
        }
    }
}
