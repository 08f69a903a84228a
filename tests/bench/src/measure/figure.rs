//! Figures as lines of JSON, and the arithmetic behind them.

use std::{collections::BTreeMap, io, time::Duration};

use serde::Serialize;
use tidewatch_testing::product::cpu_time;

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
    pub fn new(figure: &'static str, value: f64, unit: &'static str) -> Self {
        Self { figure, value: rounded(value), unit, floor: None, ratio: None, bar: None, holds: None }
    }

    /// Sets the largest value that holds.
    #[must_use]
    pub fn at_most(mut self, bar: f64) -> Self {
        (self.bar, self.holds) = (Some(bar), Some(self.value <= bar));
        self
    }

    /// Sets the smallest value that holds.
    #[must_use]
    pub fn at_least(mut self, bar: f64) -> Self {
        (self.bar, self.holds) = (Some(bar), Some(self.value >= bar));
        self
    }

    /// Adds the floor of the same run, and the ratio of value and floor, which has no bar of its own.
    #[must_use]
    pub fn with_floor(mut self, floor: f64) -> Self {
        (self.floor, self.ratio) = (Some(rounded(floor)), Some(rounded(self.value / floor)));
        self
    }

    /// Adds the floor of the same run, and the largest ratio that holds.
    #[must_use]
    pub fn ratio_at_most(mut self, floor: f64, ratio: f64, bar: f64) -> Self {
        (self.floor, self.ratio) = (Some(rounded(floor)), Some(rounded(ratio)));
        (self.bar, self.holds) = (Some(bar), Some(ratio <= bar));
        self
    }

    /// Its name, if it misses its bar.
    pub fn missed(&self) -> Option<&'static str> {
        (self.holds == Some(false)).then_some(self.figure)
    }

    /// The line of JSON, with its newline.
    pub fn line(&self) -> String {
        // A struct of numbers and fixed strings always serialises.
        serde_json::to_string(self).map(|line| line + "\n").unwrap_or_default()
    }
}

fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// A quantile (0 to 1) of samples by the nearest rank; zero without samples.
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

/// Least-squares line through points: its value at `x`, and its slope. At least two points must differ in their first
/// part.
pub(super) fn line(points: &[(f64, f64)], x: f64) -> (f64, f64) {
    let count = f64::from(u32::try_from(points.len()).unwrap_or(u32::MAX)).max(1.0);
    let (sum_x, sum_y) = points.iter().fold((0.0, 0.0), |(sx, sy), (x, y)| (sx + x, sy + y));
    let mean_x = sum_x / count;
    let mean_y = sum_y / count;
    let above: f64 = points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    let below: f64 = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
    let slope = if below > 0.0 { above / below } else { 0.0 };
    (mean_y + slope * (x - mean_x), slope)
}

pub(super) fn mebibytes(kib: u64) -> f64 {
    f64::from(u32::try_from(kib).unwrap_or(u32::MAX)) / 1024.0
}

/// CPU time of a process so far over all threads, in seconds.
pub(super) fn cpu_of(process: u32) -> io::Result<f64> {
    Ok(cpu_time(process)?.as_secs_f64())
}

/// Sum of the CPU times of threads whose names begin so.
pub(super) fn time_of(threads: &BTreeMap<String, Duration>, name: &str) -> Duration {
    threads.iter().filter(|(thread, _)| thread.starts_with(name)).map(|(_, spent)| *spent).sum()
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

    #[test]
    fn a_line_goes_through_its_points() {
        let (at, slope) = line(&[(500.0, 20.0), (1_000.0, 30.0), (2_000.0, 50.0)], 5_000.0);
        assert!((at - 110.0).abs() < 1e-9 && (slope - 0.02).abs() < 1e-12, "{at} {slope}");
        assert_eq!(line(&[(500.0, 20.0)], 5_000.0), (20.0, 0.0), "one point has no slope");
    }

    #[test]
    fn a_figure_knows_whether_it_holds() {
        let figure = || Figure::new("x", 10.0, "ms");
        assert_eq!(figure().missed(), None);
        assert_eq!(figure().at_most(9.0).missed(), Some("x"));
        assert_eq!(figure().at_least(9.0).with_floor(20.0).missed(), None);
        assert_eq!(figure().at_least(11.0).missed(), Some("x"));
        assert_eq!(figure().ratio_at_most(5.0, 2.0, 1.5).missed(), Some("x"));
        assert!(figure().with_floor(20.0).line().contains("\"ratio\":0.5"));
    }
}
