//! Who sees which module: the incumbent's rule, as pure functions.
//!
//! Visibility depends on three things of a Kyma only, its *class*: whether it is beta, whether it is internal, and which
//! restricted modules select it by its labels. Mandatory modules are in nobody's catalog.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use tidewatch_shared::{
    api::{ModuleReleaseMeta, ModuleTemplate},
    names::label,
};

use super::selector::{MalformedSelector, Selector};
use crate::base::labels::is_true;

/// What of a Kyma decides on its catalog.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Class {
    /// Label `beta` is `true`.
    pub beta: bool,
    /// Label `internal` is `true`.
    pub internal: bool,
    /// Restricted modules whose `kymaSelector` matches the Kyma's labels.
    pub restricted: BTreeSet<String>,
}

/// Whom a release meta admits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Every Kyma.
    Everyone,
    /// The Kymas whose labels match; the module is restricted.
    Selected(Selector),
    /// Nobody, and why.
    Nobody(Exclusion),
}

/// The rule that hides a module, one of its channels or one of its versions. The first that applies decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hidden {
    /// Every runtime has it, so nobody selects it.
    Mandatory,
    /// Only Kymas with the label `beta` see it.
    Beta,
    /// Only Kymas with the label `internal` see it.
    Internal,
    /// The module is restricted, and its release meta has no `kymaSelector` or an empty one.
    RestrictedWithoutSelector,
    /// The module is restricted, and its `kymaSelector` does not match the Kyma's labels.
    RestrictedNotMatching,
    /// The module is restricted, and its `kymaSelector` cannot be read; why.
    MalformedSelector(String),
    /// It has a `kymaSelector` although it is not restricted.
    SelectorWithoutRestriction,
    /// Its release meta names no channel.
    NoChannel,
    /// No template stands for the version.
    NoTemplate,
    /// Of its channels none may be seen, for several reasons.
    NoVisibleChannel,
}

impl Hidden {
    /// One word of a closed set.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Mandatory => "mandatory",
            Self::Beta => "beta",
            Self::Internal => "internal",
            Self::RestrictedWithoutSelector => "restricted-no-selector",
            Self::RestrictedNotMatching => "restricted-not-matching",
            Self::MalformedSelector(_) => "malformed-selector",
            Self::SelectorWithoutRestriction => "selector-without-restriction",
            Self::NoChannel => "no-channel",
            Self::NoTemplate => "no-template",
            Self::NoVisibleChannel => "no-visible-channel",
        }
    }
}

impl fmt::Display for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mandatory => f.write_str("it is mandatory: every runtime has it, so it is in no catalog"),
            Self::Beta => f.write_str("only Kymas with the label operator.kyma-project.io/beta=true see it"),
            Self::Internal => f.write_str("only Kymas with the label operator.kyma-project.io/internal=true see it"),
            Self::RestrictedWithoutSelector => {
                f.write_str("the module is restricted and its kymaSelector selects nobody")
            }
            Self::RestrictedNotMatching => {
                f.write_str("the module is restricted and its kymaSelector does not match the Kyma's labels")
            }
            Self::MalformedSelector(why) => {
                write!(f, "the module is restricted and its kymaSelector cannot be read: {why}")
            }
            Self::SelectorWithoutRestriction => {
                f.write_str("it has a kymaSelector but is not in the list of restricted modules")
            }
            Self::NoChannel => f.write_str("its release meta names no channel"),
            Self::NoTemplate => f.write_str("no template stands for the version"),
            Self::NoVisibleChannel => f.write_str("none of its channels may be seen"),
        }
    }
}

/// Why a release meta admits nobody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exclusion {
    /// Its module is mandatory.
    Mandatory,
    /// Its module is restricted and it selects no Kyma.
    SelectsNobody,
    /// Its module is restricted and its selector cannot be read.
    Malformed(String),
    /// It has a selector although its module is not restricted.
    NotRestricted,
}

impl Class {
    /// The class of a Kyma with these labels, given the admissions of all modules.
    pub fn of<'a>(
        labels: &BTreeMap<String, String>,
        admissions: impl IntoIterator<Item = (&'a str, &'a Admission)>,
    ) -> Self {
        let selected = |admission: &Admission| matches!(admission, Admission::Selected(by) if by.matches(labels));
        let restricted = admissions.into_iter().filter(|(_, admission)| selected(admission));
        Self {
            beta: is_true(Some(labels), label::BETA),
            internal: is_true(Some(labels), label::INTERNAL),
            restricted: restricted.map(|(module, _)| module.to_owned()).collect(),
        }
    }

    /// Whether a template may be seen: not mandatory, and beta or internal only to those who are.
    #[must_use]
    pub fn sees_template(&self, template: &ModuleTemplate) -> bool {
        self.hides_template(template).is_none()
    }

    /// The rule that hides a template from this class.
    #[must_use]
    pub fn hides_template(&self, template: &ModuleTemplate) -> Option<Hidden> {
        let labels = template.metadata.labels.as_ref();
        if template.spec.is_mandatory() {
            return Some(Hidden::Mandatory);
        }
        if !self.beta && is_true(labels, label::BETA) {
            return Some(Hidden::Beta);
        }
        (!self.internal && is_true(labels, label::INTERNAL)).then_some(Hidden::Internal)
    }

    /// Whether a module with this admission may be seen.
    #[must_use]
    pub fn admits(&self, module: &str, admission: &Admission) -> bool {
        self.excludes(module, admission).is_none()
    }

    /// The rule by which a module with this admission is hidden whatever its templates are.
    #[must_use]
    pub fn excludes(&self, module: &str, admission: &Admission) -> Option<Hidden> {
        match admission {
            Admission::Everyone => None,
            Admission::Selected(_) if self.restricted.contains(module) => None,
            Admission::Selected(_) => Some(Hidden::RestrictedNotMatching),
            Admission::Nobody(why) => Some(match why {
                Exclusion::Mandatory => Hidden::Mandatory,
                Exclusion::SelectsNobody => Hidden::RestrictedWithoutSelector,
                Exclusion::Malformed(why) => Hidden::MalformedSelector(why.clone()),
                Exclusion::NotRestricted => Hidden::SelectorWithoutRestriction,
            }),
        }
    }
}

impl Admission {
    /// Whom this release meta admits; `restricted` are the modules of `--restricted-default-modules`. A selector that is
    /// absent or empty selects nobody.
    #[must_use]
    pub fn of(meta: &ModuleReleaseMeta, restricted: &BTreeSet<String>) -> Self {
        if meta.spec.mandatory.is_some() {
            return Self::Nobody(Exclusion::Mandatory);
        }
        match (&meta.spec.kyma_selector, restricted.contains(&meta.spec.module_name)) {
            (None, false) => Self::Everyone,
            (Some(_), false) => Self::Nobody(Exclusion::NotRestricted),
            (None, true) => Self::Nobody(Exclusion::SelectsNobody),
            (Some(selector), true) => match Selector::parse(selector) {
                Ok(selector) if selector.is_empty() => Self::Nobody(Exclusion::SelectsNobody),
                Ok(selector) => Self::Selected(selector),
                Err(error) => Self::malformed(&error),
            },
        }
    }

    fn malformed(error: &MalformedSelector) -> Self {
        Self::Nobody(Exclusion::Malformed(error.to_string()))
    }
}

/// The name that a template of this module and version has: what channels resolve to.
#[must_use]
pub fn template_name(module: &str, version: &str) -> String {
    format!("{module}-{version}")
}

/// The channels of a release meta, each with the name of its template, or with the rule that hides it. A channel is seen if
/// its template exists under its conventional name and may be seen.
#[must_use]
pub fn channels<'a, T: AsRef<ModuleTemplate>>(
    class: &Class,
    meta: &'a ModuleReleaseMeta,
    templates: impl Fn(&str) -> Option<T>,
) -> BTreeMap<&'a str, Result<String, Hidden>> {
    let channels = meta.spec.channels().iter().map(|entry| {
        let name = template_name(&meta.spec.module_name, &entry.version);
        let hidden = match templates(&name) {
            Some(template) => class.hides_template(template.as_ref()),
            None => Some(Hidden::NoTemplate),
        };
        (entry.channel.as_str(), hidden.map_or(Ok(name), Err))
    });
    channels.collect()
}

/// The rule that hides a module all of whose channels are hidden; `None` if one is seen.
#[must_use]
pub fn hides_all(channels: &BTreeMap<&str, Result<String, Hidden>>) -> Option<Hidden> {
    let mut rules = channels.values().map(|channel| channel.as_ref().err());
    let Some(first) = rules.next() else { return Some(Hidden::NoChannel) };
    let first = first?;
    let mut same = true;
    for rule in rules {
        same &= rule? == first;
    }
    Some(if same { first.clone() } else { Hidden::NoVisibleChannel })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn template(name: &str, labels: &BTreeMap<String, String>, mandatory: bool) -> ModuleTemplate {
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
            "metadata": {"name": name, "labels": labels}, "spec": {"descriptor": {}, "mandatory": mandatory}}))
        .unwrap()
    }

    fn meta(spec: Value) -> ModuleReleaseMeta {
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"name": "m"}, "spec": spec}))
        .unwrap()
    }

    fn class(beta: bool, internal: bool) -> Class {
        Class { beta, internal, restricted: BTreeSet::new() }
    }

    #[test]
    fn beta_and_internal_are_seen_by_those_who_are() {
        for bits in 0..16_u8 {
            let [beta, internal, kyma_beta, kyma_internal] = [1, 2, 4, 8].map(|bit| bits & bit != 0);
            let text = |set| if set { "True" } else { "false" };
            let of_template = labels(&[(label::BETA, text(beta)), (label::INTERNAL, text(internal))]);
            let of_kyma = labels(&[(label::BETA, text(kyma_beta)), (label::INTERNAL, text(kyma_internal))]);
            let class = Class::of(&of_kyma, []);
            assert_eq!(class, super::tests::class(kyma_beta, kyma_internal));
            let seen = (!beta || kyma_beta) && (!internal || kyma_internal);
            assert_eq!(class.sees_template(&template("t", &of_template, false)), seen, "{bits:04b}");
            assert!(!class.sees_template(&template("t", &of_template, true)), "mandatory {bits:04b}");
        }
    }

    #[test]
    fn restricted_modules_are_admitted_by_their_selector_only() {
        let restricted = BTreeSet::from(["m".to_owned()]);
        let selector = |selector: Value| meta(json!({"moduleName": "m", "channels": [], "kymaSelector": selector}));
        let plain = meta(json!({"moduleName": "m", "channels": []}));
        let matching = labels(&[("team", "a")]);
        for (meta, is_restricted, admitted) in [
            (plain.clone(), false, true),
            (plain, true, false),
            (selector(json!({})), true, false),
            (selector(json!({})), false, false),
            (selector(json!({"matchLabels": {"team": "a"}})), true, true),
            (selector(json!({"matchLabels": {"team": "a"}})), false, false),
            (selector(json!({"matchLabels": {"team": "b"}})), true, false),
            (
                selector(json!({"matchExpressions": [{"key": "team", "operator": "In", "values": ["a", "b"]}]})),
                true,
                true,
            ),
            (selector(json!({"matchExpressions": [{"key": "team", "operator": "Exists"}]})), true, true),
            (selector(json!({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]})), true, false),
            (
                selector(json!({"matchExpressions": [{"key": "team", "operator": "Like", "values": ["a"]}]})),
                true,
                false,
            ),
            (super::tests::meta(json!({"moduleName": "m", "mandatory": {"version": "1.0.0"}})), false, false),
        ] {
            let admission = Admission::of(&meta, if is_restricted { &restricted } else { const { &BTreeSet::new() } });
            let class = Class::of(&matching, [("m", &admission)]);
            assert_eq!(
                class.admits("m", &admission),
                admitted,
                "restricted {is_restricted}: {:?}",
                meta.spec.kyma_selector
            );
        }
    }

    #[test]
    fn only_channels_whose_template_is_seen_remain_and_the_others_say_why() {
        let (beta, internal) = (labels(&[(label::BETA, "true")]), labels(&[(label::INTERNAL, "TRUE")]));
        let templates: BTreeMap<_, _> = [
            template("m-1.0.0", &BTreeMap::new(), false),
            template("m-2.0.0", &beta, false),
            template("m-3.0.0", &BTreeMap::new(), true),
            template("m-5.0.0", &internal, false),
        ]
        .map(|template| (template.metadata.name.clone().unwrap(), Arc::new(template)))
        .into();
        let meta = |entries: &[(&str, &str)]| {
            let entries: Vec<_> =
                entries.iter().map(|(channel, version)| json!({"channel": channel, "version": version})).collect();
            meta(json!({"moduleName": "m", "channels": entries}))
        };
        let all =
            meta(&[("regular", "1.0.0"), ("fast", "2.0.0"), ("rapid", "3.0.0"), ("next", "4.0.0"), ("dev", "5.0.0")]);
        let found = |name: &str| templates.get(name).cloned();
        let said = |class: &Class, meta: &ModuleReleaseMeta| -> Vec<(String, String)> {
            let said = |channel: Result<String, Hidden>| channel.unwrap_or_else(|hidden| hidden.as_str().to_owned());
            channels(class, meta, found).into_iter().map(|(name, channel)| (name.to_owned(), said(channel))).collect()
        };
        let expect = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs.iter().map(|(channel, said)| ((*channel).to_owned(), (*said).to_owned())).collect()
        };
        let rest = [("next", "no-template"), ("rapid", "mandatory"), ("regular", "m-1.0.0")];
        let plain = [&[("dev", "internal"), ("fast", "beta")][..], &rest[..]].concat();
        assert_eq!(said(&class(false, false), &all), expect(&plain));
        let whole = [&[("dev", "m-5.0.0"), ("fast", "m-2.0.0")][..], &rest[..]].concat();
        assert_eq!(said(&class(true, true), &all), expect(&whole));

        let hidden = |entries: &[(&str, &str)]| {
            let meta = meta(entries);
            hides_all(&channels(&class(false, false), &meta, found)).map(|hidden| hidden.as_str())
        };
        assert_eq!(hidden(&[("regular", "1.0.0"), ("fast", "2.0.0")]), None);
        assert_eq!(hidden(&[("fast", "2.0.0"), ("regular", "1.0.0")]), None);
        assert_eq!(hidden(&[("fast", "2.0.0"), ("rapid", "2.0.0")]), Some("beta"));
        assert_eq!(hidden(&[("fast", "5.0.0")]), Some("internal"));
        assert_eq!(hidden(&[("fast", "4.0.0"), ("rapid", "4.1.0")]), Some("no-template"));
        assert_eq!(hidden(&[("fast", "2.0.0"), ("rapid", "4.0.0")]), Some("no-visible-channel"));
        assert_eq!(hidden(&[]), Some("no-channel"));
    }

    #[test]
    fn each_excluded_module_has_its_rule() {
        let restricted = BTreeSet::from(["m".to_owned()]);
        let selector = |selector: Value| json!({"moduleName": "m", "channels": [], "kymaSelector": selector});
        let bad = json!({"matchExpressions": [{"key": "team", "operator": "Like", "values": ["a"]}]});
        for (spec, is_restricted, rule) in [
            (json!({"moduleName": "m", "channels": []}), false, None),
            (json!({"moduleName": "m", "mandatory": {"version": "1.0.0"}}), false, Some("mandatory")),
            (json!({"moduleName": "m", "mandatory": {"version": "1.0.0"}}), true, Some("mandatory")),
            (json!({"moduleName": "m", "channels": []}), true, Some("restricted-no-selector")),
            (selector(json!({})), true, Some("restricted-no-selector")),
            (selector(json!({"matchLabels": {"team": "a"}})), true, None),
            (selector(json!({"matchLabels": {"team": "b"}})), true, Some("restricted-not-matching")),
            (selector(bad.clone()), true, Some("malformed-selector")),
            (selector(bad), false, Some("selector-without-restriction")),
        ] {
            let meta = meta(spec.clone());
            let admission = Admission::of(&meta, if is_restricted { &restricted } else { const { &BTreeSet::new() } });
            let class = Class::of(&labels(&[("team", "a")]), [("m", &admission)]);
            let hidden = class.excludes("m", &admission);
            assert_eq!(hidden.as_ref().map(Hidden::as_str), rule, "restricted {is_restricted}: {spec}");
        }
    }
}
