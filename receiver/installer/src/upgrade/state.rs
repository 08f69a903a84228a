//! Progress of an upgrade, and the image of each runtime in it.

use std::{collections::BTreeMap, sync::Arc};

use jiff::Timestamp;
use thiserror::Error;
use tidewatch_api::identity::RuntimeId;
use tidewatch_rollout::{Ring, rank};

/// Image reference.
pub(crate) type Image = Arc<str>;

/// Keys of the ConfigMap.
const TARGET: &str = "target";
const PREVIOUS: &str = "previous";
const STAGE: &str = "stage";
const THROUGH: &str = "through";
const SINCE: &str = "since";
const HALTED: &str = "halted";
/// Value of [`STAGE`] after the upgrade.
const DONE: &str = "done";

/// Upgrade of all runtimes to one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UpgradeState {
    /// Image of every runtime in the end.
    pub(super) target: Image,
    /// Start of the ring, or end of the upgrade, in Unix seconds.
    pub(super) since: i64,
    /// `None` once every runtime is assigned to the target.
    pub(super) ongoing: Option<Ongoing>,
}

/// Upgrade in which only the runtimes within the ring are assigned to the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ongoing {
    /// Last image that was assigned to all runtimes, and stays assigned to those outside the ring. `None` if unknown:
    /// then each runtime keeps its image.
    pub(super) previous: Option<Image>,
    /// `None` until the first ring begins.
    pub(super) ring: Option<Ring>,
    /// Reason for which the upgrade has halted.
    pub(super) halted: Option<String>,
}

/// Image assigned to a runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ImageDecision {
    /// Exactly this image.
    Use(Image),
    /// The image that this receiver assigned before; this one if there is no agent of ours yet.
    KeepOr(Image),
}

/// Failure to parse the stored state.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum ParseStateError {
    /// A key is missing.
    #[error("the key {0} is missing")]
    Missing(&'static str),
    /// The value of a key is invalid.
    #[error("the key {0} is not readable")]
    Value(&'static str),
}

/// Repository of an image reference: without tag and digest.
fn repository(image: &str) -> &str {
    let tagged = image.split_once('@').map_or(image, |(tagged, _)| tagged);
    match tagged.rsplit_once(':') {
        // A colon before a slash belongs to the registry's port.
        Some((repository, tag)) if !tag.contains('/') => repository,
        _ => tagged,
    }
}

impl UpgradeState {
    /// State if nothing is stored: the images of the runtimes are unknown.
    pub(super) fn unknown(target: &str, now: i64) -> Self {
        Self::ongoing(target.into(), None, now)
    }

    /// State with one image for every runtime, without an earlier one.
    pub(super) fn done(target: &str) -> Self {
        Self { target: target.into(), since: 0, ongoing: None }
    }

    fn ongoing(target: Image, previous: Option<Image>, since: i64) -> Self {
        Self { target, since, ongoing: Some(Ongoing { previous, ring: None, halted: None }) }
    }

    /// Returns the state for another target. The previous image is assigned to all runtimes at once, since upgraded
    /// runtimes may need it urgently.
    pub(super) fn retarget(&self, target: &str, now: i64) -> Self {
        if *self.target == *target {
            return self.clone();
        }
        let previous = match &self.ongoing {
            None => Some(self.target.clone()),
            Some(ongoing) => ongoing.previous.clone(),
        };
        if previous.as_deref() == Some(target) {
            return Self { since: now, ..Self::done(target) };
        }
        Self::ongoing(target.into(), previous, now)
    }

    /// Drops images of other repositories than that of the configured image, and returns whether there were any. Who may
    /// edit the ConfigMap must not thereby choose programs for the runtimes. Without a previous image each runtime keeps
    /// its own.
    pub(super) fn restrict_to_repository_of(&mut self, configured: &str) -> bool {
        let is_foreign = |image: &Image| repository(image) != repository(configured);
        if is_foreign(&self.target) {
            *self = Self::ongoing(configured.into(), None, self.since);
            return true;
        }
        let Some(ongoing) = &mut self.ongoing else { return false };
        ongoing.previous.take_if(|previous| is_foreign(previous)).is_some()
    }

    /// Returns the state after a step at `now`.
    pub(super) fn becoming(&self, ongoing: Option<Ongoing>, now: i64) -> Self {
        Self { target: self.target.clone(), since: now, ongoing }
    }

    /// Returns the image assigned to a runtime.
    pub(crate) fn image_for(&self, runtime: &RuntimeId) -> ImageDecision {
        self.image_within(|| rank(&self.target, runtime.as_str()))
    }

    /// Returns the image assigned to a runtime of known rank.
    pub(super) fn image_for_rank(&self, rank: u64) -> ImageDecision {
        self.image_within(|| rank)
    }

    /// Computes the rank only if a ring depends on it.
    fn image_within(&self, rank: impl FnOnce() -> u64) -> ImageDecision {
        let Some(ongoing) = &self.ongoing else { return ImageDecision::Use(self.target.clone()) };
        match (&ongoing.ring, &ongoing.previous) {
            (Some(ring), _) if rank() <= ring.through => ImageDecision::Use(self.target.clone()),
            (_, Some(previous)) => ImageDecision::Use(previous.clone()),
            (_, None) => ImageDecision::KeepOr(self.target.clone()),
        }
    }

    pub(super) fn halted(&self) -> Option<&str> {
        self.ongoing.as_ref()?.halted.as_deref()
    }

    pub(super) const fn is_done(&self) -> bool {
        self.ongoing.is_none()
    }

    /// Number of the current ring, 0 if there is none.
    pub(super) fn ring(&self) -> u32 {
        self.ongoing.as_ref().and_then(|ongoing| ongoing.ring).map_or(0, |ring| ring.number)
    }

    /// Serializes the state as data of the ConfigMap.
    pub(super) fn to_data(&self) -> BTreeMap<String, String> {
        let mut data = BTreeMap::new();
        let mut put = |key: &str, value: String| drop(data.insert(key.to_owned(), value));
        put(TARGET, self.target.to_string());
        put(SINCE, Timestamp::from_second(self.since).unwrap_or_default().to_string());
        let Some(Ongoing { previous, ring, halted }) = &self.ongoing else {
            put(STAGE, DONE.to_owned());
            return data;
        };
        put(STAGE, self.ring().to_string());
        if let Some(ring) = ring {
            put(THROUGH, format!("{:016x}", ring.through));
        }
        if let Some(previous) = previous {
            put(PREVIOUS, previous.to_string());
        }
        if let Some(halted) = halted {
            put(HALTED, halted.clone());
        }
        data
    }

    /// Parses the data of the ConfigMap.
    pub(super) fn from_data(data: &BTreeMap<String, String>) -> Result<Self, ParseStateError> {
        let text = |key: &'static str| data.get(key).map(String::as_str);
        let needed = |key| text(key).filter(|text| !text.is_empty()).ok_or(ParseStateError::Missing(key));
        let since: Timestamp = needed(SINCE)?.parse().map_err(|_| ParseStateError::Value(SINCE))?;
        let ongoing = match needed(STAGE)? {
            DONE => None,
            number => {
                let number: u32 = number.parse().map_err(|_| ParseStateError::Value(STAGE))?;
                let through = || u64::from_str_radix(needed(THROUGH)?, 16).map_err(|_| ParseStateError::Value(THROUGH));
                let ring = if number == 0 { None } else { Some(Ring { number, through: through()? }) };
                let previous = text(PREVIOUS).filter(|previous| !previous.is_empty()).map(Image::from);
                Some(Ongoing { previous, ring, halted: text(HALTED).map(str::to_owned) })
            }
        };
        Ok(Self { target: needed(TARGET)?.into(), since: since.as_second(), ongoing })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Upgrade from `a` to `b` in this ring.
    pub(in crate::upgrade) fn upgrade(ring: Option<(u32, u64)>) -> UpgradeState {
        let ring = ring.map(|(number, through)| Ring { number, through });
        let ongoing = Some(Ongoing { previous: Some("a".into()), ring, halted: None });
        UpgradeState { target: "b".into(), since: 1_800_000_000, ongoing }
    }

    fn id(text: &str) -> RuntimeId {
        text.parse().unwrap()
    }

    #[test]
    fn runtimes_within_the_ring_get_the_target_and_the_others_the_previous_image() {
        let runtime = id("r-1");
        let rank = rank("b", "r-1");
        let image = |state: &UpgradeState| state.image_for(&runtime);
        assert_eq!(image(&upgrade(None)), ImageDecision::Use("a".into()));
        assert_eq!(image(&upgrade(Some((1, rank - 1)))), ImageDecision::Use("a".into()));
        assert_eq!(image(&upgrade(Some((1, rank)))), ImageDecision::Use("b".into()));
        assert_eq!(image(&UpgradeState::done("b")), ImageDecision::Use("b".into()));
        assert_eq!(image(&UpgradeState::unknown("b", 0)), ImageDecision::KeepOr("b".into()));
    }

    #[test]
    fn new_target_restarts_the_upgrade_and_the_previous_image_ends_it() {
        let towards = |state: &UpgradeState, target: &str| state.retarget(target, 7);
        let begun = towards(&UpgradeState::done("a"), "b");
        assert_eq!(begun, UpgradeState { since: 7, ..upgrade(None) });
        let halted = |mut state: UpgradeState| {
            state.ongoing.as_mut().unwrap().halted = Some("why".into());
            state
        };
        for state in [upgrade(Some((2, 9))), halted(upgrade(Some((1, 9))))] {
            assert_eq!(towards(&state, "b"), state);
            assert_eq!(towards(&state, "a"), UpgradeState { since: 7, ..UpgradeState::done("a") });
            let other = towards(&state, "c");
            assert_eq!(
                (other.image_for(&id("r")), other.halted()),
                (ImageDecision::Use("a".into()), None),
                "no runtime keeps the halted image"
            );
        }
    }

    #[test]
    fn images_of_other_repositories_are_dropped() {
        let ours = "registry.example.com:5000/agent:2";
        let moved = "registry.example.com:5000/agent";
        for (image, expected) in [
            (ours, moved),
            (moved, moved),
            ("registry.example.com:5000/agent:2@sha256:ab", moved),
            ("a", "a"),
            ("a:1", "a"),
        ] {
            assert_eq!(repository(image), expected);
        }
        let state = |target: &str, previous: Option<&str>| {
            let ongoing = Ongoing { previous: previous.map(Image::from), ring: None, halted: None };
            UpgradeState { target: target.into(), since: 7, ongoing: Some(ongoing) }
        };
        let older = "registry.example.com:5000/agent@sha256:ab";
        let evil = "registry.example.com:5000/evil/agent:2";
        for (mut stored, restricted) in [
            (UpgradeState::done(older), None),
            (state(ours, Some(older)), None),
            (state(ours, Some(evil)), Some(state(ours, None))),
            (UpgradeState { since: 7, ..UpgradeState::done(evil) }, Some(state(ours, None))),
            (state(evil, Some(older)), Some(state(ours, None))),
        ] {
            let before = stored.clone();
            assert_eq!(stored.restrict_to_repository_of(ours), restricted.is_some());
            assert_eq!(stored, restricted.unwrap_or(before));
        }
    }

    #[test]
    fn state_round_trips_through_config_map_data() {
        let mut halted = upgrade(Some((3, u64::MAX)));
        halted.ongoing.as_mut().unwrap().halted = Some("2 of 3".into());
        for state in [
            UpgradeState::done("x:1"),
            UpgradeState::unknown("x", 5),
            upgrade(None),
            upgrade(Some((1, 0))),
            halted.clone(),
        ] {
            assert_eq!(UpgradeState::from_data(&state.to_data()), Ok(state));
        }
        let data = halted.to_data();
        for (key, value) in [(SINCE, "now"), (STAGE, "two"), (STAGE, "-1"), (THROUGH, "xyz")] {
            let mut bad = data.clone();
            bad.insert(key.to_owned(), value.to_owned());
            assert_eq!(UpgradeState::from_data(&bad), Err(ParseStateError::Value(key)), "{value}");
        }
        for key in [TARGET, SINCE, STAGE, THROUGH] {
            let mut bad = data.clone();
            bad.remove(key);
            assert_eq!(UpgradeState::from_data(&bad), Err(ParseStateError::Missing(key)));
        }
    }
}
