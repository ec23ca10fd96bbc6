//! A TCP stream with a write timeout. Without it, clients that never read could hold
//! every connection slot forever. The stream also records that its client has sent
//! something, so that an idle client does not count as one with slow headers.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use super::connections::Connection;

/// Fails writes after the other end has read nothing for `timeout`.
pub(super) struct WriteTimeout {
    stream: TcpStream,
    timeout: Duration,
    connection: Arc<Connection>,
    /// When the pending write fails. Only meaningful while `is_pending`.
    deadline: Pin<Box<Sleep>>,
    /// Whether a write waits for the other end to read.
    is_pending: bool,
}

impl WriteTimeout {
    pub(super) fn new(stream: TcpStream, timeout: Duration, connection: Arc<Connection>) -> Self {
        let deadline = Box::pin(tokio::time::sleep(timeout));
        WriteTimeout { stream, timeout, connection, deadline, is_pending: false }
    }

    /// Passes the result of a write on, or fails if it has been pending for too long.
    fn with_timeout<T>(&mut self, cx: &mut Context<'_>, write: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if write.is_ready() {
            self.is_pending = false;
            return write;
        }
        if !self.is_pending {
            self.is_pending = true;
            self.deadline.as_mut().reset(Instant::now() + self.timeout);
        }
        ready!(self.deadline.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client stopped reading the response")))
    }
}

impl AsyncRead for WriteTimeout {
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
        read
    }
}

impl AsyncWrite for WriteTimeout {
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
