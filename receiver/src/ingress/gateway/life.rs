//! How long a connection may live, and when it was last of use.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use tokio::{sync::Notify, time::Instant};

use super::Settings;
use crate::fleet::hub::Interval;

/// See the module.
pub(super) struct Life {
    opened: Instant,
    /// When it is old enough: certificates, roots and instances change, and connections should follow.
    old: Instant,
    first: Duration,
    idle: Duration,
    /// From a request's head until its answer was taken.
    longest: Duration,
    /// Over HTTP/1.1, how often an agent speaks: nothing but its next heartbeat shows that it is still there. Over HTTP/2 PINGs do.
    heartbeats: Option<Interval>,
    usage: Mutex<Usage>,
    /// Why we end it, once that is decided.
    ends: OnceLock<&'static str>,
    /// Told when the connection has no more to say.
    pub(super) last: Notify,
}

#[derive(Default)]
struct Usage {
    next: u64,
    /// The requests that have begun, in order; few.
    active: Vec<(u64, Instant)>,
    ended: Option<Instant>,
    rest: Rest,
}

/// What is expected of a connection on which nothing is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Rest {
    /// Nothing.
    #[default]
    Any,
    /// A heartbeat, at the latest by then.
    Until(Instant),
    /// It did not come, and that was told.
    Missed,
}

/// What to make of a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    Alive,
    /// It never asked for anything.
    Silent,
    /// No heartbeat came since its last request, whose answer was taken then. Told once for each rest.
    Missed(Instant),
    Over(&'static str),
}

impl Life {
    /// `spread` is any number; of many connections, each should have another one.
    pub(super) fn new(settings: &Settings, is_http2: bool, opened: Instant, spread: u64) -> Self {
        let Settings { head_deadline: first, body_deadline, answer_deadline, idle, max_age, .. } = *settings;
        // A connection outlives a few heartbeats, or each would need a handshake.
        let heartbeats = 3 * settings.interval.get();
        let (idle, max_age) = (idle.max(heartbeats), max_age.max(2 * heartbeats));
        // Between 75 and 100 % of the age, so that thousands that came together do not go together.
        let spread = u32::try_from(spread % 256).unwrap_or(0);
        let old = opened + max_age * 3 / 4 + max_age / 1_024 * spread;
        let longest = body_deadline + answer_deadline;
        let heartbeats = (!is_http2).then(|| settings.interval.clone());
        let (usage, ends, last) = (Mutex::default(), OnceLock::new(), Notify::new());
        Self { opened, old, first, idle, longest, heartbeats, usage, ends, last }
    }

    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a request, which ends when what is returned is dropped.
    pub(super) fn begin(self: &Arc<Self>, now: Instant) -> Busy {
        let mut usage = self.usage();
        let number = usage.next;
        usage.next += 1;
        usage.active.push((number, now));
        usage.rest = Rest::Any;
        Busy { life: self.clone(), number, is_taken: false }
    }

    /// Whether it is old enough to end.
    pub(super) fn is_old(&self, now: Instant) -> bool {
        now >= self.old
    }

    /// Decides that it ends after the answer that is being made. The first reason counts.
    pub(super) fn end(&self, why: &'static str) {
        let _ = self.ends.set(why);
    }

    /// Why it ends after an answer, if that was decided.
    pub(super) fn ends(&self) -> Option<&'static str> {
        self.ends.get().copied()
    }

    /// Whether a heartbeat was missed, and told as such, since the last request.
    pub(super) fn has_missed(&self) -> bool {
        self.usage().rest == Rest::Missed
    }

    /// How many requests have begun, while none is in flight.
    pub(super) fn resting(&self) -> Option<u64> {
        let usage = self.usage();
        usage.active.is_empty().then_some(usage.next)
    }

    /// When to look again, at the latest: requests that come and go meanwhile wake nobody.
    pub(super) fn next_look(&self, now: Instant) -> Instant {
        let usage = self.usage();
        let oldest = usage.active.first().map_or(now, |(_, begun)| *begun);
        let next = self.quiet_until(&usage, now).min(self.over(&usage)).min(oldest.max(now) + self.longest);
        if let Rest::Until(due) = usage.rest { next.min(due) } else { next }
    }

    /// While a request is in flight its own deadlines hold, and silence is looked for again later.
    fn quiet_until(&self, usage: &Usage, now: Instant) -> Instant {
        match usage {
            Usage { active, ended: None, .. } if active.is_empty() => self.opened + self.first,
            Usage { active, ended: Some(ended), .. } if active.is_empty() => *ended + self.idle,
            Usage { .. } => now + self.idle,
        }
    }

    /// When it has to end for its age. HTTP/2 tells the peer which of its requests still count. Over HTTP/1.1 only an answer can tell it,
    /// and a request that is on the way to a connection that ends without a word is lost: so it ends with the first answer after its age
    /// ([`is_old`](Self::is_old)), and by itself only when the next heartbeat should have come.
    fn over(&self, usage: &Usage) -> Instant {
        let Some(interval) = &self.heartbeats else { return self.old };
        // A heartbeat comes a tenth of the interval too late, at most.
        let end = self.old + (interval.get() * 11 / 10).max(self.first);
        if let Rest::Until(due) = usage.rest { end.max(due) } else { end }
    }

    /// What a request that was taken lets expect.
    fn rest(&self, now: Instant) -> Rest {
        let interval = self.heartbeats.as_ref().map(Interval::get).filter(|interval| !interval.is_zero());
        interval.map_or(Rest::Any, |interval| Rest::Until(now + interval + (interval / 2).max(self.first)))
    }

    pub(super) fn look(&self, now: Instant) -> Look {
        let mut usage = self.usage();
        let oldest = usage.active.first().map(|(_, begun)| *begun);
        if let (Rest::Until(due), Some(ended)) = (usage.rest, usage.ended)
            && now >= due
        {
            usage.rest = Rest::Missed;
            Look::Missed(ended)
        } else if now >= self.over(&usage) {
            Look::Over("age")
        } else if oldest.is_some_and(|begun| now >= begun + self.longest) {
            // Its body had a deadline and is here, so it is the answer that nobody takes.
            Look::Over("stalled")
        } else if now < self.quiet_until(&usage, now) {
            Look::Alive
        } else if usage.ended.is_none() {
            Look::Silent
        } else {
            Look::Over("idle")
        }
    }
}

/// A request in flight.
pub(super) struct Busy {
    life: Arc<Life>,
    number: u64,
    is_taken: bool,
}

impl Busy {
    /// What was asked was taken. Who is refused waits as it is told, and may be long in asking again.
    pub(super) fn taken(mut self) -> Self {
        self.is_taken = true;
        self
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut usage = self.life.usage();
        usage.active.retain(|(number, _)| *number != self.number);
        if usage.active.is_empty() {
            // A quiet connection keeps no room for them.
            usage.active = Vec::new();
            usage.rest = if self.is_taken { self.life.rest(now) } else { Rest::Any };
        }
        usage.ended = Some(now);
    }
}

/// An answer's body; its request is in flight until the connection has let go of it.
pub(super) struct Held {
    body: Full<Bytes>,
    _busy: Busy,
}

impl Held {
    pub(super) const fn new(body: Full<Bytes>, busy: Busy) -> Self {
        Self { body, _busy: busy }
    }
}

impl Body for Held {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ingress::gateway::tests::testing::settings;

    #[tokio::test(start_paused = true)]
    async fn a_connection_ends_for_silence_idleness_age_and_answers_that_nobody_takes() {
        let settings = Settings { max_age: Duration::from_secs(6_000), ..settings() };
        let (first, idle) = (settings.head_deadline, settings.idle);
        let longest = settings.body_deadline + settings.answer_deadline;
        let opened = Instant::now();
        let life = Arc::new(Life::new(&settings, true, opened, 0));
        assert_eq!((life.next_look(opened), life.look(opened + first)), (opened + first, Look::Silent));

        let older = life.begin(opened);
        let newer = life.begin(opened + Duration::from_secs(1));
        assert_eq!(life.next_look(opened), opened + longest);
        assert_eq!(life.look(opened + longest), Look::Over("stalled"));
        drop(older);
        assert_eq!(life.look(opened + longest), Look::Alive);
        drop(newer);
        assert_eq!((life.look(opened), life.look(Instant::now() + idle)), (Look::Alive, Look::Over("idle")));
        assert_eq!(life.look(opened + settings.max_age * 3 / 4), Look::Over("age"));
        let late = Life::new(&settings, true, opened, 255);
        assert!(late.old > life.old && late.old <= opened + settings.max_age);
    }

    /// Steps from look to look, as the connection does, and returns what is seen that is not just life, and when.
    async fn looked(life: &Life) -> (Duration, Look) {
        let begun = Instant::now();
        loop {
            let next = life.next_look(Instant::now());
            assert!(next > Instant::now() || life.look(Instant::now()) != Look::Alive, "it never spins");
            tokio::time::sleep_until(next).await;
            let look = life.look(Instant::now());
            if look != Look::Alive {
                return (begun.elapsed(), look);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn over_http1_a_rest_lasts_until_the_next_heartbeat_should_have_come() {
        const S: Duration = Duration::from_secs(1);
        let settings = Settings { interval: Interval::of(60 * S), max_age: 400 * S, ..settings() };
        let opened = Instant::now();
        let life = Arc::new(Life::new(&settings, false, opened, 0));
        drop(life.begin(opened).taken());
        assert_eq!(looked(&life).await, (90 * S, Look::Missed(opened)));
        assert!(life.has_missed());
        let busy = life.begin(Instant::now());
        assert!(!life.has_missed());
        drop(busy);
        // It was refused, and waits as it was told: nothing is missed. Its age, 300 s, was told by no answer.
        assert_eq!(looked(&life).await, ((300 - 90 + 66) * S, Look::Over("age")));

        let life = Arc::new(Life::new(&settings, false, Instant::now(), 0));
        tokio::time::sleep(299 * S).await;
        drop(life.begin(Instant::now()).taken());
        assert!(!life.is_old(Instant::now()));
        let ended = Instant::now();
        assert_eq!(looked(&life).await, (90 * S, Look::Missed(ended)), "what is missed is told before the end");
        assert_eq!(life.look(Instant::now()), Look::Over("age"));
        assert!(life.is_old(Instant::now()));
    }
}
