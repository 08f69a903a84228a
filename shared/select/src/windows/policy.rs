//! The policy of maintenance windows, and the decision for one runtime at one time: pure.

use std::{collections::BTreeMap, fmt, time::Duration};

use jiff::Timestamp;
use regex::bytes::Regex;
use thiserror::Error;
use tidewatch_api::names::label;

use super::parse::Mistakes;

/// One day in seconds. Windows have fixed offsets from UTC, so every day has the same length.
const DAY: i64 = 86_400;
/// Days after today in which the windows of a week are looked up.
const DAYS_AHEAD: i64 = 8;
/// Days before today from which the windows of a week may last until now.
const DAYS_BACK: i64 = 2;

/// Longest time until a reconcile; for a later window the Kyma is reconciled in between.
const LONGEST_DELAY: Duration = Duration::from_secs(30 * 86_400);

/// Windows of all runtimes, in lifecycle-manager's format.
#[derive(Clone, Debug)]
pub(super) struct Policy {
    /// The windows of the first rule that matches a runtime apply.
    pub(super) rules: Vec<Rule>,
    /// Window of the runtimes that no rule matches, or whose rule has no window left.
    pub(super) default: Option<Window>,
    /// Parts of the file that could not be read, or are read otherwise than they are written.
    pub(super) mistakes: Mistakes,
}

/// Windows of some runtimes.
#[derive(Clone, Debug)]
pub(super) struct Rule {
    /// Each matches an attribute; one match is enough.
    pub(super) expressions: Vec<(Attribute, Regex)>,
    pub(super) windows: Vec<Window>,
    /// None of its windows can be read: its runtimes wait, instead of getting the default window.
    pub(super) is_unreadable: bool,
}

/// Attribute of a runtime, a label of its Kyma.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attribute {
    GlobalAccountId,
    Plan,
    Region,
    PlatformRegion,
}

impl Attribute {
    pub(super) const ALL: [Self; 4] = [Self::GlobalAccountId, Self::Plan, Self::Region, Self::PlatformRegion];

    /// Member of `match`.
    pub(super) const fn member(self) -> &'static str {
        match self {
            Self::GlobalAccountId => "globalAccountID",
            Self::Plan => "plan",
            Self::Region => "region",
            Self::PlatformRegion => "platformRegion",
        }
    }

    const fn label(self) -> &'static str {
        match self {
            Self::GlobalAccountId => label::GLOBAL_ACCOUNT_ID,
            Self::Plan => label::BROKER_PLAN_NAME,
            Self::Region => label::REGION,
            Self::PlatformRegion => label::PLATFORM_REGION,
        }
    }
}

/// One window. Times are in Unix seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// From `begin` until before `end`.
    Once { begin: i64, end: i64 },
    /// Begins on these days of each week, Monday first, and lasts `length` seconds, at most a day.
    Weekly { days: [bool; 7], begin: TimeOfDay, length: i64 },
}

/// Time of a day at a fixed offset from UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TimeOfDay {
    /// Seconds since midnight.
    pub(super) seconds: i64,
    /// Offset in seconds, positive in the east.
    pub(super) offset: i64,
}

/// Maintenance window of one runtime at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowState {
    /// An upgrade may begin now.
    Open,
    /// An upgrade may begin at this time.
    Opens(Timestamp),
    /// There is no window.
    Unknown(NoWindowError),
}

/// Reason for which a runtime has no window. The texts are lifecycle-manager's.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum NoWindowError {
    /// No policy was read.
    #[error("no maintenance window policy configured")]
    NoPolicy,
    /// Neither the rule that matches nor the default has a window now or later.
    #[error("matches and defaults also failed to provide a window")]
    NoneFound,
}

impl WindowState {
    /// Start of the window; `None` if it is open, or there is none.
    pub const fn opens(self) -> Option<Timestamp> {
        match self {
            Self::Opens(opens) => Some(opens),
            Self::Open | Self::Unknown(_) => None,
        }
    }

    /// Time until the reconcile of a Kyma with a module that waits; `None` if no window is known.
    pub fn delay(self, now: Timestamp) -> Option<Duration> {
        match self {
            Self::Open => Some(Duration::ZERO),
            // Negative if the window has opened since the decision.
            Self::Opens(opens) => {
                Some(Duration::try_from(opens.duration_since(now)).unwrap_or_default().min(LONGEST_DELAY))
            }
            Self::Unknown(_) => None,
        }
    }
}

impl fmt::Display for WindowState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open => f.write_str("open"),
            Self::Opens(time) => time.fmt(f),
            Self::Unknown(cause) => cause.fmt(f),
        }
    }
}

impl Policy {
    /// Window of the runtime with these labels of its Kyma. `min_left` is the time in seconds that an open window must last
    /// at least; shorter ones never open.
    pub(super) fn state(&self, labels: &BTreeMap<String, String>, min_left: i64, now: Timestamp) -> WindowState {
        let rule = self.rules.iter().find(|rule| rule.matches(labels));
        if rule.is_some_and(|rule| rule.is_unreadable) {
            return WindowState::Unknown(NoWindowError::NoneFound);
        }
        let windows = rule.map(|rule| rule.windows.as_slice());
        let state = [windows, self.default.as_ref().map(std::slice::from_ref)]
            .into_iter()
            .flatten()
            .find_map(|windows| state_of(windows, min_left, now));
        state.unwrap_or(WindowState::Unknown(NoWindowError::NoneFound))
    }
}

impl Rule {
    fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.expressions.iter().any(|(attribute, expression)| {
            let value = labels.get(attribute.label()).filter(|value| !value.is_empty());
            value.is_some_and(|value| expression.is_match(value.as_bytes()))
        })
    }
}

/// The first of these windows that is open or opens later.
fn state_of(windows: &[Window], min_left: i64, now: Timestamp) -> Option<WindowState> {
    let second = now.as_second();
    let mut spans: Vec<_> = windows.iter().flat_map(|window| window.spans(second)).collect();
    spans.retain(|(_, end)| *end > second);
    spans.sort_unstable();
    let (begin, _) = joined(spans).into_iter().find(|(begin, end)| end - (*begin).max(second) > min_left)?;
    if begin <= second { Some(WindowState::Open) } else { Timestamp::from_second(begin).ok().map(WindowState::Opens) }
}

/// Joins sorted spans that overlap, or follow each other without a gap.
fn joined(spans: Vec<(i64, i64)>) -> Vec<(i64, i64)> {
    let mut joined: Vec<(i64, i64)> = Vec::new();
    for (begin, end) in spans {
        match joined.last_mut().filter(|last| begin <= last.1) {
            Some(last) => last.1 = last.1.max(end),
            None => joined.push((begin, end)),
        }
    }
    joined
}

impl Window {
    /// Begins and ends of the window around this time.
    fn spans(&self, second: i64) -> Vec<(i64, i64)> {
        match self {
            Self::Once { begin, end } => vec![(*begin, *end)],
            Self::Weekly { days, begin, length } => {
                let today = (second + begin.offset).div_euclid(DAY);
                let on = |day: &i64| {
                    // The first day of Unix time was a Thursday.
                    let weekday = usize::try_from((day + 3).rem_euclid(7)).unwrap_or(0);
                    days[weekday]
                };
                let days = (today - DAYS_BACK..=today + DAYS_AHEAD).filter(on);
                let begins = days.map(|day| day * DAY + begin.seconds - begin.offset);
                begins.map(|begin| (begin, begin + length)).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests;
