//! Who holds a rotation up for longer than it should take, as the conditions of the Kymas tell it. Pure.
//!
//! Everybody holds a phase up for a moment, when it has just begun, and after a start of this receiver, when nobody has been heard yet: of
//! that nothing is said.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use super::progress::Behind;
use crate::base::key::KymaKey;

/// For what takes a moment however few there are: bundles that are brought, and renewals that agents spread by themselves.
const SETTLING: Duration = Duration::from_secs(10);
/// An agent that is well has told what it has within so many of its intervals.
const INTERVALS: u32 = 3;

/// How long a runtime may take to follow a phase: all of them together are told and renewed at so many a second.
pub(crate) fn patience(interval: Duration, runtimes: usize, per_second: u32) -> Duration {
    let spread = u64::try_from(runtimes).unwrap_or(u64::MAX) / u64::from(per_second.max(1));
    SETTLING + interval * INTERVALS + Duration::from_secs(spread)
}

/// Whether a runtime follows the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follows {
    /// Nothing waits for it.
    Well,
    /// It is waited for, and not for longer than it takes.
    NotYet,
    /// It is waited for, and should have followed by now.
    Late(Behind),
}

/// Those that are waited for, as they were at the last look. Bounded by the number of Kymas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Laggards(HashMap<KymaKey, (Behind, bool)>);

impl Laggards {
    /// How it is with one Kyma's runtime.
    #[must_use]
    pub fn of(&self, kyma: &KymaKey) -> Follows {
        match self.0.get(kyma) {
            None => Follows::Well,
            Some((_, false)) => Follows::NotYet,
            Some((behind, true)) => Follows::Late(*behind),
        }
    }
}

/// Since when each is waited for without a break. Bounded by the number of Kymas.
#[derive(Default)]
pub(crate) struct Waits(HashMap<KymaKey, Instant>);

impl Waits {
    /// These are waited for now, and nobody else.
    pub(crate) fn look(
        &mut self,
        behind: impl IntoIterator<Item = (KymaKey, Behind)>,
        patience: Duration,
        now: Instant,
    ) -> Laggards {
        let behind: HashMap<_, _> = behind.into_iter().collect();
        self.0.retain(|kyma, _| behind.contains_key(kyma));
        let judge = |(kyma, behind): (KymaKey, Behind)| {
            let since = *self.0.entry(kyma.clone()).or_insert(now);
            (kyma, (behind, now.saturating_duration_since(since) >= patience))
        };
        Laggards(behind.into_iter().map(judge).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn key(name: &str) -> KymaKey {
        KymaKey::new("kcp-system", name)
    }

    #[test]
    fn who_is_waited_for_too_long_without_a_break_is_late() {
        let (mut waits, begun) = (Waits::default(), Instant::now());
        let mut at = |seconds: u32, behind: &[(&str, Behind)]| {
            let behind = behind.iter().map(|(name, behind)| (key(name), *behind));
            let found = waits.look(behind, 10 * S, begun + seconds * S);
            ["a", "b"].map(|name| found.of(&key(name)))
        };
        use Behind::{Bundle, Certificate, Unheard};
        use Follows::{Late, NotYet, Well};
        assert_eq!(at(0, &[("a", Unheard), ("b", Unheard)]), [NotYet, NotYet]);
        assert_eq!(at(9, &[("a", Bundle)]), [NotYet, Well], "one that followed in time is never named");
        assert_eq!(at(10, &[("a", Bundle)]), [Late(Bundle), Well]);
        assert_eq!(at(11, &[("a", Certificate), ("b", Bundle)]), [Late(Certificate), NotYet], "the next phase");
        assert_eq!(at(20, &[("b", Bundle)]), [Well, NotYet]);
        assert_eq!(at(21, &[("a", Bundle), ("b", Bundle)]), [NotYet, Late(Bundle)], "it had followed meanwhile");
        assert_eq!(at(22, &[]), [Well, Well]);
    }

    #[test]
    fn a_fleet_may_take_as_long_as_it_is_spread() {
        assert_eq!(patience(30 * S, 3, 20), 100 * S);
        assert_eq!(patience(30 * S, 5_000, 20), 350 * S);
        assert_eq!(patience(S, 5_000, 0), 5_013 * S);
    }
}
