//! How long a connection may live, and when it was last of use.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use tokio::{sync::Notify, time::Instant};

use super::Settings;

/// See the module.
pub(super) struct Life {
    opened: Instant,
    /// When it is old enough: certificates, roots and instances change, and connections should follow.
    old: Instant,
    first: Duration,
    idle: Duration,
    /// From a request's head until its answer was taken.
    longest: Duration,
    usage: Mutex<Usage>,
    /// Told when the connection has no more to say.
    pub(super) last: Notify,
}

#[derive(Default)]
struct Usage {
    next: u64,
    /// The requests that have begun, in order; few.
    active: Vec<(u64, Instant)>,
    ended: Option<Instant>,
}

/// What to make of a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    Alive,
    /// It never asked for anything.
    Silent,
    Over(&'static str),
}

impl Life {
    /// `spread` is any number; of many connections, each should have another one.
    pub(super) fn new(settings: &Settings, opened: Instant, spread: u64) -> Self {
        let Settings { head_deadline: first, body_deadline, answer_deadline, idle, max_age, .. } = *settings;
        // A connection outlives a few heartbeats, or each would need a handshake.
        let heartbeats = 3 * settings.interval.get();
        let (idle, max_age) = (idle.max(heartbeats), max_age.max(2 * heartbeats));
        // Between 75 and 100 % of the age, so that thousands that came together do not go together.
        let spread = u32::try_from(spread % 256).unwrap_or(0);
        let old = opened + max_age * 3 / 4 + max_age / 1_024 * spread;
        let longest = body_deadline + answer_deadline;
        Self { opened, old, first, idle, longest, usage: Mutex::default(), last: Notify::new() }
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
        Busy { life: self.clone(), number }
    }

    /// How many requests have begun, while none is in flight.
    pub(super) fn resting(&self) -> Option<u64> {
        let usage = self.usage();
        usage.active.is_empty().then_some(usage.next)
    }

    /// When to look again, at the latest: requests that come and go meanwhile wake nobody.
    pub(super) fn next_look(&self, now: Instant) -> Instant {
        let oldest = self.usage().active.first().map_or(now, |(_, begun)| *begun);
        self.quiet_until(now).min(self.old).min(oldest.max(now) + self.longest)
    }

    /// While a request is in flight its own deadlines hold, and silence is looked for again later.
    fn quiet_until(&self, now: Instant) -> Instant {
        match &*self.usage() {
            Usage { active, ended: None, .. } if active.is_empty() => self.opened + self.first,
            Usage { active, ended: Some(ended), .. } if active.is_empty() => *ended + self.idle,
            Usage { .. } => now + self.idle,
        }
    }

    pub(super) fn look(&self, now: Instant) -> Look {
        let oldest = self.usage().active.first().map(|(_, begun)| *begun);
        if now >= self.old {
            Look::Over("age")
        } else if oldest.is_some_and(|begun| now >= begun + self.longest) {
            // Its body had a deadline and is here, so it is the answer that nobody takes.
            Look::Over("stalled")
        } else if now < self.quiet_until(now) {
            Look::Alive
        } else if self.usage().ended.is_none() {
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
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut usage = self.life.usage();
        usage.active.retain(|(number, _)| *number != self.number);
        if usage.active.is_empty() {
            // A quiet connection keeps no room for them.
            usage.active = Vec::new();
        }
        usage.ended = Some(Instant::now());
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
    use crate::gateway::tests::testing::settings;

    #[tokio::test(start_paused = true)]
    async fn a_connection_ends_for_silence_idleness_age_and_answers_that_nobody_takes() {
        let settings = Settings { max_age: Duration::from_secs(6_000), ..settings() };
        let (first, idle) = (settings.head_deadline, settings.idle);
        let longest = settings.body_deadline + settings.answer_deadline;
        let opened = Instant::now();
        let life = Arc::new(Life::new(&settings, opened, 0));
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
        let late = Life::new(&settings, opened, 255);
        assert!(late.old > life.old && late.old <= opened + settings.max_age);
    }
}
