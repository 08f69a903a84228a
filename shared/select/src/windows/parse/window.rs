//! Reads one window of a policy. A window that cannot be read never opens.

use jiff::Timestamp;
use serde_json::Value;

use super::places::{Members, Mistakes, list, quoted, string};
use crate::windows::policy::{TimeOfDay, Window};

/// Days of the week, as the format names them.
const DAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
/// Maximum number of entries of `days`.
const MAX_DAYS: usize = 100;
/// Seconds of a day.
const DAY: i64 = 86_400;
/// Midnight in UTC.
const MIDNIGHT: TimeOfDay = TimeOfDay { seconds: 0, offset: 0 };

/// Reads a window. `None` if it never opens, which is a mistake unless it is an empty object.
pub(super) fn window(value: &Value, place: &str, mistakes: &mut Mistakes) -> Option<Window> {
    let members = Members::of(value, place, &["days", "begin", "end"], mistakes)?;
    if members.is_empty() {
        return None;
    }
    let days = match members.get("days") {
        None => &[],
        Some(days) => list(days, &format!("{place}.days"), MAX_DAYS, mistakes)?,
    };
    if days.is_empty() { once(&members, place, mistakes) } else { weekly(days, &members, place, mistakes) }
}

/// Reads a window between two timestamps.
fn once(members: &Members<'_>, place: &str, mistakes: &mut Mistakes) -> Option<Window> {
    let mut second = |member: &str| {
        let place = format!("{place}.{member}");
        let Some(value) = members.get(member) else {
            mistakes.add(format!("{place} is missing, which a window without days needs"));
            return None;
        };
        let time: Option<Timestamp> = string(value, &place, mistakes)?.parse().ok();
        if time.is_none() {
            mistakes
                .add(format!("{place} is not a time such as 2026-11-28T20:00:00Z, which a window without days needs"));
        }
        time.map(Timestamp::as_second)
    };
    let begin = second("begin");
    let end = second("end");
    Some(Window::Once { begin: begin?, end: end? })
}

/// Reads a window of each week.
fn weekly(entries: &[Value], members: &Members<'_>, place: &str, mistakes: &mut Mistakes) -> Option<Window> {
    let mut days = [false; DAYS.len()];
    for (index, entry) in entries.iter().enumerate() {
        if let Some(day) = day(entry, &format!("{place}.days[{index}]"), mistakes) {
            days[day] = true;
        }
    }
    let mut time = |member: &str| {
        let place = format!("{place}.{member}");
        match members.get(member) {
            Some(value) => time(value, &place, mistakes),
            // The unknown member may be this time, misspelt: from midnight on, the window would open too early.
            None if members.has_unknown => {
                mistakes.add(format!("{place} is missing"));
                None
            }
            None => {
                mistakes.add(format!("{place} is missing, which means midnight in UTC"));
                Some(MIDNIGHT)
            }
        }
    };
    let begin = time("begin");
    let end = time("end");
    let begin = begin?;
    let end = end?;
    // An end that is not after the begin is on the next day.
    let length = (end.seconds - end.offset - begin.seconds + begin.offset - 1).rem_euclid(DAY) + 1;
    Some(Window::Weekly { days, begin, length })
}

/// Reads a day. As for lifecycle-manager, other spellings name no day.
fn day(value: &Value, place: &str, mistakes: &mut Mistakes) -> Option<usize> {
    let name = string(value, place, mistakes)?;
    let day = DAYS.iter().position(|day| *day == name);
    if day.is_none() {
        mistakes.add(format!("{place} is {}, not one of Mon, Tue, Wed, Thu, Fri, Sat, Sun", quoted(name)));
    }
    day
}

/// Reads a time of a weekly window, whose date has no effect.
fn time(value: &Value, place: &str, mistakes: &mut Mistakes) -> Option<TimeOfDay> {
    let text = string(value, place, mistakes)?;
    let dated = text.split_once('T').filter(|_| text.parse::<Timestamp>().is_ok());
    if let Some(time) = dated.and_then(|(_, time)| time_of_day(time)) {
        mistakes.add(format!("{place} has a date, which has no effect in a window with days"));
        return Some(time);
    }
    let time = time_of_day(text);
    if time.is_none() {
        mistakes
            .add(format!("{place} is not a time such as 20:00:00Z or 20:00:00+02:00, which a window with days needs"));
    }
    time
}

/// Reads `hh:mm:ss`, followed by `Z`, `+hh:mm` or `-hh:mm`. As for lifecycle-manager, the hour may have one digit, and a
/// fraction of the second has no effect.
fn time_of_day(text: &str) -> Option<TimeOfDay> {
    let (time, zone) = text.split_at_checked(text.find(['Z', '+', '-'])?)?;
    let (time, fraction) = time.split_once(['.', ',']).unwrap_or((time, "0"));
    if fraction.is_empty() || !is_digits(fraction) {
        return None;
    }
    let offset = match zone.split_at_checked(1)? {
        ("Z", "") => 0,
        ("+", rest) => numbers(rest, &[24, 60], 2)? * 60,
        ("-", rest) => numbers(rest, &[24, 60], 2)? * -60,
        _ => return None,
    };
    Some(TimeOfDay { seconds: numbers(time, &[24, 60, 60], 1)?, offset })
}

/// Reads numbers of two digits below their limits, with colons between them, as one sum of their smallest unit. The first
/// number has at least `first_digits` digits.
fn numbers(text: &str, limits: &[i64], first_digits: usize) -> Option<i64> {
    let mut parts = text.split(':');
    let mut sum = 0;
    for (index, limit) in limits.iter().enumerate() {
        let part = parts.next()?;
        let least = if index == 0 { first_digits } else { 2 };
        let has_form = (least..=2).contains(&part.len()) && is_digits(part);
        let number = part.parse().ok().filter(|number: &i64| has_form && number < limit)?;
        sum = sum * 60 + number;
    }
    parts.next().is_none().then_some(sum)
}

fn is_digits(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}
