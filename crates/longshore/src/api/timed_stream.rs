//! A TCP stream with timeouts: for a connection that is idle, for the headers of a request, and for a client that does not
//! read. Without them, clients that never send or never read could hold every connection slot forever. A timeout of hyper
//! for headers would also count the time between two requests.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use super::connections::{Awaits, Connection};

/// The minimum time between two looks whether a connection is idle.
const MIN_PAUSE: Duration = Duration::from_millis(10);

/// How long a client may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timeouts {
    /// To begin the next request.
    pub(super) idle: Duration,
    /// From the first byte of a request to the end of its headers.
    pub(super) headers: Duration,
    /// To read anything of a response.
    pub(super) reading: Duration,
}

/// What a client took too long for. It is the source of the error that ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TimedOut {
    Idle,
    Headers,
    Reading,
}

impl std::fmt::Display for TimedOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            TimedOut::Idle => "the client did not begin another request in time",
            TimedOut::Headers => "the client did not complete the headers of its request in time",
            TimedOut::Reading => "the client stopped reading the response",
        })
    }
}

impl std::error::Error for TimedOut {}

impl From<TimedOut> for io::Error {
    fn from(timed_out: TimedOut) -> Self {
        io::Error::new(io::ErrorKind::TimedOut, timed_out)
    }
}

/// Fails reads and writes when the client takes too long.
pub(super) struct TimedStream {
    stream: TcpStream,
    timeouts: Timeouts,
    connection: Arc<Connection>,
    /// When the pending read fails, or when to look again whether it does.
    read_deadline: Pin<Box<Sleep>>,
    /// When the pending write fails. Only meaningful while `is_write_pending`.
    write_deadline: Pin<Box<Sleep>>,
    /// Whether a write waits for the other end to read.
    is_write_pending: bool,
}

impl TimedStream {
    pub(super) fn new(stream: TcpStream, timeouts: Timeouts, connection: Arc<Connection>) -> Self {
        TimedStream {
            stream,
            timeouts,
            connection,
            read_deadline: Box::pin(tokio::time::sleep(timeouts.idle)),
            write_deadline: Box::pin(tokio::time::sleep(timeouts.reading)),
            is_write_pending: false,
        }
    }

    /// Fails a read that has been pending for too long.
    fn poll_read_timeout(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let Timeouts { idle, headers, .. } = self.timeouts;
        loop {
            let (deadline, timed_out) = match self.connection.awaits() {
                Awaits::Request { since } => (since + idle, Some(TimedOut::Idle)),
                Awaits::Headers { since } => (since + headers, Some(TimedOut::Headers)),
                // Look again later: hyper may not read again between the end of a response and the next request.
                Awaits::Nothing if self.read_deadline.is_elapsed() => {
                    (std::time::Instant::now() + idle.min(headers).max(MIN_PAUSE), None)
                }
                Awaits::Nothing => (self.read_deadline.deadline().into_std(), None),
            };
            let deadline = Instant::from_std(deadline);
            if self.read_deadline.deadline() != deadline {
                self.read_deadline.as_mut().reset(deadline);
            }
            ready!(self.read_deadline.as_mut().poll(cx));
            if let Some(timed_out) = timed_out {
                return Poll::Ready(timed_out.into());
            }
        }
    }

    /// Passes the result of a write on, or fails if it has been pending for too long.
    fn with_timeout<T>(&mut self, cx: &mut Context<'_>, write: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if write.is_ready() {
            self.is_write_pending = false;
            return write;
        }
        if !self.is_write_pending {
            self.is_write_pending = true;
            self.write_deadline.as_mut().reset(Instant::now() + self.timeouts.reading);
        }
        ready!(self.write_deadline.as_mut().poll(cx));
        Poll::Ready(Err(TimedOut::Reading.into()))
    }
}

impl AsyncRead for TimedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            self.connection.note_received();
        }
        match read {
            Poll::Ready(read) => Poll::Ready(read),
            Poll::Pending => self.poll_read_timeout(cx).map(Err),
        }
    }
}

impl AsyncWrite for TimedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.with_timeout(cx, write)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.with_timeout(cx, write)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
