//! Flags of the upgrade of agents.

use std::{str::FromStr, time::Duration};

use clap::Args;
use thiserror::Error;

use crate::base::flags::seconds;

/// Basis points of the whole.
const WHOLE: u16 = 10_000;

/// Flags of the stages of an upgrade.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Upgrade of agents")]
pub struct Flags {
    /// Shares of the runtimes that get a new agent image, stage after stage: growing percentages up to 100%; a stage
    /// has at least one runtime
    #[arg(long, env = "TIDEWATCH_AGENT_UPGRADE_STAGES", default_value = "1%,10%,50%,100%")]
    pub agent_upgrade_stages: Stages,

    /// Minimum duration of an upgrade stage, in seconds
    #[arg(long = "agent-upgrade-pause-seconds", env = "TIDEWATCH_AGENT_UPGRADE_PAUSE_SECONDS", default_value = "3600", value_name = "SECONDS", value_parser = seconds(0..=2_592_000))]
    pub agent_upgrade_pause: Duration,

    /// Time in seconds after which an upgraded runtime without a proven event path has failed; longer than three
    /// heartbeat intervals plus the pull of the image
    #[arg(long = "agent-upgrade-deadline-seconds", env = "TIDEWATCH_AGENT_UPGRADE_DEADLINE_SECONDS", default_value = "600", value_name = "SECONDS", value_parser = seconds(1..=86_400))]
    pub agent_upgrade_deadline: Duration,

    /// Percentage of upgraded runtimes whose failure halts the upgrade; at least one runtime
    #[arg(long, env = "TIDEWATCH_AGENT_UPGRADE_MAX_FAILURES", default_value = "2%")]
    pub agent_upgrade_max_failures: Share,
}

/// Failure to parse a [`Share`].
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("not a percentage from 0.01% to 100%")]
pub struct ParseShareError;

/// A share of the runtimes in hundredths of a percent, more than 0 and at most 100%.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u16);

impl Share {
    /// Returns the share of a count, rounded down, but at least 1.
    #[must_use]
    pub fn floor_of(self, count: usize) -> usize {
        (count.saturating_mul(self.0.into()) / usize::from(WHOLE)).max(1)
    }

    /// Returns the share of a count, rounded up, but at least 1.
    #[must_use]
    pub fn ceiling_of(self, count: usize) -> usize {
        count.saturating_mul(self.0.into()).div_ceil(WHOLE.into()).max(1)
    }

    /// Returns whether the share is 100%.
    #[must_use]
    pub const fn is_whole(self) -> bool {
        self.0 == WHOLE
    }
}

impl FromStr for Share {
    type Err = ParseShareError;

    fn from_str(text: &str) -> Result<Self, ParseShareError> {
        let number = text.trim().strip_suffix('%').ok_or(ParseShareError)?;
        let (whole, rest) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(whole) || !digits(rest) || rest.len() > 2 {
            return Err(ParseShareError);
        }
        let whole: u16 = whole.parse().map_err(|_| ParseShareError)?;
        let rest: u16 = format!("{rest:0<2}").parse().map_err(|_| ParseShareError)?;
        let points = whole.checked_mul(100).and_then(|points| points.checked_add(rest)).ok_or(ParseShareError)?;
        (1..=WHOLE).contains(&points).then_some(Self(points)).ok_or(ParseShareError)
    }
}

/// Failure to parse [`Stages`].
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ParseStagesError {
    /// A share is invalid.
    #[error(transparent)]
    Share(#[from] ParseShareError),
    /// The shares do not grow.
    #[error("each share must be larger than the one before")]
    Order,
    /// The last share is below 100%, so some runtimes would never be upgraded.
    #[error("the last share must be 100%")]
    End,
}

/// Growing shares that end with 100%.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stages(Vec<Share>);

impl Stages {
    /// Iterates over numbers and shares from this number on; the first number is 1. The last share is always included,
    /// also if the list is shorter than an earlier one.
    pub(super) fn from(&self, number: u32) -> impl Iterator<Item = (u32, Share)> {
        let skipped = usize::try_from(number.saturating_sub(1)).unwrap_or(usize::MAX).min(self.0.len() - 1);
        (1..).zip(self.0.iter().copied()).skip(skipped)
    }

    /// Number of stages.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

impl FromStr for Stages {
    type Err = ParseStagesError;

    fn from_str(text: &str) -> Result<Self, ParseStagesError> {
        let shares: Vec<Share> = text.split(',').map(str::parse).collect::<Result<_, _>>()?;
        if !shares.is_sorted_by(|a, b| a < b) {
            return Err(ParseStagesError::Order);
        }
        if !shares.last().is_some_and(|last| last.is_whole()) {
            return Err(ParseStagesError::End);
        }
        Ok(Self(shares))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percentages_of_at_least_one_runtime() {
        for (text, points, floor, ceiling) in [
            ("1%", 100, 2, 3),
            ("0.5%", 50, 1, 2),
            ("12.25%", 1_225, 30, 31),
            ("100%", WHOLE, 250, 250),
            ("0.01%", 1, 1, 1),
        ] {
            let share: Share = text.parse().unwrap();
            assert_eq!((share, share.floor_of(250), share.ceiling_of(250)), (Share(points), floor, ceiling));
            assert_eq!((share.floor_of(0), share.ceiling_of(0)), (1, 1));
        }
        for bad in ["", "%", "1", "0%", "101%", "1.%", ".5%", "0.001%", "-1%", "+1%", "1e2%", "99999%"] {
            assert_eq!(bad.parse::<Share>(), Err(ParseShareError), "{bad}");
        }
    }

    #[test]
    fn stages_grow_to_the_whole_fleet() {
        let stages: Stages = "1%, 10%,100%".parse().unwrap();
        assert_eq!((&stages, stages.count()), (&Stages(vec![Share(100), Share(1_000), Share(WHOLE)]), 3));
        let numbers = |from| stages.from(from).map(|(number, _)| number).collect::<Vec<_>>();
        assert_eq!((numbers(0), numbers(1), numbers(2)), (vec![1, 2, 3], vec![1, 2, 3], vec![2, 3]));
        assert_eq!((numbers(3), numbers(9)), (vec![3], vec![3]), "of a list that has become shorter");
        for (bad, error) in [
            ("10%,1%,100%", ParseStagesError::Order),
            ("10%,10%,100%", ParseStagesError::Order),
            ("1%,10%", ParseStagesError::End),
            ("", ParseStagesError::Share(ParseShareError)),
        ] {
            assert_eq!(bad.parse::<Stages>(), Err(error), "{bad}");
        }
    }
}
