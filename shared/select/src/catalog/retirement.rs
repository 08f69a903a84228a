//! Retirement of versions on the days that a release meta names. Pure: the current day is an argument.
//!
//! Days begin at midnight UTC. An entry without a date, or with one that is no date, takes effect at once: the API
//! server refuses such a date, and an entry that is there is meant.

use std::time::Duration;

use jiff::{Timestamp, civil::Date, tz::TimeZone};
use tidewatch_api::{ModuleReleaseMeta, ModuleVersion};

/// Retirement of a version as its users see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The version is deprecated or withdrawn today; false if that is announced for a later day.
    pub is_in_force: bool,
    /// Explanation, without a full stop.
    pub text: String,
}

/// The day of a time, UTC.
pub fn day(time: Timestamp) -> Date {
    time.to_zoned(TimeZone::UTC).date()
}

/// Time until a day begins; zero if it has begun.
pub fn until(day: Date, now: Timestamp) -> Duration {
    let begin = day.to_zoned(TimeZone::UTC).map_or(now, |begin| begin.timestamp());
    Duration::try_from(begin.duration_since(now)).unwrap_or_default()
}

/// Notice to the users of a version; `None` if it is not retired. A withdrawal that is in force replaces the deprecation.
pub fn notice(meta: &ModuleReleaseMeta, version: &str, today: Date) -> Option<Notice> {
    let entry = entry(meta, version)?;
    let subject = format!("version {version} of module {}", meta.spec.module_name);
    let notices = [deprecation(entry, &subject, today), withdrawal(entry, &subject, today)];
    match notices {
        [Some(deprecation), Some(withdrawal)] if !withdrawal.is_in_force => {
            Some(Notice { text: format!("{}; {}", deprecation.text, withdrawal.text), ..deprecation })
        }
        [deprecation, withdrawal] => withdrawal.or(deprecation),
    }
}

/// Notice of a version that is withdrawn today; `None` for any other version.
pub fn withdrawn(meta: &ModuleReleaseMeta, version: &str, today: Date) -> Option<String> {
    let subject = format!("version {version} of module {}", meta.spec.module_name);
    let notice = withdrawal(entry(meta, version)?, &subject, today)?;
    notice.is_in_force.then_some(notice.text)
}

/// First day after today on which the notice of a version changes.
pub fn next_day(meta: &ModuleReleaseMeta, version: &str, today: Date) -> Option<Date> {
    let entry = entry(meta, version)?;
    let withdrawal = entry.withdrawal.as_ref().and_then(|withdrawal| given(&withdrawal.date));
    let days = [given(&entry.deprecation_date), withdrawal].into_iter().flatten().filter_map(parse_date);
    days.filter(|day| *day > today).min()
}

fn deprecation(entry: &ModuleVersion, subject: &str, today: Date) -> Option<Notice> {
    let date = given(&entry.deprecation_date);
    let message = given(&entry.deprecation_message);
    (date.is_some() || message.is_some()).then(|| text(subject, "deprecated", date, today, "", message))
}

fn withdrawal(entry: &ModuleVersion, subject: &str, today: Date) -> Option<Notice> {
    let withdrawal = entry.withdrawal.as_ref()?;
    let replacement = given(&withdrawal.replacement);
    let replacement = replacement.map_or_else(String::new, |version| format!(", use version {version}"));
    let date = given(&withdrawal.date);
    let message = given(&withdrawal.message);
    Some(text(subject, "withdrawn", date, today, &replacement, message))
}

fn text(
    subject: &str,
    state: &str,
    date: Option<&str>,
    today: Date,
    replacement: &str,
    message: Option<&str>,
) -> Notice {
    let is_in_force = date.and_then(parse_date).is_none_or(|day| day <= today);
    let when = match date {
        Some(date) if is_in_force => format!("is {state} as of {date}"),
        Some(date) => format!("will be {state} on {date}"),
        None => format!("is {state}"),
    };
    let message = message.map_or_else(String::new, |message| format!(": {message}"));
    Notice { is_in_force, text: format!("{subject} {when}{replacement}{message}") }
}

fn entry<'a>(meta: &'a ModuleReleaseMeta, version: &str) -> Option<&'a ModuleVersion> {
    meta.spec.versions().iter().find(|entry| entry.version == version)
}

fn given(text: &Option<String>) -> Option<&str> {
    text.as_deref().filter(|text| !text.is_empty())
}

/// Parses a `full-date` of RFC 3339.
pub fn parse_date(text: &str) -> Option<Date> {
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
    fn withdrawal_names_its_day_and_the_replacement() {
        let of = |entry: Value| {
            let meta = meta(entry);
            let notice = notice(&meta, "1.0.0", TODAY).unwrap();
            let is_withdrawn = withdrawn(&meta, "1.0.0", TODAY);
            assert!(is_withdrawn.is_none() || is_withdrawn.as_ref() == Some(&notice.text));
            let text = notice.text.replace("version 1.0.0 of module keda ", "");
            (text, notice.is_in_force, is_withdrawn.is_some(), next_day(&meta, "1.0.0", TODAY))
        };
        let whole =
            |date: &str| json!({"withdrawal": {"date": date, "replacement": "2.0.0", "message": "it loses data"}});
        let past = "2026-06-01";
        let later = "2026-06-05";
        let text = "is withdrawn as of 2026-06-01, use version 2.0.0: it loses data".to_owned();
        assert_eq!(of(whole(past)), (text.clone(), true, true, None));
        let announced = "will be withdrawn on 2026-06-05, use version 2.0.0: it loses data".to_owned();
        assert_eq!(of(whole(later)), (announced.clone(), false, false, Some(date(2026, 6, 5))));
        for at_once in [json!({}), json!({"date": ""})] {
            assert_eq!(of(json!({"withdrawal": at_once})), ("is withdrawn".to_owned(), true, true, None));
        }
        let deprecated = |entry: Value, date: &str| {
            let mut both = entry;
            both["deprecationDate"] = json!(date);
            both
        };
        assert_eq!(of(deprecated(whole(past), past)), (text, true, true, None), "the withdrawal says more");
        let both = format!("is deprecated as of 2026-06-01; {announced}");
        assert_eq!(of(deprecated(whole(later), past)), (both, true, false, Some(date(2026, 6, 5))));
        let first = of(deprecated(whole(later), "2026-06-03"));
        assert_eq!((first.1, first.3), (false, Some(date(2026, 6, 3))));
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
