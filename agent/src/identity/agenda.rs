//! What is to be done for the identity next: ask with a token, ask with the identity that there is, keep it, or rest. Pure.

use std::time::Duration;

use tokio::time::Instant;

use super::life::Life;
use crate::{backoff::Backoff, link::Gate};

/// A new certificate that is refused so soon after another one will not be the last: they are asked for ever more rarely.
const OFTEN: Duration = Duration::from_secs(600);
const REFUSED: Duration = Duration::from_secs(1);
const REFUSED_CAP: Duration = Duration::from_secs(60);

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Ask with a token.
    Enrol,
    /// Ask with the identity that there is.
    Renew,
    /// Write the Secret.
    Keep,
    /// Nothing before this.
    Rest(Instant),
}

/// What the receiver thinks of the certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Regard {
    /// Nothing else is known.
    Good,
    /// It was refused: perhaps it can still be renewed.
    Doubtful,
    /// It was refused, and could not be renewed.
    Lost,
}

/// See the module.
pub(super) struct Agenda {
    life: Option<Life>,
    regard: Regard,
    /// After failures to ask.
    asking: Gate,
    /// The Secret has not what it should, and can be written.
    unkept: bool,
    /// After failures to write it.
    keeping: Gate,
    refusals: Backoff,
    refused: Option<Instant>,
    /// After refusals.
    pause: Option<Instant>,
}

impl Agenda {
    /// There is no certificate.
    pub(super) fn new() -> Self {
        Self {
            life: None,
            regard: Regard::Good,
            asking: Gate::default(),
            unkept: false,
            keeping: Gate::default(),
            refusals: Backoff::new(REFUSED),
            refused: None,
            pause: None,
        }
    }

    /// What to do now.
    pub(super) fn next(&self, now: Instant) -> Step {
        let (step, due) = match self.life {
            Some(life) if self.regard != Regard::Lost && life.end > now => {
                (Step::Renew, if self.regard == Regard::Good { life.due } else { now })
            }
            _ => (Step::Enrol, now),
        };
        let due = self.asking.opens(self.pause.map_or(due, |pause| pause.max(due)));
        if due <= now {
            return step;
        }
        let keep = self.unkept.then(|| self.keeping.opens(now));
        if keep.is_some_and(|keep| keep <= now) {
            return Step::Keep;
        }
        // The end is a moment of its own: from then on it is asked with a token.
        let end = self.life.map(|life| life.end).filter(|end| *end > now);
        Step::Rest([keep, end].into_iter().flatten().fold(due, Instant::min))
    }

    /// There is a certificate.
    pub(super) fn got(&mut self, life: Life) {
        (self.life, self.regard) = (Some(life), Regard::Good);
        self.asking.open();
    }

    /// None was to be had. What was tried is what [`Agenda::next`] said.
    pub(super) fn failed(&mut self, step: Step, now: Instant, connecting: bool, told: Option<Duration>) {
        let lost = step == Step::Renew && self.regard == Regard::Doubtful;
        if lost {
            self.regard = Regard::Lost;
        }
        match told {
            Some(told) => self.asking.told(now, told),
            None if lost => self.asking.open(),
            None => self.asking.fail(now, connecting),
        }
    }

    /// Something else is to be asked with. When that is another receiver, what the one before has said does not hold for it; else
    /// nobody comes back before they were told.
    pub(super) const fn moved(&mut self, elsewhere: bool) {
        if elsewhere {
            self.asking.open();
        } else {
            self.asking.renewed();
        }
    }

    /// The receiver wants the certificate renewed, but not all of them at once.
    pub(super) fn wanted(&mut self, at: Instant) {
        if let Some(life) = &mut self.life {
            life.due = life.due.min(at);
        }
    }

    /// The receiver has no use for the certificate.
    pub(super) fn refused(&mut self, now: Instant) {
        if self.life.is_none() || self.regard != Regard::Good {
            return;
        }
        self.regard = Regard::Doubtful;
        let often = self.refused.replace(now).is_some_and(|last| now.duration_since(last) < OFTEN);
        if !often {
            self.refusals.reset();
        }
        self.pause = often.then(|| now + self.refusals.fail(REFUSED_CAP));
    }

    /// Whether the Secret should have something else than it has, and can be written.
    pub(super) const fn keep(&mut self, unkept: bool) {
        self.unkept = unkept;
        if !unkept {
            self.keeping.open();
        }
    }

    /// The Secret could not be written.
    pub(super) fn not_kept(&mut self, now: Instant) {
        self.keeping.fail(now, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn held(now: Instant) -> Agenda {
        let mut agenda = Agenda::new();
        agenda.got(Life { due: now + 16 * MINUTE, end: now + 24 * MINUTE });
        agenda
    }

    #[test]
    fn it_enrols_renews_and_enrols_again_after_the_end() {
        let now = Instant::now();
        assert_eq!(Agenda::new().next(now), Step::Enrol);
        let agenda = held(now);
        assert_eq!(agenda.next(now), Step::Rest(now + 16 * MINUTE));
        assert_eq!(agenda.next(now + 16 * MINUTE), Step::Renew);
        assert_eq!(agenda.next(now + 24 * MINUTE), Step::Enrol);
    }

    #[test]
    fn a_failed_renewal_is_tried_again_and_the_end_is_not_missed() {
        let now = Instant::now();
        let (mut agenda, due) = (held(now), now + 16 * MINUTE);
        agenda.failed(Step::Renew, due, false, Some(5 * MINUTE));
        let Step::Rest(until) = agenda.next(due) else { panic!("it was told to wait") };
        assert!(until >= due + 5 * MINUTE && until < due + 6 * MINUTE);
        for _ in 0..20 {
            agenda.failed(Step::Renew, due, false, None);
        }
        assert_eq!(agenda.next(due + MINUTE), Step::Renew);
        agenda.failed(Step::Renew, now + 23 * MINUTE, false, Some(5 * MINUTE));
        assert_eq!(agenda.next(now + 23 * MINUTE), Step::Rest(now + 24 * MINUTE));
        assert!(matches!(agenda.next(now + 24 * MINUTE), Step::Rest(_)), "told is told");
        assert_eq!(agenda.next(now + 29 * MINUTE), Step::Enrol);
    }

    #[test]
    fn only_another_receiver_is_asked_before_the_time_that_was_told() {
        let (now, mut agenda) = (Instant::now(), Agenda::new());
        agenda.failed(Step::Enrol, now, false, Some(5 * MINUTE));
        agenda.moved(false);
        assert!(matches!(agenda.next(now + MINUTE), Step::Rest(_)), "told is told");
        agenda.moved(true);
        assert_eq!(agenda.next(now), Step::Enrol);
        // What failed for another reason may have failed for the old roots.
        while agenda.next(now) == Step::Enrol {
            agenda.failed(Step::Enrol, now, true, None);
        }
        agenda.moved(false);
        assert_eq!(agenda.next(now), Step::Enrol);
    }

    #[test]
    fn a_refused_certificate_is_renewed_and_then_asked_for_anew_and_ever_more_rarely() {
        let now = Instant::now();
        let mut agenda = held(now);
        agenda.refused(now);
        assert_eq!(agenda.next(now), Step::Renew);
        agenda.failed(Step::Renew, now, false, None);
        assert_eq!(agenda.next(now), Step::Enrol);
        agenda.failed(Step::Enrol, now, true, None);
        assert_eq!(agenda.next(now + MINUTE), Step::Enrol, "not renewed any more");

        let mut waits = Vec::new();
        for _ in 0..12 {
            agenda.got(Life { due: now + 16 * MINUTE, end: now + 24 * MINUTE });
            agenda.refused(now);
            match agenda.next(now) {
                Step::Rest(until) => waits.push(until - now),
                step => assert_eq!(step, Step::Renew),
            }
        }
        assert!(waits.iter().any(|wait| *wait > Duration::from_secs(5)), "{waits:?}");
        assert!(waits.iter().all(|wait| *wait <= REFUSED_CAP), "{waits:?}");
        let later = now + OFTEN + MINUTE;
        agenda.got(Life { due: later + MINUTE, end: later + 2 * MINUTE });
        agenda.refused(later);
        assert_eq!(agenda.next(later), Step::Renew);
    }

    #[test]
    fn what_the_receiver_wants_is_due_soon_and_never_later_than_it_was() {
        let now = Instant::now();
        let mut agenda = held(now);
        agenda.wanted(now + MINUTE);
        agenda.wanted(now + 5 * MINUTE);
        assert_eq!(agenda.next(now), Step::Rest(now + MINUTE));
        agenda.got(Life { due: now + 16 * MINUTE, end: now + 24 * MINUTE });
        assert_eq!(agenda.next(now), Step::Rest(now + 16 * MINUTE));
    }

    #[test]
    fn the_secret_is_written_while_nothing_else_is_due() {
        let now = Instant::now();
        let mut agenda = held(now);
        agenda.keep(true);
        assert_eq!(agenda.next(now), Step::Keep);
        agenda.refused(now);
        assert_eq!(agenda.next(now), Step::Renew);
        agenda.got(Life { due: now + 16 * MINUTE, end: now + 24 * MINUTE });
        for _ in 0..9 {
            agenda.not_kept(now);
        }
        assert_eq!(agenda.next(now + MINUTE), Step::Keep);
        agenda.keep(false);
        assert_eq!(agenda.next(now), Step::Rest(now + 16 * MINUTE));
    }
}
