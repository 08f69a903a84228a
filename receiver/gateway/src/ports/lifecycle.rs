//! Deadlines of one connection: first request, idleness, age, and responses that the client does not read.

use std::{
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use parking_lot::{Mutex, MutexGuard};
use tidewatch_fleet::table::HeartbeatInterval;
use tokio::{sync::Notify, time::Instant};

use super::Settings;

/// Heartbeat intervals that a connection lives at least. A handshake costs the receiver the CPU time of several heartbeats, so
/// this bounds the share of handshakes for any interval.
const HEARTBEATS: u32 = 60;

/// Tracks the requests of one connection and decides when it closes.
pub(super) struct ConnectionLifecycle {
    opened: Instant,
    /// Maximum age: certificates, roots and replicas change, and connections must follow.
    expires: Instant,
    first_request_deadline: Duration,
    idle: Duration,
    /// From the head of a request until its response is read.
    request_deadline: Duration,
    /// Heartbeat interval, over HTTP/1.1 alone: there the next heartbeat is the only sign that the agent still exists.
    /// HTTP/2 has PINGs.
    heartbeats: Option<HeartbeatInterval>,
    activity: Mutex<Activity>,
    /// Over HTTP/1.1: the body of the last request was not read to its end.
    has_unread_body: AtomicBool,
    /// Reason to close after the current response, or with the next one. The first reason is kept.
    pub(super) close_reason: OnceLock<&'static str>,
    /// Notified when the connection has to close after the current response.
    pub(super) close: Notify,
}

#[derive(Default)]
struct Activity {
    /// Number of the next request, which is the count of requests so far.
    next: u64,
    /// Requests in flight in their order, by number and start; few.
    active: Vec<(u64, Instant)>,
    /// End of the last request.
    ended: Option<Instant>,
    heartbeat: ExpectedHeartbeat,
}

/// Expectation of a heartbeat while no request is in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ExpectedHeartbeat {
    #[default]
    None,
    Until(Instant),
    /// Overdue and reported.
    Missed,
}

/// Result of a check.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Liveness {
    Alive,
    /// The first request did not come in time.
    Silent,
    /// The heartbeat after the last request, which ended at this time, is overdue. Reported once for each expectation.
    MissedHeartbeat(Instant),
    /// The connection must close, for this reason.
    Expired(&'static str),
}

impl ConnectionLifecycle {
    /// `jitter` is any number, distinct for each connection.
    pub(super) fn new(settings: &Settings, is_http2: bool, opened: Instant, jitter: u64) -> Self {
        let Settings { head_deadline, body_deadline, response_deadline, idle, max_age, .. } = *settings;
        let heartbeats = 3 * settings.heartbeat_interval.get();
        let max_age = max_age.max(HEARTBEATS * settings.heartbeat_interval.get());
        // Between 75 and 100 % of the age, so that thousands of connections that opened together do not close together.
        let jitter = u32::try_from(jitter % 256).unwrap_or(0);
        Self {
            opened,
            expires: opened + max_age * 3 / 4 + max_age / 1_024 * jitter,
            first_request_deadline: head_deadline,
            idle: idle.max(heartbeats),
            request_deadline: body_deadline + response_deadline,
            heartbeats: (!is_http2).then(|| settings.heartbeat_interval.clone()),
            activity: Mutex::default(),
            has_unread_body: AtomicBool::new(false),
            close_reason: OnceLock::new(),
            close: Notify::new(),
        }
    }

    fn activity(&self) -> MutexGuard<'_, Activity> {
        self.activity.lock()
    }

    /// Begins a request, which ends when the returned guard is dropped.
    pub(super) fn begin(self: &Arc<Self>, now: Instant) -> ActiveRequest {
        let mut activity = self.activity();
        let number = activity.next;
        activity.next += 1;
        activity.active.push((number, now));
        activity.heartbeat = ExpectedHeartbeat::None;
        ActiveRequest { lifecycle: self.clone(), number, is_accepted: false }
    }

    pub(super) fn is_past_max_age(&self, now: Instant) -> bool {
        now >= self.expires
    }

    /// True if a missed heartbeat was reported since the last request.
    pub(super) fn has_missed_heartbeat(&self) -> bool {
        self.activity().heartbeat == ExpectedHeartbeat::Missed
    }

    /// Returns the count of requests so far, if none is in flight.
    pub(super) fn requests_if_idle(&self) -> Option<u64> {
        let activity = self.activity();
        activity.active.is_empty().then_some(activity.next)
    }

    /// Over HTTP/1.1: returns the count of requests so far if the last one ended, its body was read to its end, and its
    /// response does not close the connection. The next byte is then the first one of a head.
    pub(super) fn requests_if_reusable(&self) -> Option<u64> {
        let is_reusable = !self.has_unread_body.load(Ordering::Relaxed) && self.close_reason.get().is_none();
        self.requests_if_idle().filter(|_| is_reusable)
    }

    /// Returns the time of the next check. Requests that begin and end before it need no earlier one.
    pub(super) fn next_check(&self, now: Instant) -> Instant {
        let activity = self.activity();
        let oldest = activity.active.first().map_or(now, |(_, begun)| *begun);
        let next = self.idle_deadline(&activity, now).min(self.age_deadline(&activity));
        let next = next.min(oldest.max(now) + self.request_deadline);
        if let ExpectedHeartbeat::Until(due) = activity.heartbeat { next.min(due) } else { next }
    }

    /// Returns the end of idleness. A request in flight has deadlines of its own; idleness is checked again later.
    fn idle_deadline(&self, activity: &Activity, now: Instant) -> Instant {
        match activity.ended {
            _ if !activity.active.is_empty() => now + self.idle,
            None => self.opened + self.first_request_deadline,
            Some(ended) => ended + self.idle,
        }
    }

    /// Returns the time at which the connection closes for its age. HTTP/2's GOAWAY states which requests are still
    /// served. Over HTTP/1.1 only a response can announce the end, and a request on its way to a connection that closes
    /// unannounced is lost: the connection therefore closes with the first response past its age
    /// ([`is_past_max_age`](Self::is_past_max_age)), and unannounced only when the next heartbeat is overdue.
    fn age_deadline(&self, activity: &Activity) -> Instant {
        let Some(interval) = &self.heartbeats else { return self.expires };
        // A heartbeat is late by a tenth of the interval at most.
        let end = self.expires + (interval.get() * 11 / 10).max(self.first_request_deadline);
        if let ExpectedHeartbeat::Until(due) = activity.heartbeat { end.max(due) } else { end }
    }

    /// Returns the expectation after an accepted request.
    fn expected_heartbeat(&self, now: Instant) -> ExpectedHeartbeat {
        let interval = self.heartbeats.as_ref().map(HeartbeatInterval::get).filter(|interval| !interval.is_zero());
        interval.map_or(ExpectedHeartbeat::None, |interval| {
            ExpectedHeartbeat::Until(now + interval + (interval / 2).max(self.first_request_deadline))
        })
    }

    /// Checks all deadlines.
    pub(super) fn check(&self, now: Instant) -> Liveness {
        let mut activity = self.activity();
        let oldest = activity.active.first().map(|(_, begun)| *begun);
        if let (ExpectedHeartbeat::Until(due), Some(ended)) = (activity.heartbeat, activity.ended)
            && now >= due
        {
            activity.heartbeat = ExpectedHeartbeat::Missed;
            Liveness::MissedHeartbeat(ended)
        } else if now >= self.age_deadline(&activity) {
            Liveness::Expired("age")
        } else if oldest.is_some_and(|begun| now >= begun + self.request_deadline) {
            // The body has a deadline of its own and is complete, so the client does not read the response.
            Liveness::Expired("stalled")
        } else if now < self.idle_deadline(&activity, now) {
            Liveness::Alive
        } else if activity.ended.is_none() {
            Liveness::Silent
        } else {
            Liveness::Expired("idle")
        }
    }
}

/// A request in flight, until dropped.
pub(super) struct ActiveRequest {
    lifecycle: Arc<ConnectionLifecycle>,
    number: u64,
    /// False after a refusal: a refused client backs off as instructed, possibly for longer than a heartbeat interval.
    pub(super) is_accepted: bool,
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut activity = self.lifecycle.activity();
        activity.active.retain(|(number, _)| *number != self.number);
        if activity.active.is_empty() {
            // Releases the allocation: most connections are idle most of the time.
            activity.active = Vec::new();
            activity.heartbeat =
                if self.is_accepted { self.lifecycle.expected_heartbeat(now) } else { ExpectedHeartbeat::None };
        }
        activity.ended = Some(now);
    }
}

/// Body of a response. Its request is in flight until the connection drops the body.
pub(super) struct TrackedBody {
    pub(super) body: Full<Bytes>,
    pub(super) _request: ActiveRequest,
}

impl Body for TrackedBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Body of a request, of which the lifecycle knows whether it was read to its end.
pub(super) struct RequestBody<B> {
    body: B,
    lifecycle: Arc<ConnectionLifecycle>,
}

impl<B: Body> RequestBody<B> {
    pub(super) fn new(body: B, lifecycle: Arc<ConnectionLifecycle>) -> Self {
        let body = Self { body, lifecycle };
        body.note(body.body.is_end_stream());
        body
    }

    fn note(&self, is_read: bool) {
        self.lifecycle.has_unread_body.store(!is_read, Ordering::Relaxed);
    }
}

impl<B: Body + Unpin> Body for RequestBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        let is_read = match &frame {
            None => true,
            Some(Ok(_)) => self.body.is_end_stream(),
            Some(Err(_)) => false,
        };
        self.note(is_read);
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::tests::testing::settings;

    #[tokio::test(start_paused = true)]
    async fn connection_expires_by_silence_idleness_age_and_unread_responses() {
        let settings = Settings { max_age: Duration::from_secs(6_000), ..settings() };
        let first = settings.head_deadline;
        let idle = settings.idle;
        let request_deadline = settings.body_deadline + settings.response_deadline;
        let opened = Instant::now();
        let lifecycle = Arc::new(ConnectionLifecycle::new(&settings, true, opened, 0));
        assert_eq!((lifecycle.next_check(opened), lifecycle.check(opened + first)), (opened + first, Liveness::Silent));

        let older = lifecycle.begin(opened);
        let newer = lifecycle.begin(opened + Duration::from_secs(1));
        assert_eq!(lifecycle.next_check(opened), opened + request_deadline);
        assert_eq!(lifecycle.check(opened + request_deadline), Liveness::Expired("stalled"));
        drop(older);
        assert_eq!(lifecycle.check(opened + request_deadline), Liveness::Alive);
        drop(newer);
        assert_eq!(
            (lifecycle.check(opened), lifecycle.check(Instant::now() + idle)),
            (Liveness::Alive, Liveness::Expired("idle"))
        );
        assert_eq!(lifecycle.check(opened + settings.max_age * 3 / 4), Liveness::Expired("age"));
        let late = ConnectionLifecycle::new(&settings, true, opened, 255);
        assert!(late.expires > lifecycle.expires && late.expires <= opened + settings.max_age);
    }

    /// Begins an accepted request and ends it at once.
    fn accept(lifecycle: &Arc<ConnectionLifecycle>, begun: Instant) {
        lifecycle.begin(begun).is_accepted = true;
    }

    /// Steps from check to check, as the connection does, and returns the first result other than `Alive` and its time.
    async fn next_event(lifecycle: &ConnectionLifecycle) -> (Duration, Liveness) {
        let begun = Instant::now();
        loop {
            let next = lifecycle.next_check(Instant::now());
            assert!(next > Instant::now() || lifecycle.check(Instant::now()) != Liveness::Alive, "it never spins");
            tokio::time::sleep_until(next).await;
            let liveness = lifecycle.check(Instant::now());
            if liveness != Liveness::Alive {
                return (begun.elapsed(), liveness);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn over_http1_an_overdue_heartbeat_is_reported_and_delays_the_end_by_age() {
        const S: Duration = Duration::from_secs(1);
        let heartbeat_interval = HeartbeatInterval::new(60 * S);
        let settings = Settings { heartbeat_interval, max_age: 400 * S, idle: 7_200 * S, ..settings() };
        let opened = Instant::now();
        let lifecycle = Arc::new(ConnectionLifecycle::new(&settings, false, opened, 0));
        accept(&lifecycle, opened);
        assert_eq!(next_event(&lifecycle).await, (90 * S, Liveness::MissedHeartbeat(opened)));
        assert!(lifecycle.has_missed_heartbeat());
        let request = lifecycle.begin(Instant::now());
        assert!(!lifecycle.has_missed_heartbeat());
        drop(request);
        // A refused request leaves no expectation. No response announced the age, which is three quarters of
        // sixty intervals.
        assert_eq!(next_event(&lifecycle).await, ((2_700 - 90 + 66) * S, Liveness::Expired("age")));

        let lifecycle = Arc::new(ConnectionLifecycle::new(&settings, false, Instant::now(), 0));
        tokio::time::sleep(2_699 * S).await;
        accept(&lifecycle, Instant::now());
        assert!(!lifecycle.is_past_max_age(Instant::now()));
        let ended = Instant::now();
        assert_eq!(
            next_event(&lifecycle).await,
            (90 * S, Liveness::MissedHeartbeat(ended)),
            "the missed heartbeat is reported before the end"
        );
        assert_eq!(lifecycle.check(Instant::now()), Liveness::Expired("age"));
        assert!(lifecycle.is_past_max_age(Instant::now()));
    }
}
