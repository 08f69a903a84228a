//! How each runtime stands, and since when: what makes of moments what an upgrade can be judged by.

use std::{collections::HashMap, time::Duration};

use tidewatch_shared::identity::RuntimeId;
use tokio::time::Instant;

use super::{
    Decided, Image,
    course::Fact,
    decide::{Member, Standing},
    rollout::rank,
};
use crate::{
    base::key::KymaKey,
    fleet::{PathState, hub::Stand},
};

/// What one look at a runtime shows.
pub(super) struct Look<'a> {
    pub(super) stand: &'a Stand,
    pub(super) fact: Option<Fact>,
    pub(super) decided: Decided,
}

/// One entry per Kyma that counts, so bounded by their number. Times are of this process: a new one gives everybody their time anew.
#[derive(Debug, Default)]
pub(super) struct Table {
    target: Option<Image>,
    rows: HashMap<KymaKey, Row>,
}

#[derive(Debug, Default)]
struct Row {
    rank: Option<u64>,
    image: Option<Image>,
    /// Since when its path is not proven.
    unproven: Option<Instant>,
    /// Since when it lacks the image that it is to get, or nobody has looked what it has.
    lacking: Option<Instant>,
    /// At the last look its path was known not to be proven.
    is_unwell: bool,
    /// So it was before it got the image that it has, and has not been proven since.
    was_unwell: bool,
}

impl Table {
    /// What is wanted now. With another image everybody has another rank.
    pub(super) fn target(&mut self, target: &Image) {
        if self.target.as_ref() != Some(target) {
            self.target = Some(target.clone());
            self.rows.values_mut().for_each(|row| (row.rank, row.lacking) = (None, None));
        }
    }

    /// The place of a runtime in the order.
    pub(super) fn rank(&mut self, key: &KymaKey, runtime: &RuntimeId) -> u64 {
        let target = self.target.as_deref().unwrap_or_default();
        *self.rows.entry(key.clone()).or_default().rank.get_or_insert_with(|| rank(target, runtime))
    }

    /// Nothing is concluded from a runtime for now: the time that this takes is none of its deadlines.
    pub(super) fn rests(&mut self, key: &KymaKey) {
        if let Some(row) = self.rows.get_mut(key) {
            (row.unproven, row.lacking) = (None, None);
        }
    }

    /// Forgets all others.
    pub(super) fn retain(&mut self, keep: impl Fn(&KymaKey) -> bool) {
        self.rows.retain(|key, _| keep(key));
    }

    /// Takes a look at a runtime whose rank was asked for.
    pub(super) fn look(&mut self, look: Look<'_>, deadline: Duration, now: Instant) -> Option<Member> {
        let target = self.target.clone()?;
        let row = self.rows.get_mut(&look.stand.kyma)?;
        let standing = row.look(&look, &target, deadline, now);
        Some(Member { kyma: look.stand.kyma.clone(), rank: row.rank?, image: row.image.clone(), standing })
    }
}

impl Row {
    fn look(&mut self, look: &Look<'_>, target: &Image, deadline: Duration, now: Instant) -> Standing {
        let Look { stand, fact, decided } = look;
        if let Some(fact) = fact.as_ref().filter(|fact| self.image.as_ref() != Some(&fact.image)) {
            if self.image.is_some() {
                self.was_unwell = self.is_unwell;
                // A new pod has its own time to get well.
                self.unproven = None;
            }
            self.image = Some(fact.image.clone());
        }
        let has = self.image.as_ref() == Some(target);
        // What the agent before this one has said proves nothing of this one.
        let has_spoken = |fact: &Fact| fact.runs.zip(stand.beat).is_some_and(|(runs, beat)| beat >= runs);
        let is_proven = stand.path == PathState::Proven && (!has || fact.as_ref().is_some_and(has_spoken));
        if is_proven {
            (self.unproven, self.was_unwell) = (None, false);
        }
        self.is_unwell = matches!(stand.path, PathState::Unproven(_));
        let unproven = if is_proven { None } else { Some(*self.unproven.get_or_insert(now)) };
        let lacks = match decided {
            Decided::Is(image) => image == target && !has,
            Decided::KeepOr(_) => self.image.is_none(),
        };
        self.lacking = lacks.then(|| self.lacking.unwrap_or(now));
        let is_due = |since: Option<Instant>| since.is_some_and(|since| now >= since + deadline);
        match (self.lacking, has) {
            (Some(_), _) => {
                if is_due(self.lacking) {
                    Standing::Unfit
                } else {
                    Standing::Pending
                }
            }
            (None, _) if is_proven => Standing::Proven,
            (None, true) if self.was_unwell => Standing::Unfit,
            (None, _) if is_due(unproven) => Standing::Failing,
            (None, _) => Standing::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Unproven;

    const DEADLINE: Duration = Duration::from_secs(600);
    const S: Duration = Duration::from_secs(1);

    struct One {
        table: Table,
        start: Instant,
    }

    impl One {
        fn new() -> Self {
            let mut table = Table::default();
            table.target(&"b".into());
            table.rank(&KymaKey::new("ns", "k"), &"r".parse().unwrap());
            Self { table, start: Instant::now() }
        }

        /// A look after so many seconds. `has` is its image and since when its pod runs; `beat` its last heartbeat.
        fn at(
            &mut self,
            second: u32,
            has: Option<(&str, Option<u32>)>,
            gets: &str,
            path: PathState,
            beat: u32,
        ) -> Standing {
            let at = |second: u32| self.start + S * second;
            let stand =
                Stand { kyma: KymaKey::new("ns", "k"), runtime: "r".parse().unwrap(), path, beat: Some(at(beat)) };
            let fact = has.map(|(image, runs)| Fact { image: image.into(), runs: runs.map(at) });
            let look = Look { stand: &stand, fact, decided: Decided::Is(gets.into()) };
            let now = at(second);
            self.table.look(look, DEADLINE, now).unwrap().standing
        }
    }

    const SILENT: PathState = PathState::Unproven(Unproven::NoHeartbeat);

    #[test]
    fn an_upgraded_agent_is_proven_by_its_own_word_alone() {
        let mut one = One::new();
        assert_eq!(one.at(0, Some(("a", Some(0))), "a", PathState::Proven, 0), Standing::Proven);
        assert_eq!(one.at(1, Some(("a", Some(0))), "b", PathState::Proven, 1), Standing::Pending, "it lacks it");
        assert_eq!(one.at(2, Some(("b", None)), "b", PathState::Proven, 1), Standing::Pending, "the old one's word");
        assert_eq!(one.at(5, Some(("b", Some(4))), "b", PathState::Proven, 1), Standing::Pending);
        assert_eq!(one.at(6, Some(("b", Some(4))), "b", PathState::Proven, 6), Standing::Proven);
        assert_eq!(one.at(700, Some(("b", Some(4))), "b", SILENT, 6), Standing::Pending, "it may be passing");
        assert_eq!(one.at(1_299, Some(("b", None)), "b", SILENT, 6), Standing::Pending);
        assert_eq!(one.at(1_300, Some(("b", None)), "b", SILENT, 6), Standing::Failing);
        assert_eq!(one.at(1_301, Some(("b", Some(1_301))), "b", PathState::Proven, 1_301), Standing::Proven);
    }

    #[test]
    fn what_is_not_the_images_fault_tells_nothing() {
        let mut broken = One::new();
        broken.at(0, Some(("a", None)), "a", SILENT, 0);
        assert_eq!(broken.at(1, Some(("b", None)), "b", SILENT, 0), Standing::Unfit, "it was not well before");
        assert_eq!(broken.at(9, Some(("b", Some(8))), "b", PathState::Proven, 9), Standing::Proven);
        broken.at(10, Some(("b", None)), "b", SILENT, 9);
        assert_eq!(broken.at(610, Some(("b", None)), "b", SILENT, 9), Standing::Failing, "it was well with this one");

        let mut late = One::new();
        late.at(0, Some(("a", Some(0))), "a", PathState::Proven, 0);
        assert_eq!(late.at(1, Some(("a", Some(0))), "b", PathState::Proven, 1), Standing::Pending);
        assert_eq!(late.at(601, Some(("a", Some(0))), "b", PathState::Proven, 601), Standing::Unfit);
        assert_eq!(late.at(602, Some(("a", Some(0))), "a", PathState::Proven, 602), Standing::Proven);

        let mut old = One::new();
        assert_eq!(old.at(0, Some(("a", None)), "a", SILENT, 0), Standing::Pending);
        assert_eq!(old.at(600, Some(("a", None)), "a", SILENT, 0), Standing::Failing);
    }

    #[test]
    fn a_new_process_judges_who_has_the_image_already_after_the_deadline() {
        let mut one = One::new();
        assert_eq!(one.at(0, None, "b", PathState::Unknown, 0), Standing::Pending, "nobody has looked");
        assert_eq!(one.at(3, Some(("b", None)), "b", PathState::Unknown, 0), Standing::Pending);
        assert_eq!(one.at(600, Some(("b", None)), "b", SILENT, 0), Standing::Failing);
    }
}
