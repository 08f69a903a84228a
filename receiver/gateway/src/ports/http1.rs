//! An HTTP/1.1 connection that holds no buffers between two requests.
//!
//! The HTTP library keeps a read and a write buffer of 8 KiB each, the last header map and the storage of a request's
//! future for the life of a connection, and most connections of agents are idle most of the time. So the library's
//! connection exists only from the first byte of a request to the last byte of its response. It is taken apart when no
//! state of it is left: the request's body was read to its end, the response was flushed, and neither announced the end
//! of the connection. Bytes that the client has sent ahead are read again.

use std::{
    error::Error,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use hyper::{
    body::{Body, Incoming},
    server::conn::http1,
    service::HttpService,
};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncBufRead, AsyncRead, AsyncWrite};

use super::{
    lifecycle::ConnectionLifecycle,
    limited_stream::{LimitedStream, StreamState},
};

/// Limits of a request's head.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadLimits {
    /// Bytes at most.
    pub(super) bytes: usize,
    /// Header fields at most.
    pub(super) fields: usize,
}

/// See the module.
pub(super) struct Http1Connection<T, S: HttpService<Incoming>> {
    state: State<T, S>,
    stream: StreamState,
    lifecycle: Arc<ConnectionLifecycle>,
    limits: HeadLimits,
    /// Count of requests when the library's connection was created last.
    served: Option<u64>,
}

enum State<T, S: HttpService<Incoming>> {
    /// Waits for the first byte of a request.
    Idle(LimitedStream<T>, S),
    Active(Box<http1::Connection<TokioIo<LimitedStream<T>>, S>>),
    Ended,
}

impl<T, S> Http1Connection<T, S>
where
    T: AsyncRead + AsyncWrite + Unpin,
    S: HttpService<Incoming, Error: Into<Box<dyn Error + Send + Sync>>>,
    S::ResBody: Body<Error: Into<Box<dyn Error + Send + Sync>>> + 'static,
{
    pub(super) fn new(
        stream: LimitedStream<T>,
        service: S,
        lifecycle: Arc<ConnectionLifecycle>,
        limits: HeadLimits,
    ) -> Self {
        Self { stream: stream.state().clone(), state: State::Idle(stream, service), lifecycle, limits, served: None }
    }

    /// Ends the connection after its request in flight; at once if it is idle.
    pub(super) fn graceful_shutdown(mut self: Pin<&mut Self>)
    where
        S: Unpin,
    {
        // One that has received nothing closes at once.
        self.activate();
        if let State::Active(connection) = &mut self.state {
            Pin::new(&mut **connection).graceful_shutdown();
        }
    }

    /// Creates the library's connection, unless there is one.
    fn activate(&mut self) {
        self.state = match mem::replace(&mut self.state, State::Ended) {
            State::Idle(stream, service) => {
                self.served = self.lifecycle.requests_if_idle();
                let connection = builder(self.limits).serve_connection(TokioIo::new(stream), service);
                State::Active(Box::new(connection))
            }
            state => state,
        };
    }

    /// Takes the library's connection apart if it holds no state. Returns false if it does, or if it has served no
    /// request: then it may have received a part of a head.
    fn release(&mut self) -> bool {
        let requests = self.lifecycle.requests_if_reusable();
        if requests.is_none() || requests == self.served || !self.stream.is_flushed() {
            return false;
        }
        self.state = match mem::replace(&mut self.state, State::Ended) {
            State::Active(connection) => {
                let http1::Parts { io, read_buf, service, .. } = connection.into_parts();
                let mut stream = io.into_inner();
                stream.unread(read_buf);
                State::Idle(stream, service)
            }
            state => state,
        };
        true
    }
}

impl<T, S> Future for Http1Connection<T, S>
where
    T: AsyncBufRead + AsyncWrite + Unpin,
    S: HttpService<Incoming, Error: Into<Box<dyn Error + Send + Sync>>> + Unpin,
    S::ResBody: Body<Error: Into<Box<dyn Error + Send + Sync>>> + 'static,
{
    type Output = hyper::Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        loop {
            match &mut self.state {
                State::Idle(stream, _) => {
                    ready!(stream.poll_readable(context));
                    // Also at the end of the stream and after errors, which the library handles.
                    self.activate();
                }
                State::Active(connection) => {
                    if let Poll::Ready(result) = Pin::new(&mut **connection).poll(context) {
                        self.state = State::Ended;
                        return Poll::Ready(result);
                    }
                    if !self.release() {
                        return Poll::Pending;
                    }
                }
                State::Ended => return Poll::Ready(Ok(())),
            }
        }
    }
}

fn builder(limits: HeadLimits) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        // It would also limit the time between two requests, and cost each of them a timer: see `HeadDeadline`.
        .header_read_timeout(None)
        .max_buf_size(limits.bytes)
        .max_headers(limits.fields);
    builder
}

#[cfg(test)]
mod tests;
