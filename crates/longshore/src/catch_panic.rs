//! Turns the panic of a future into a value, so that it ends one attempt or one request and nothing else.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

/// A future that returns its panic as an error. A panic while it is dropped is logged.
pub(crate) struct CatchPanic<F>(Option<Pin<Box<F>>>)
where
    F: Future + ?Sized;

impl<F: Future + ?Sized> CatchPanic<F> {
    pub(crate) fn new(inner: Pin<Box<F>>) -> Self {
        CatchPanic(Some(inner))
    }
}

impl<F: Future + ?Sized> Drop for CatchPanic<F> {
    fn drop(&mut self) {
        let inner = self.0.take();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(inner))) {
            tracing::error!(
                panic = panic_message(&*panic),
                "a handler or hook panicked while it was dropped"
            );
        }
    }
}

impl<F: Future + ?Sized> Future for CatchPanic<F> {
    type Output = Result<F::Output, Box<dyn Any + Send>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(inner) = self.0.as_mut() else { return Poll::Pending };
        match catch_unwind(AssertUnwindSafe(|| inner.as_mut().poll(context))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(done)) => Poll::Ready(Ok(done)),
            Err(panic) => Poll::Ready(Err(panic)),
        }
    }
}

/// The message of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}
