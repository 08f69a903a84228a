//! Ring rollout by flags, and by annotations of a module's release meta.

use std::{collections::BTreeMap, fmt, str::FromStr, time::Duration};

use clap::Args;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt as _;
use thiserror::Error;
use tidewatch_api::{ModuleReleaseMeta, names::annotation};
use tidewatch_cluster::flags::seconds;
use tidewatch_rollout::{Rings, Rules, Share};

use crate::catalog::selector::{Selector, SelectorError};

/// Value of the annotation of the rings without which a module has none.
const OFF: &str = "off";
/// Longest pause and deadline in seconds.
const MAX_SECONDS: i64 = 2_592_000;
/// Characters of an invalid value in an error.
const MAX_SHOWN: usize = 64;

/// Flags of the ring rollout. Annotations of a release meta take precedence.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Rollout of modules")]
pub struct RolloutFlags {
    /// Shares of the runtimes that get a moved channel or mandatory version of a module, ring after ring: growing
    /// percentages up to 100%, such as 1%,10%,50%,100%; without it all runtimes get it within
    /// --module-upgrade-rollout-max-delay
    #[arg(long, env = "TIDEWATCH_MODULE_ROLLOUT_RINGS")]
    pub module_rollout_rings: Option<Rings>,

    /// Minimum duration of a ring, in seconds
    #[arg(long = "module-rollout-pause-seconds", env = "TIDEWATCH_MODULE_ROLLOUT_PAUSE_SECONDS", default_value = "3600", value_name = "SECONDS", value_parser = seconds(0..=MAX_SECONDS))]
    pub module_rollout_pause: Duration,

    /// Time in seconds after which an upgraded module that is not ready has failed
    #[arg(long = "module-rollout-deadline-seconds", env = "TIDEWATCH_MODULE_ROLLOUT_DEADLINE_SECONDS", default_value = "900", value_name = "SECONDS", value_parser = seconds(1..=MAX_SECONDS))]
    pub module_rollout_deadline: Duration,

    /// Percentage of the runtimes of a rollout that may fail because of it; at least one runtime
    #[arg(long, env = "TIDEWATCH_MODULE_ROLLOUT_MAX_FAILURES", default_value = "2%")]
    pub module_rollout_max_failures: Share,

    /// Labels of the Kymas that get a version before the first ring, KEY=VALUE separated by commas
    #[arg(long, env = "TIDEWATCH_MODULE_ROLLOUT_CANARIES", value_name = "LABELS")]
    pub module_rollout_canaries: Option<FirstRuntimes>,
}

impl Default for RolloutFlags {
    fn default() -> Self {
        Self {
            module_rollout_rings: None,
            module_rollout_pause: Duration::from_secs(3_600),
            module_rollout_deadline: Duration::from_secs(900),
            module_rollout_max_failures: Share::percent(2),
            module_rollout_canaries: None,
        }
    }
}

/// Selector of the runtimes before the first ring, by the labels of their Kymas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstRuntimes(Selector);

/// Failure to parse [`FirstRuntimes`].
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ParseFirstRuntimesError {
    /// Not `KEY=VALUE`, separated by commas.
    #[error("not of the form KEY=VALUE, separated by commas")]
    Form,
    /// A key or value is invalid.
    #[error(transparent)]
    Selector(#[from] SelectorError),
}

impl FromStr for FirstRuntimes {
    type Err = ParseFirstRuntimesError;

    fn from_str(text: &str) -> Result<Self, ParseFirstRuntimesError> {
        let label = |pair: &str| {
            let (key, value) = pair.trim().split_once('=').ok_or(ParseFirstRuntimesError::Form)?;
            Ok::<_, ParseFirstRuntimesError>((key.to_owned(), value.to_owned()))
        };
        let match_labels = Some(text.split(',').map(label).collect::<Result<_, _>>()?);
        Ok(Self(Selector::parse(&LabelSelector { match_labels, match_expressions: None })?))
    }
}

/// Rules of the rollout of one module.
#[derive(Clone, Debug, PartialEq)]
pub struct RolloutPolicy {
    /// Rules of the rings.
    pub rules: Rules,
    first: Option<FirstRuntimes>,
}

/// Failure to read the rules of a rollout from the annotations of a release meta.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("the annotation {annotation} of the ModuleReleaseMeta has the value {value:?}: {cause}")]
pub struct InvalidPolicyError {
    annotation: &'static str,
    value: String,
    cause: String,
}

impl RolloutPolicy {
    /// Returns the rules of a module; `None` without rings.
    ///
    /// # Errors
    /// [`InvalidPolicyError`] of the first invalid annotation.
    pub fn of(meta: &ModuleReleaseMeta, flags: &RolloutFlags) -> Result<Option<Self>, InvalidPolicyError> {
        let off = meta.annotations().get(annotation::ROLLOUT_RINGS).is_some_and(|value| value.trim() == OFF);
        if off {
            return Ok(None);
        }
        let rings = read(meta, annotation::ROLLOUT_RINGS, str::parse::<Rings>)?;
        let Some(rings) = rings.or_else(|| flags.module_rollout_rings.clone()) else { return Ok(None) };
        let time = |name, flag| Ok(read(meta, name, parse_time)?.unwrap_or(flag));
        let max_failures = read(meta, annotation::ROLLOUT_MAX_FAILURES, str::parse::<Share>)?;
        let first = read(meta, annotation::ROLLOUT_CANARIES, str::parse::<FirstRuntimes>)?;
        let deadline = time(annotation::ROLLOUT_DEADLINE, flags.module_rollout_deadline)?;
        let pause = time(annotation::ROLLOUT_PAUSE, flags.module_rollout_pause)?;
        let max_failures = max_failures.unwrap_or(flags.module_rollout_max_failures);
        let rules = Rules { rings, pause, deadline, max_failures };
        Ok(Some(Self { rules, first: first.or_else(|| flags.module_rollout_canaries.clone()) }))
    }

    /// Returns whether a Kyma with these labels gets a version before the first ring.
    pub fn is_first(&self, labels: &BTreeMap<String, String>) -> bool {
        self.first.as_ref().is_some_and(|FirstRuntimes(selector)| selector.matches(labels))
    }
}

/// Parses a time in whole seconds, at most [`MAX_SECONDS`].
fn parse_time(text: &str) -> Result<Duration, String> {
    let number: u64 = text.trim().parse().map_err(|_| "not a number of seconds".to_owned())?;
    let is_valid = number <= MAX_SECONDS.unsigned_abs();
    is_valid.then_some(Duration::from_secs(number)).ok_or_else(|| format!("more than {MAX_SECONDS} seconds"))
}

fn read<T, E: fmt::Display>(
    meta: &ModuleReleaseMeta,
    annotation: &'static str,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<Option<T>, InvalidPolicyError> {
    let Some(text) = meta.annotations().get(annotation) else { return Ok(None) };
    let failure = |error: E| {
        let value = text.chars().take(MAX_SHOWN).collect();
        InvalidPolicyError { annotation, value, cause: error.to_string() }
    };
    parse(text).map(Some).map_err(failure)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn policy(annotations: &[(&str, &str)], flags: &RolloutFlags) -> Result<Option<RolloutPolicy>, String> {
        let annotations: BTreeMap<_, _> = annotations.iter().copied().collect();
        let meta: ModuleReleaseMeta = serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"name": "keda", "annotations": annotations}, "spec": {"moduleName": "keda"}
        }))
        .unwrap();
        RolloutPolicy::of(&meta, flags).map_err(|error| error.to_string())
    }

    fn with_rings() -> RolloutFlags {
        RolloutFlags { module_rollout_rings: Some("5%,100%".parse().unwrap()), ..RolloutFlags::default() }
    }

    #[test]
    fn annotations_take_precedence_over_flags() {
        let flags = with_rings();
        assert_eq!(policy(&[], &RolloutFlags::default()), Ok(None), "off by default");
        assert_eq!(policy(&[(annotation::ROLLOUT_RINGS, "off")], &flags), Ok(None));
        let by_flags = policy(&[], &flags).unwrap().unwrap();
        assert_eq!((by_flags.rules.rings.count(), by_flags.rules.pause), (2, Duration::from_secs(3_600)));
        let all = [
            (annotation::ROLLOUT_RINGS, "1%,10%,100%"),
            (annotation::ROLLOUT_PAUSE, "60"),
            (annotation::ROLLOUT_DEADLINE, "30"),
            (annotation::ROLLOUT_MAX_FAILURES, "1.5%"),
            (annotation::ROLLOUT_CANARIES, "tier=canary, region=eu"),
        ];
        let own = policy(&all, &RolloutFlags::default()).unwrap().unwrap();
        let expected = Rules {
            rings: "1%,10%,100%".parse().unwrap(),
            pause: Duration::from_secs(60),
            deadline: Duration::from_secs(30),
            max_failures: "1.5%".parse().unwrap(),
        };
        assert_eq!(own.rules, expected);
        let labels = |region: &str| [("tier", "canary"), ("region", region)].map(|(k, v)| (k.into(), v.into())).into();
        assert!(own.is_first(&labels("eu")) && !own.is_first(&labels("us")) && !by_flags.is_first(&labels("eu")));
    }

    #[test]
    fn invalid_annotation_is_named_with_its_value() {
        for (name, value, cause) in [
            (annotation::ROLLOUT_RINGS, "10%,1%,100%", "each share must be larger"),
            (annotation::ROLLOUT_RINGS, "", "not a percentage"),
            (annotation::ROLLOUT_PAUSE, "1h", "not a number of seconds"),
            (annotation::ROLLOUT_DEADLINE, "99999999", "more than 2592000 seconds"),
            (annotation::ROLLOUT_MAX_FAILURES, "0%", "not a percentage"),
            (annotation::ROLLOUT_CANARIES, "tier", "not of the form KEY=VALUE"),
            (annotation::ROLLOUT_CANARIES, "a b=c", "is no label key"),
        ] {
            let error = policy(&[(name, value)], &with_rings()).unwrap_err();
            assert!(error.contains(name) && error.contains(&format!("{value:?}")) && error.contains(cause), "{error}");
        }
        let long = "x".repeat(100_000);
        assert!(policy(&[(annotation::ROLLOUT_RINGS, &long)], &with_rings()).unwrap_err().len() < 300);
    }
}
