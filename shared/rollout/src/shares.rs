//! Shares of the runtimes, in percent.

use std::{fmt, str::FromStr};

use thiserror::Error;

/// Basis points of the whole.
const WHOLE: u16 = 10_000;

/// Failure to parse a [`Share`].
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("not a percentage from 0.01% to 100%")]
pub struct ParseShareError;

/// A share of the runtimes in hundredths of a percent, more than 0 and at most 100%.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u16);

impl Share {
    /// Returns the share of a count, rounded down, but at least 1.
    pub fn floor_of(self, count: usize) -> usize {
        (count.saturating_mul(self.0.into()) / usize::from(WHOLE)).max(1)
    }

    /// Returns the share of a count, rounded up, but at least 1.
    pub fn ceiling_of(self, count: usize) -> usize {
        count.saturating_mul(self.0.into()).div_ceil(WHOLE.into()).max(1)
    }

    /// Returns a share of whole percents, from 1 to 100.
    pub const fn percent(percent: u8) -> Self {
        Self(percent as u16 * 100)
    }

    /// Returns whether a part of a count is more than the share.
    pub fn is_exceeded_by(self, part: usize, count: usize) -> bool {
        part.saturating_mul(WHOLE.into()) > count.saturating_mul(self.0.into())
    }

    /// Returns whether the share is 100%.
    pub const fn is_whole(self) -> bool {
        self.0 == WHOLE
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0 / 100, self.0 % 100) {
            (whole, 0) => write!(f, "{whole}%"),
            (whole, rest) => write!(f, "{whole}.{rest:02}%"),
        }
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

/// Failure to parse [`Rings`].
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ParseRingsError {
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
pub struct Rings(Vec<Share>);

impl Rings {
    /// Iterates over numbers and shares from this number on; the first number is 1. The last share is always included,
    /// also if the list is shorter than an earlier one.
    pub fn from(&self, number: u32) -> impl Iterator<Item = (u32, Share)> {
        let skipped = usize::try_from(number.saturating_sub(1)).unwrap_or(usize::MAX).min(self.0.len() - 1);
        (1..).zip(self.0.iter().copied()).skip(skipped)
    }

    /// Number of rings.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

impl FromStr for Rings {
    type Err = ParseRingsError;

    fn from_str(text: &str) -> Result<Self, ParseRingsError> {
        let shares: Vec<Share> = text.split(',').map(str::parse).collect::<Result<_, _>>()?;
        if !shares.is_sorted_by(|a, b| a < b) {
            return Err(ParseRingsError::Order);
        }
        if !shares.last().is_some_and(|last| last.is_whole()) {
            return Err(ParseRingsError::End);
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
    fn rings_grow_to_the_whole_fleet() {
        let rings: Rings = "1%, 10%,100%".parse().unwrap();
        assert_eq!((&rings, rings.count()), (&Rings(vec![Share(100), Share(1_000), Share(WHOLE)]), 3));
        let numbers = |from| rings.from(from).map(|(number, _)| number).collect::<Vec<_>>();
        assert_eq!((numbers(0), numbers(1), numbers(2)), (vec![1, 2, 3], vec![1, 2, 3], vec![2, 3]));
        assert_eq!((numbers(3), numbers(9)), (vec![3], vec![3]), "of a list that has become shorter");
        for (bad, error) in [
            ("10%,1%,100%", ParseRingsError::Order),
            ("10%,10%,100%", ParseRingsError::Order),
            ("1%,10%", ParseRingsError::End),
            ("", ParseRingsError::Share(ParseShareError)),
        ] {
            assert_eq!(bad.parse::<Rings>(), Err(error), "{bad}");
        }
    }
}
