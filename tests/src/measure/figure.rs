//! One line of JSON per figure, and the arithmetic behind it.

use std::time::Duration;

use serde::Serialize;

/// A figure as it is printed.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    figure: &'static str,
    value: f64,
    unit: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    floor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bar: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    holds: Option<bool>,
}

impl Figure {
    /// A figure without a bar.
    #[must_use]
    pub fn new(figure: &'static str, value: f64, unit: &'static str) -> Self {
        Self { figure, value: rounded(value), unit, floor: None, ratio: None, bar: None, holds: None }
    }

    /// Adds the most that the value may be.
    #[must_use]
    pub fn at_most(mut self, bar: f64) -> Self {
        (self.bar, self.holds) = (Some(bar), Some(self.value <= bar));
        self
    }

    /// Adds the floor of the same run, and the most that the ratio may be.
    #[must_use]
    pub fn over(mut self, floor: f64, ratio: f64, bar: f64) -> Self {
        (self.floor, self.ratio) = (Some(rounded(floor)), Some(rounded(ratio)));
        (self.bar, self.holds) = (Some(bar), Some(ratio <= bar));
        self
    }

    /// The line, with its end.
    #[must_use]
    pub fn line(&self) -> String {
        // A struct of numbers and fixed words always serialises.
        serde_json::to_string(self).map(|line| line + "\n").unwrap_or_default()
    }
}

fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// A quantile (0 to 1) of samples by the nearest rank; zero when there are none.
pub(super) fn quantile(samples: &mut [f64], q: f64) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an index below len"
    )]
    let rank = ((samples.len() as f64 * q).ceil() as usize).clamp(1, samples.len().max(1)) - 1;
    samples.get(rank).copied().unwrap_or_default()
}

pub(super) fn median(mut samples: Vec<f64>) -> f64 {
    quantile(&mut samples, 0.5)
}

pub(super) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_nearest_ranks() {
        let mut samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(quantile(&mut samples, 0.5), 50.0);
        assert_eq!(quantile(&mut samples, 0.99), 99.0);
        assert_eq!(quantile(&mut samples, 1.0), 100.0);
        assert_eq!(quantile(&mut [], 0.5), 0.0);
        assert_eq!(quantile(&mut [7.0], 0.99), 7.0);
    }
}
