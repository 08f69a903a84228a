//! How far an upgrade is, and which image each runtime gets in it.

use std::{collections::BTreeMap, sync::Arc};

use aws_lc_rs::digest::{SHA256, digest};
use jiff::Timestamp;
use thiserror::Error;
use tidewatch_shared::identity::RuntimeId;

/// An image reference.
pub(in crate::controllers::installer) type Image = Arc<str>;

/// The keys of its ConfigMap.
const TARGET: &str = "target";
const PREVIOUS: &str = "previous";
const STAGE: &str = "stage";
const THROUGH: &str = "through";
const SINCE: &str = "since";
const HALTED: &str = "halted";
/// The stage of an upgrade that is over.
const DONE: &str = "done";

/// The upgrade of all runtimes to one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::controllers::installer) struct Rollout {
    /// What everybody gets in the end.
    pub(super) target: Image,
    /// When its stage began, or when it was over, in Unix seconds.
    pub(super) since: i64,
    pub(super) progress: Progress,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Everybody gets it.
    Done,
    /// Some get it.
    Under(Under),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Under {
    /// What the others get: the last image that everybody had. `None` where nobody knows: then each keeps what it has.
    pub(super) previous: Option<Image>,
    /// `None` until it is known who goes first.
    pub(super) stage: Option<Stage>,
    /// Why it goes on no more.
    pub(super) halted: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stage {
    /// Of the list of shares; the first is 1.
    pub(super) number: u32,
    /// Whose [`rank`] is not above it gets the image. Stored, so that who comes and goes moves nobody else.
    pub(super) through: u64,
}

/// What a runtime gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::controllers::installer) enum Decided {
    /// This.
    Is(Image),
    /// What we gave it before; this where there is no agent of ours yet.
    KeepOr(Image),
}

/// Why what is stored cannot be read.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum ReadRollout {
    /// A key is missing.
    #[error("the key {0} is missing")]
    Missing(&'static str),
    /// A key holds something else than it should.
    #[error("the key {0} is not readable")]
    Value(&'static str),
}

/// Where a runtime stands in the order of an upgrade: the same in every process, another for every image, and as good as random.
pub(super) fn rank(target: &str, runtime: &RuntimeId) -> u64 {
    let text = [target.as_bytes(), b"\0", runtime.as_str().as_bytes()].concat();
    let mut first = [0; 8];
    first.copy_from_slice(&digest(&SHA256, &text).as_ref()[..8]);
    u64::from_be_bytes(first)
}

impl Rollout {
    /// Where nothing is stored: nobody knows what runtimes have.
    pub(super) fn unknown(target: &str, now: i64) -> Self {
        Self::under(target.into(), None, now)
    }

    /// Everybody gets the same, as if there had never been another.
    pub(super) fn done(target: &str) -> Self {
        Self { target: target.into(), since: 0, progress: Progress::Done }
    }

    fn under(target: Image, previous: Option<Image>, since: i64) -> Self {
        let under = Under { previous, stage: None, halted: None };
        Self { target, since, progress: Progress::Under(under) }
    }

    /// What it becomes when another image is wanted. Back to where it came from leads at once: who has the other image is in need of it.
    pub(super) fn towards(&self, target: &str, now: i64) -> Self {
        if *self.target == *target {
            return self.clone();
        }
        let previous = match &self.progress {
            Progress::Done => Some(self.target.clone()),
            Progress::Under(under) => under.previous.clone(),
        };
        if previous.as_deref() == Some(target) {
            return Self { since: now, ..Self::done(target) };
        }
        Self::under(target.into(), previous, now)
    }

    /// The image of one runtime.
    pub(in crate::controllers::installer) fn image_of(&self, runtime: &RuntimeId) -> Decided {
        // Most of the time there is no upgrade, and so nothing to compute.
        let Progress::Under(under) = &self.progress else { return Decided::Is(self.target.clone()) };
        self.image_at(under, || rank(&self.target, runtime))
    }

    /// The same of one whose rank is known.
    pub(super) fn image_at_rank(&self, rank: u64) -> Decided {
        match &self.progress {
            Progress::Done => Decided::Is(self.target.clone()),
            Progress::Under(under) => self.image_at(under, || rank),
        }
    }

    fn image_at(&self, under: &Under, rank: impl FnOnce() -> u64) -> Decided {
        match (&under.stage, &under.previous) {
            (Some(stage), _) if rank() <= stage.through => Decided::Is(self.target.clone()),
            (_, Some(previous)) => Decided::Is(previous.clone()),
            (_, None) => Decided::KeepOr(self.target.clone()),
        }
    }

    pub(super) fn halted(&self) -> Option<&str> {
        match &self.progress {
            Progress::Under(under) => under.halted.as_deref(),
            Progress::Done => None,
        }
    }

    pub(super) const fn is_done(&self) -> bool {
        matches!(self.progress, Progress::Done)
    }

    /// The number of its stage: 0 when there is none.
    pub(super) fn stage(&self) -> u32 {
        match &self.progress {
            Progress::Under(Under { stage: Some(stage), .. }) => stage.number,
            _ => 0,
        }
    }

    /// As the data of its ConfigMap.
    pub(super) fn write(&self) -> BTreeMap<String, String> {
        let mut data = BTreeMap::new();
        let mut put = |key: &str, value: String| drop(data.insert(key.to_owned(), value));
        put(TARGET, self.target.to_string());
        put(SINCE, Timestamp::from_second(self.since).unwrap_or_default().to_string());
        match &self.progress {
            Progress::Done => put(STAGE, DONE.to_owned()),
            Progress::Under(Under { previous, stage, halted }) => {
                put(STAGE, stage.map_or(0, |stage| stage.number).to_string());
                if let Some(stage) = stage {
                    put(THROUGH, format!("{:016x}", stage.through));
                }
                if let Some(previous) = previous {
                    put(PREVIOUS, previous.to_string());
                }
                if let Some(halted) = halted {
                    put(HALTED, halted.clone());
                }
            }
        }
        data
    }

    /// From the data of its ConfigMap.
    pub(super) fn read(data: &BTreeMap<String, String>) -> Result<Self, ReadRollout> {
        let text = |key: &'static str| data.get(key).map(String::as_str);
        let needed = |key| text(key).filter(|text| !text.is_empty()).ok_or(ReadRollout::Missing(key));
        let since: Timestamp = needed(SINCE)?.parse().map_err(|_| ReadRollout::Value(SINCE))?;
        let progress = match needed(STAGE)? {
            DONE => Progress::Done,
            number => {
                let number: u32 = number.parse().map_err(|_| ReadRollout::Value(STAGE))?;
                let through = || u64::from_str_radix(needed(THROUGH)?, 16).map_err(|_| ReadRollout::Value(THROUGH));
                let stage = if number == 0 { None } else { Some(Stage { number, through: through()? }) };
                let previous = text(PREVIOUS).filter(|previous| !previous.is_empty()).map(Image::from);
                Progress::Under(Under { previous, stage, halted: text(HALTED).map(str::to_owned) })
            }
        };
        Ok(Self { target: needed(TARGET)?.into(), since: since.as_second(), progress })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An upgrade from `a` to `b` in this stage.
    pub(in crate::controllers::installer::upgrade) fn upgrade(stage: Option<(u32, u64)>) -> Rollout {
        let stage = stage.map(|(number, through)| Stage { number, through });
        let under = Under { previous: Some("a".into()), stage, halted: None };
        Rollout { target: "b".into(), since: 1_800_000_000, progress: Progress::Under(under) }
    }

    fn id(text: &str) -> RuntimeId {
        text.parse().unwrap()
    }

    #[test]
    fn who_is_in_the_share_gets_the_image_and_the_others_what_they_had() {
        let (runtime, rank) = (id("r-1"), rank("b", &id("r-1")));
        let image = |rollout: &Rollout| rollout.image_of(&runtime);
        assert_eq!(image(&upgrade(None)), Decided::Is("a".into()));
        assert_eq!(image(&upgrade(Some((1, rank - 1)))), Decided::Is("a".into()));
        assert_eq!(image(&upgrade(Some((1, rank)))), Decided::Is("b".into()));
        assert_eq!(image(&Rollout::done("b")), Decided::Is("b".into()));
        assert_eq!(image(&Rollout::unknown("b", 0)), Decided::KeepOr("b".into()));
        assert_ne!(super::rank("c", &runtime), rank, "who goes first is drawn anew for each image");
    }

    #[test]
    fn another_image_begins_anew_and_the_way_back_is_short() {
        let towards = |rollout: &Rollout, target: &str| rollout.towards(target, 7);
        let begun = towards(&Rollout::done("a"), "b");
        assert_eq!(begun, Rollout { since: 7, ..upgrade(None) });
        let halted = |mut rollout: Rollout| {
            let Progress::Under(under) = &mut rollout.progress else { panic!() };
            under.halted = Some("why".into());
            rollout
        };
        for rollout in [upgrade(Some((2, 9))), halted(upgrade(Some((1, 9))))] {
            assert_eq!(towards(&rollout, "b"), rollout);
            assert_eq!(towards(&rollout, "a"), Rollout { since: 7, ..Rollout::done("a") });
            let other = towards(&rollout, "c");
            assert_eq!((other.image_of(&id("r")), other.halted()), (Decided::Is("a".into()), None), "nobody keeps it");
        }
    }

    #[test]
    fn it_survives_being_written_and_read() {
        let mut halted = upgrade(Some((3, u64::MAX)));
        let Progress::Under(under) = &mut halted.progress else { panic!() };
        under.halted = Some("2 of 3".into());
        for rollout in
            [Rollout::done("x:1"), Rollout::unknown("x", 5), upgrade(None), upgrade(Some((1, 0))), halted.clone()]
        {
            assert_eq!(Rollout::read(&rollout.write()), Ok(rollout));
        }
        let data = halted.write();
        for (key, value) in [(SINCE, "now"), (STAGE, "two"), (STAGE, "-1"), (THROUGH, "xyz")] {
            let mut bad = data.clone();
            bad.insert(key.to_owned(), value.to_owned());
            assert_eq!(Rollout::read(&bad), Err(ReadRollout::Value(key)), "{value}");
        }
        for key in [TARGET, SINCE, STAGE, THROUGH] {
            let mut bad = data.clone();
            bad.remove(key);
            assert_eq!(Rollout::read(&bad), Err(ReadRollout::Missing(key)));
        }
    }
}
