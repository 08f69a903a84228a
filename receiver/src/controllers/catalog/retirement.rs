//! Retirement of versions on the days that a release meta names. Pure: the current day is an argument.
//!
//! Days begin at midnight UTC. An entry without a date, or with one that is no date, takes effect at once: the API
//! server refuses such a date, and an entry that is there is meant.

use std::time::Duration;

use jiff::{Timestamp, civil::Date, tz::TimeZone};
use tidewatch_shared::api::{ModuleReleaseMeta, ModuleVersion};

/// Retirement of a version as its users see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Notice {
    /// The version is deprecated today; false if that is announced for a later day.
    pub(crate) is_in_force: bool,
    /// Explanation, without a full stop.
    pub(crate) text: String,
}

/// The day of a time, UTC.
pub(crate) fn day(time: Timestamp) -> Date {
    time.to_zoned(TimeZone::UTC).date()
}

/// Time until a day begins; zero if it has begun.
pub(crate) fn until(day: Date, now: Timestamp) -> Duration {
    let begin = day.to_zoned(TimeZone::UTC).map_or(now, |begin| begin.timestamp());
    Duration::try_from(begin.duration_since(now)).unwrap_or_default()
}

/// Notice to the users of a version; `None` if it is not retired.
pub(crate) fn notice(meta: &ModuleReleaseMeta, version: &str, today: Date) -> Option<Notice> {
    let subject = format!("version {version} of module {}", meta.spec.module_name);
    deprecation(entry(meta, version)?, &subject, today)
}

/// First day after today on which the notice of a version changes.
pub(crate) fn next_day(meta: &ModuleReleaseMeta, version: &str, today: Date) -> Option<Date> {
    given(&entry(meta, version)?.deprecation_date).and_then(parse_date).filter(|day| *day > today)
}

fn deprecation(entry: &ModuleVersion, subject: &str, today: Date) -> Option<Notice> {
    let (date, message) = (given(&entry.deprecation_date), given(&entry.deprecation_message));
    (date.is_some() || message.is_some()).then(|| text(subject, "deprecated", date, today, message))
}

fn text(subject: &str, state: &str, date: Option<&str>, today: Date, message: Option<&str>) -> Notice {
    let is_in_force = date.and_then(parse_date).is_none_or(|day| day <= today);
    let when = match date {
        Some(date) if is_in_force => format!("is {state} as of {date}"),
        Some(date) => format!("will be {state} on {date}"),
        None => format!("is {state}"),
    };
    let message = message.map_or_else(String::new, |message| format!(": {message}"));
    Notice { is_in_force, text: format!("{subject} {when}{message}") }
}

fn entry<'a>(meta: &'a ModuleReleaseMeta, version: &str) -> Option<&'a ModuleVersion> {
    meta.spec.versions().iter().find(|entry| entry.version == version)
}

fn given(text: &Option<String>) -> Option<&str> {
    text.as_deref().filter(|text| !text.is_empty())
}

/// Parses a `full-date` of RFC 3339.
pub(super) fn parse_date(text: &str) -> Option<Date> {
    text.parse().ok().filter(|date: &Date| date.to_string() == text)
}

#[cfg(test)]
mod tests {
    use jiff::civil::date;
    use serde_json::{Value, json};

    use super::*;

    const TODAY: Date = date(2026, 6, 1);

    fn meta(entry: Value) -> ModuleReleaseMeta {
        let mut versions = json!([{"version": "0.9.0"}, {"version": "1.0.0"}]);
        for (key, value) in entry.as_object().unwrap() {
            versions[1][key] = value.clone();
        }
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"name": "keda"}, "spec": {"moduleName": "keda", "channels": [], "versions": versions}}))
        .unwrap()
    }

    #[test]
    fn deprecation_is_announced_before_its_day_and_in_force_from_then_on() {
        let of = |date: &str| {
            let meta = meta(json!({"deprecationDate": date, "deprecationMessage": "use 2.0.0"}));
            let notice = notice(&meta, "1.0.0", TODAY).unwrap();
            (notice.is_in_force, notice.text, next_day(&meta, "1.0.0", TODAY).map(|day| day.to_string()))
        };
        let text = |text: &str| format!("version 1.0.0 of module keda {text}: use 2.0.0");
        let announced = (false, text("will be deprecated on 2026-06-02"), Some("2026-06-02".to_owned()));
        assert_eq!(of("2026-06-02"), announced);
        for date in ["2026-06-01", "2026-05-31", "soon", "2026-6-2"] {
            assert_eq!(of(date), (true, text(&format!("is deprecated as of {date}")), None), "{date}");
        }
        assert_eq!(of(""), (true, text("is deprecated"), None));
        let meta = meta(json!({"deprecationMessage": "use 2.0.0"}));
        assert_eq!((notice(&meta, "0.9.0", TODAY), notice(&meta, "2.0.0", TODAY)), (None, None));
    }

    #[test]
    fn a_day_begins_at_midnight_utc() {
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        assert_eq!(day(at("2026-06-02T01:30:00+02:00")), TODAY);
        assert_eq!(until(date(2026, 6, 2), at("2026-06-01T23:59:50Z")), Duration::from_secs(10));
        assert_eq!(until(date(2026, 6, 2), at("2026-06-01T12:00:00Z")), Duration::from_secs(12 * 3_600));
        assert_eq!(until(TODAY, at("2026-06-01T00:00:01Z")), Duration::ZERO);
    }
}
