//! What flags decide about upgrades.

use std::{fmt, str::FromStr, time::Duration};

use clap::Args;
use thiserror::Error;

/// Basis points of the whole.
const WHOLE: u16 = 10_000;

/// How another image reaches the runtimes.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct Flags {
    /// Shares of the runtimes that get another agent image, one stage after the other: percentages that grow to 100%. A stage has one
    /// runtime at least.
    #[arg(long, env = "TIDEWATCH_AGENT_UPGRADE_STAGES", default_value = "1%,10%,50%,100%")]
    pub agent_upgrade_stages: Stages,

    /// How long a stage of an upgrade lasts at least, in seconds.
    #[arg(long, env = "TIDEWATCH_AGENT_UPGRADE_PAUSE_SECONDS", default_value_t = 3_600, value_parser = clap::value_parser!(u32).range(0..=2_592_000))]
    pub agent_upgrade_pause_seconds: u32,

    /// A runtime whose event path is not proven for so long after its agent was upgraded, in seconds, has failed. Give it more than
    /// three heartbeat intervals, and the time to pull an image.
    #[arg(long, env = "TIDEWATCH_AGENT_UPGRADE_DEADLINE_SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub agent_upgrade_deadline_seconds: u32,

    /// An upgrade halts when so many of the upgraded runtimes have failed, as a percentage, and at one runtime at least.
    #[arg(long, env = "TIDEWATCH_AGENT_UPGRADE_MAX_FAILURES", default_value = "2%")]
    pub agent_upgrade_max_failures: Share,
}

impl Flags {
    pub(super) const fn pause(&self) -> Duration {
        Duration::from_secs(self.agent_upgrade_pause_seconds as u64)
    }

    pub(super) const fn deadline(&self) -> Duration {
        Duration::from_secs(self.agent_upgrade_deadline_seconds as u64)
    }
}

/// The text is no [`Share`].
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("not a percentage from 0.01% to 100%")]
pub struct InvalidShare;

/// A part of the runtimes: more than nothing, in hundredths of a percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u16);

impl Share {
    /// Of so many, rounded down, but one at least.
    #[must_use]
    pub fn floor_of(self, count: usize) -> usize {
        (count.saturating_mul(self.0.into()) / usize::from(WHOLE)).max(1)
    }

    /// Of so many, rounded up, but one at least.
    #[must_use]
    pub fn ceiling_of(self, count: usize) -> usize {
        count.saturating_mul(self.0.into()).div_ceil(WHOLE.into()).max(1)
    }

    /// Whether it is all of them.
    #[must_use]
    pub const fn is_whole(self) -> bool {
        self.0 == WHOLE
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.0 / 100, self.0 % 100);
        if rest == 0 { write!(f, "{whole}%") } else { write!(f, "{whole}.{rest:02}%") }
    }
}

impl FromStr for Share {
    type Err = InvalidShare;

    fn from_str(text: &str) -> Result<Self, InvalidShare> {
        let number = text.trim().strip_suffix('%').ok_or(InvalidShare)?;
        let (whole, rest) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(whole) || !digits(rest) || rest.len() > 2 {
            return Err(InvalidShare);
        }
        let whole: u16 = whole.parse().map_err(|_| InvalidShare)?;
        let rest: u16 = format!("{rest:0<2}").parse().map_err(|_| InvalidShare)?;
        let points = whole.checked_mul(100).and_then(|points| points.checked_add(rest)).ok_or(InvalidShare)?;
        (1..=WHOLE).contains(&points).then_some(Self(points)).ok_or(InvalidShare)
    }
}

/// The text is no [`Stages`].
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum InvalidStages {
    /// One of them is none.
    #[error(transparent)]
    Share(#[from] InvalidShare),
    /// They do not grow.
    #[error("each share must be larger than the one before")]
    Order,
    /// Some runtimes would never be upgraded.
    #[error("the last share must be 100%")]
    End,
}

/// Shares that grow to the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stages(Vec<Share>);

impl Stages {
    /// The shares from the one of this number on, with their numbers; the first is 1. The last one is always among them.
    pub(super) fn from(&self, number: u32) -> impl Iterator<Item = (u32, Share)> {
        let skipped = usize::try_from(number.saturating_sub(1)).unwrap_or(usize::MAX).min(self.0.len() - 1);
        (1..).zip(self.0.iter().copied()).skip(skipped)
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

impl fmt::Display for Stages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<_> = self.0.iter().map(Share::to_string).collect();
        f.write_str(&texts.join(","))
    }
}

impl FromStr for Stages {
    type Err = InvalidStages;

    fn from_str(text: &str) -> Result<Self, InvalidStages> {
        let shares: Vec<Share> = text.split(',').map(str::parse).collect::<Result<_, _>>()?;
        if !shares.is_sorted_by(|a, b| a < b) {
            return Err(InvalidStages::Order);
        }
        if !shares.last().is_some_and(|last| last.is_whole()) {
            return Err(InvalidStages::End);
        }
        Ok(Self(shares))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percentages_and_never_nobody() {
        for (text, shown, floor, ceiling) in [
            ("1%", "1%", 2, 3),
            ("0.5%", "0.50%", 1, 2),
            ("12.25%", "12.25%", 30, 31),
            ("100%", "100%", 250, 250),
            ("0.01%", "0.01%", 1, 1),
        ] {
            let share: Share = text.parse().unwrap();
            assert_eq!(
                (share.to_string().as_str(), share.floor_of(250), share.ceiling_of(250)),
                (shown, floor, ceiling)
            );
            assert_eq!((share.floor_of(0), share.ceiling_of(0)), (1, 1));
        }
        for bad in ["", "%", "1", "0%", "101%", "1.%", ".5%", "0.001%", "-1%", "+1%", "1e2%", "99999%"] {
            assert_eq!(bad.parse::<Share>(), Err(InvalidShare), "{bad}");
        }
    }

    #[test]
    fn stages_grow_to_the_whole() {
        let stages: Stages = "1%, 10%,100%".parse().unwrap();
        assert_eq!((stages.to_string().as_str(), stages.count()), ("1%,10%,100%", 3));
        let numbers = |from| stages.from(from).map(|(number, _)| number).collect::<Vec<_>>();
        assert_eq!((numbers(0), numbers(1), numbers(2)), (vec![1, 2, 3], vec![1, 2, 3], vec![2, 3]));
        assert_eq!((numbers(3), numbers(9)), (vec![3], vec![3]), "of a list that has become shorter");
        for (bad, why) in [
            ("10%,1%,100%", InvalidStages::Order),
            ("10%,10%,100%", InvalidStages::Order),
            ("1%,10%", InvalidStages::End),
            ("", InvalidStages::Share(InvalidShare)),
        ] {
            assert_eq!(bad.parse::<Stages>(), Err(why), "{bad}");
        }
    }
}
