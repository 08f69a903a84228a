//! Stops and continues a host, like SIGSTOP and SIGCONT: time goes on, but none of its tasks runs, and none of its sockets
//! moves a byte. When it continues, timers that became due meanwhile fire all at once, in any order.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use parking_lot::{Mutex, MutexGuard};

/// Gate of one host. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    is_closed: bool,
    waiting: Vec<Waker>,
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Stops the host.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
    }

    /// Continues it.
    pub(crate) fn open(&self) {
        let waiting = {
            let mut state = self.state();
            state.is_closed = false;
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Waits while the host is stopped.
    pub(crate) fn poll_open(&self, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.state();
        if !state.is_closed {
            return Poll::Ready(());
        }
        if !state.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            state.waiting.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Runs a task of the host.
    pub(crate) fn run<F: Future>(&self, task: F) -> Gated<F> {
        Gated { gate: self.clone(), task: Box::pin(task) }
    }
}

/// A task of a host.
pub(crate) struct Gated<F> {
    gate: Gate,
    task: Pin<Box<F>>,
}

impl<F: Future> Future for Gated<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        ready!(self.gate.poll_open(cx));
        self.task.as_mut().poll(cx)
    }
}
