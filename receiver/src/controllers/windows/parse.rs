//! Reads a policy from its file: strict, and bounded in size, rules, windows and memory of the expressions.

use jiff::Timestamp;
use regex::bytes::{Regex, RegexBuilder};
use serde_json::{Map, Value};
use thiserror::Error;

use super::policy::{Attribute, Policy, Rule, TimeOfDay, Window};

/// Maximum size of the file in bytes.
pub(crate) const MAX_BYTES: usize = 256 << 10;
/// Maximum number of rules.
const MAX_RULES: usize = 500;
/// Maximum number of windows of one rule.
const MAX_WINDOWS: usize = 100;
/// Maximum length of an expression in bytes.
const MAX_EXPRESSION: usize = 16 << 10;
/// Memory of a compiled expression in bytes, for each byte of its text and for the whole: so the memory of a policy is bounded
/// by its size, and repetitions cannot multiply it.
const COMPILED: (usize, usize) = (128, 16 << 10);
/// Maximum nesting of an expression.
const MAX_NESTING: u32 = 32;
/// Days of the week, as the format names them.
const DAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
/// Seconds of a day.
const DAY: i64 = 86_400;

/// A mistake in a policy, with its place.
#[derive(Debug, Error)]
pub enum PolicyError {
    /// The file is too large.
    #[error("the file has more than {MAX_BYTES} bytes")]
    TooLarge,
    /// The file is not JSON.
    #[error("the file is not JSON")]
    Json(#[source] serde_json::Error),
    /// A value is of another kind.
    #[error("{place} is not {expected}")]
    Kind {
        /// Path of the value.
        place: String,
        /// Kind that the format requires.
        expected: &'static str,
    },
    /// A member that the format does not have.
    #[error("{place} has the unknown member {member:?}")]
    Unknown {
        /// Path of the object.
        place: String,
        /// Name of the member.
        member: String,
    },
    /// A member that occurs twice, in different case.
    #[error("{place} has the member {member:?} twice")]
    Repeated {
        /// Path of the object.
        place: String,
        /// Name of the member.
        member: String,
    },
    /// A list is too long.
    #[error("{place} has more than {most} entries")]
    TooMany {
        /// Path of the list.
        place: String,
        /// Maximum number of entries.
        most: usize,
    },
    /// An expression is longer than its limit.
    #[error("{0} has more than {MAX_EXPRESSION} bytes")]
    LongExpression(String),
    /// An expression is not valid, or needs too much memory.
    #[error("{place} is not a usable regular expression")]
    Expression {
        /// Path of the expression.
        place: String,
        /// Cause.
        source: regex::Error,
    },
    /// An entry of `days` is not a day of the week.
    #[error("{place} is not one of Mon, Tue, Wed, Thu, Fri, Sat, Sun")]
    Day {
        /// Path of the entry.
        place: String,
    },
    /// A time of a weekly window is not a time of a day with an offset.
    #[error("{place} is not a time such as 20:00:00Z or 20:00:00+02:00, which a window with days needs")]
    TimeOfDay {
        /// Path of the time.
        place: String,
    },
    /// A time of a window without days is not a timestamp.
    #[error("{place} is not a time such as 2026-11-28T20:00:00Z, which a window without days needs")]
    Timestamp {
        /// Path of the time.
        place: String,
    },
}

/// Reads a policy.
pub(super) fn policy(bytes: &[u8]) -> Result<Policy, PolicyError> {
    if bytes.len() > MAX_BYTES {
        return Err(PolicyError::TooLarge);
    }
    let value: Value = serde_json::from_slice(bytes).map_err(PolicyError::Json)?;
    let members = Members::of(&value, "the policy", &["rules", "default"])?;
    let rules = members.get("rules").map_or(Ok(Vec::new()), |rules| list(rules, "rules", MAX_RULES, rule))?;
    let default = members.get("default").map(|default| window(default, "default")).transpose()?;
    Ok(Policy { rules, default })
}

fn rule(value: &Value, place: &str) -> Result<Rule, PolicyError> {
    let members = Members::of(value, place, &["match", "windows"])?;
    let at = |member: &str| format!("{place}.{member}");
    let expressions = members.get("match").map_or(Ok(Vec::new()), |value| expressions(value, &at("match")))?;
    let windows =
        members.get("windows").map_or(Ok(Vec::new()), |value| list(value, &at("windows"), MAX_WINDOWS, window))?;
    Ok(Rule { expressions, windows })
}

fn expressions(value: &Value, place: &str) -> Result<Vec<(Attribute, Regex)>, PolicyError> {
    let names = Attribute::ALL.map(Attribute::member);
    let members = Members::of(value, place, &names)?;
    let mut found = Vec::new();
    for attribute in Attribute::ALL {
        let place = format!("{place}.{}", attribute.member());
        let Some(value) = members.get(attribute.member()) else { continue };
        let text = string(value, &place)?;
        // As the absent expression, the empty one matches nothing.
        if !text.is_empty() {
            found.push((attribute, expression(text, place)?));
        }
    }
    Ok(found)
}

/// Compiles an expression of ASCII classes, as the incumbent's RE2 has them.
fn expression(text: &str, place: String) -> Result<Regex, PolicyError> {
    if text.len() > MAX_EXPRESSION {
        return Err(PolicyError::LongExpression(place));
    }
    let size = COMPILED.0 * text.len() + COMPILED.1;
    let mut builder = RegexBuilder::new(text);
    builder.unicode(false).nest_limit(MAX_NESTING).size_limit(size);
    builder.build().map_err(|source| PolicyError::Expression { place, source })
}

fn window(value: &Value, place: &str) -> Result<Window, PolicyError> {
    let members = Members::of(value, place, &["days", "begin", "end"])?;
    let at = |member: &str| format!("{place}.{member}");
    let days = members.get("days").map_or(Ok(Vec::new()), |days| list(days, &at("days"), DAYS.len(), day))?;
    let text = |member: &str| string(members.get(member).unwrap_or(&Value::Null), &at(member));
    let (begin, end) = (text("begin")?, text("end")?);
    if days.is_empty() {
        let second = |text: &str, member: &str| {
            let time: Result<Timestamp, _> = text.parse();
            time.map(Timestamp::as_second).map_err(|_| PolicyError::Timestamp { place: at(member) })
        };
        return Ok(Window::Once { begin: second(begin, "begin")?, end: second(end, "end")? });
    }
    let time = |text: &str, member: &str| time_of_day(text).ok_or_else(|| PolicyError::TimeOfDay { place: at(member) });
    let (begin, end) = (time(begin, "begin")?, time(end, "end")?);
    // An end that is not after the begin is on the next day.
    let length = (end.seconds - end.offset - begin.seconds + begin.offset - 1).rem_euclid(DAY) + 1;
    let mut on = [false; DAYS.len()];
    days.into_iter().for_each(|day| on[day] = true);
    Ok(Window::Weekly { days: on, begin, length })
}

fn day(value: &Value, place: &str) -> Result<usize, PolicyError> {
    let name = string(value, place)?;
    DAYS.iter().position(|day| *day == name).ok_or_else(|| PolicyError::Day { place: place.to_owned() })
}

/// Reads `hh:mm:ss`, followed by `Z`, `+hh:mm` or `-hh:mm`.
fn time_of_day(text: &str) -> Option<TimeOfDay> {
    let (time, zone) = text.split_at_checked(8)?;
    let numbers = |text: &str, limits: &[i64]| -> Option<i64> {
        let parts: Vec<_> = text.split(':').collect();
        let number = |(part, limit): (&&str, &i64)| {
            let is_number = part.len() == 2 && part.bytes().all(|byte| byte.is_ascii_digit());
            part.parse().ok().filter(|number| is_number && number < limit)
        };
        let found: Vec<i64> = parts.iter().zip(limits).map_while(number).collect();
        let is_whole = parts.len() == limits.len() && found.len() == limits.len();
        is_whole.then(|| found.iter().fold(0, |sum, number| sum * 60 + number))
    };
    let offset = match zone.split_at_checked(1)? {
        ("Z", "") => 0,
        ("+", rest) => numbers(rest, &[24, 60])? * 60,
        ("-", rest) => numbers(rest, &[24, 60])? * -60,
        _ => return None,
    };
    Some(TimeOfDay { seconds: numbers(time, &[24, 60, 60])?, offset })
}

/// Reads the entries of a list; `null` is the empty one.
fn list<T>(
    value: &Value,
    place: &str,
    most: usize,
    entry: impl Fn(&Value, &str) -> Result<T, PolicyError>,
) -> Result<Vec<T>, PolicyError> {
    let Some(entries) = value.as_array() else {
        return Err(PolicyError::Kind { place: place.to_owned(), expected: "a list" });
    };
    if entries.len() > most {
        return Err(PolicyError::TooMany { place: place.to_owned(), most });
    }
    entries.iter().enumerate().map(|(index, value)| entry(value, &format!("{place}[{index}]"))).collect()
}

fn string<'a>(value: &'a Value, place: &str) -> Result<&'a str, PolicyError> {
    value.as_str().ok_or_else(|| PolicyError::Kind { place: place.to_owned(), expected: "a string" })
}

/// Members of an object by the format's names. As for the incumbent, case does not matter, and `null` means absence.
struct Members<'a>(Vec<(&'static str, &'a Value)>);

impl<'a> Members<'a> {
    fn of(value: &'a Value, place: &str, names: &[&'static str]) -> Result<Self, PolicyError> {
        let kind = || PolicyError::Kind { place: place.to_owned(), expected: "an object" };
        let members: &Map<_, _> = value.as_object().ok_or_else(kind)?;
        let mut found = Vec::new();
        for (member, value) in members {
            let (place, member) = (place.to_owned(), member.clone());
            let Some(name) = names.iter().find(|name| name.eq_ignore_ascii_case(&member)) else {
                return Err(PolicyError::Unknown { place, member });
            };
            if found.iter().any(|(known, _)| known == name) {
                return Err(PolicyError::Repeated { place, member });
            }
            found.push((*name, value));
        }
        found.retain(|(_, value)| !value.is_null());
        Ok(Self(found))
    }

    fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }
}

#[cfg(test)]
mod tests;
