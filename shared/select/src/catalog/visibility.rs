//! Visibility rules of modules, the same as lifecycle-manager's. Pure.
//!
//! The visibility of a module to a Kyma depends on three properties only, the Kyma's *visibility class*: the label
//! `beta`, the label `internal`, and the restricted modules that select it by its labels. Mandatory modules are in no
//! catalog.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::Serialize;
use tidewatch_api::{ModuleReleaseMeta, ModuleTemplate, labels::is_true, names::label};

use super::selector::Selector;

/// Properties of a Kyma that determine its catalog.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct VisibilityClass {
    /// The label `beta` is `true`.
    pub beta: bool,
    /// The label `internal` is `true`.
    pub internal: bool,
    /// Restricted modules with a `kymaSelector` that matches the Kyma's labels.
    pub restricted: BTreeSet<String>,
}

/// Kymas that a release meta admits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// All Kymas.
    All,
    /// Kymas with matching labels; the module is restricted.
    Selected(Selector),
    /// No Kyma, by this rule.
    Excluded(HidingRule),
}

/// Rule that hides a module, a channel or a version. The first matching rule decides. The name is the value of the JSON
/// field `rule`, the text that of `reason`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum HidingRule {
    /// The module is mandatory: every runtime has it, so no Kyma selects it.
    #[error("it is mandatory: every runtime has it, so it is in no catalog")]
    Mandatory,
    /// Visible only to Kymas with the label `beta`.
    #[error("only Kymas with the label operator.kyma-project.io/beta=true see it")]
    Beta,
    /// Visible only to Kymas with the label `internal`.
    #[error("only Kymas with the label operator.kyma-project.io/internal=true see it")]
    Internal,
    /// The module is restricted, and its release meta has no `kymaSelector` or an empty one.
    #[strum(serialize = "restricted-no-selector")]
    #[error("the module is restricted and its kymaSelector selects no Kyma")]
    RestrictedWithoutSelector,
    /// The module is restricted, and its `kymaSelector` does not match the Kyma's labels.
    #[error("the module is restricted and its kymaSelector does not match the Kyma's labels")]
    RestrictedNotMatching,
    /// The module is restricted, and its `kymaSelector` is malformed, with the reason.
    #[error("the module is restricted and its kymaSelector cannot be read: {0}")]
    MalformedSelector(String),
    /// The release meta has a `kymaSelector` although the module is not restricted.
    #[error("it has a kymaSelector but is not in the list of restricted modules")]
    SelectorWithoutRestriction,
    /// The release meta has no channel.
    #[error("its release meta names no channel")]
    NoChannel,
    /// The version has no template.
    #[error("no template stands for the version")]
    NoTemplate,
    /// All channels are hidden, by different rules.
    #[error("none of its channels may be seen")]
    NoVisibleChannel,
    /// The module has templates, but no valid release meta.
    #[error("its module has no release meta, or one with a mistake in it")]
    NoReleaseMeta,
}

impl VisibilityClass {
    /// Computes the class of a Kyma from its labels and the admissions of all modules.
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

    /// Rule that hides a template from this class, if any: mandatory, or beta or internal and the Kyma has no such label.
    pub fn hidden_template_rule(&self, template: &ModuleTemplate) -> Option<HidingRule> {
        let labels = template.metadata.labels.as_ref();
        if template.spec.is_mandatory() {
            return Some(HidingRule::Mandatory);
        }
        if !self.beta && is_true(labels, label::BETA) {
            return Some(HidingRule::Beta);
        }
        (!self.internal && is_true(labels, label::INTERNAL)).then_some(HidingRule::Internal)
    }

    /// Rule that hides a module with this admission, independent of its templates.
    pub fn exclusion_rule(&self, module: &str, admission: &Admission) -> Option<HidingRule> {
        match admission {
            Admission::All => None,
            Admission::Selected(_) if self.restricted.contains(module) => None,
            Admission::Selected(_) => Some(HidingRule::RestrictedNotMatching),
            Admission::Excluded(rule) => Some(rule.clone()),
        }
    }
}

impl fmt::Display for VisibilityClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flags = [(self.beta, "beta"), (self.internal, "internal")];
        let mut words: Vec<_> = flags.into_iter().filter(|(set, _)| *set).map(|(_, word)| word.to_owned()).collect();
        words.extend(self.restricted.iter().map(|module| format!("selected for {module}")));
        f.write_str(&if words.is_empty() { "plain".to_owned() } else { words.join(", ") })
    }
}

impl Admission {
    /// Computes the admission of a release meta; `restricted` are the modules of `--restricted-default-modules`. An
    /// absent or empty selector of a restricted module selects no Kyma.
    pub fn of(meta: &ModuleReleaseMeta, restricted: &BTreeSet<String>) -> Self {
        if meta.spec.mandatory.is_some() {
            return Self::Excluded(HidingRule::Mandatory);
        }
        match (&meta.spec.kyma_selector, restricted.contains(&meta.spec.module_name)) {
            (None, false) => Self::All,
            (Some(_), false) => Self::Excluded(HidingRule::SelectorWithoutRestriction),
            (None, true) => Self::Excluded(HidingRule::RestrictedWithoutSelector),
            (Some(selector), true) => match Selector::parse(selector) {
                Ok(selector) if selector.is_empty() => Self::Excluded(HidingRule::RestrictedWithoutSelector),
                Ok(selector) => Self::Selected(selector),
                Err(error) => Self::Excluded(HidingRule::MalformedSelector(error.to_string())),
            },
        }
    }
}

/// Modules that a comma-separated list names, as `--restricted-default-modules` does; spaces around a name do not count.
pub fn restricted_modules<T: AsRef<str>>(names: impl IntoIterator<Item = T>) -> BTreeSet<String> {
    let names = names.into_iter().map(|name| name.as_ref().trim().to_owned());
    names.filter(|name| !name.is_empty()).collect()
}

/// Name of the template of a module's version, to which channels resolve.
pub fn template_name(module: &str, version: &str) -> String {
    format!("{module}-{version}")
}

/// Resolves the channels of a release meta, each to the name of its template or to the rule that hides it. A channel is
/// visible if a template of that conventional name exists and is visible.
pub fn channels<'a, T: AsRef<ModuleTemplate>>(
    class: &VisibilityClass,
    meta: &'a ModuleReleaseMeta,
    templates: impl Fn(&str) -> Option<T>,
) -> BTreeMap<&'a str, Result<String, HidingRule>> {
    let channels = meta.spec.channels().iter().map(|entry| {
        let name = template_name(&meta.spec.module_name, &entry.version);
        let hidden = match templates(&name) {
            Some(template) => class.hidden_template_rule(template.as_ref()),
            None => Some(HidingRule::NoTemplate),
        };
        (entry.channel.as_str(), hidden.map_or(Ok(name), Err))
    });
    channels.collect()
}

/// Rule that hides a module because all its channels are hidden; `None` if one is visible.
pub fn module_rule(channels: &BTreeMap<&str, Result<String, HidingRule>>) -> Option<HidingRule> {
    let mut rules = channels.values().map(|channel| channel.as_ref().err());
    let Some(first) = rules.next() else { return Some(HidingRule::NoChannel) };
    let first = first?;
    let mut same = true;
    for rule in rules {
        same &= rule? == first;
    }
    Some(if same { first.clone() } else { HidingRule::NoVisibleChannel })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};
    use tidewatch_kit::variant::VariantName as _;

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

    fn class(beta: bool, internal: bool) -> VisibilityClass {
        VisibilityClass { beta, internal, restricted: BTreeSet::new() }
    }

    /// `acceptance.md` C2 36: the 16 combinations.
    #[test]
    fn beta_and_internal_templates_need_a_matching_label() {
        for bits in 0..16_u8 {
            let [beta, internal, kyma_beta, kyma_internal] = [1, 2, 4, 8].map(|bit| bits & bit != 0);
            let text = |set| if set { "True" } else { "false" };
            let of_template = labels(&[(label::BETA, text(beta)), (label::INTERNAL, text(internal))]);
            let of_kyma = labels(&[(label::BETA, text(kyma_beta)), (label::INTERNAL, text(kyma_internal))]);
            let class = VisibilityClass::of(&of_kyma, []);
            assert_eq!(class, super::tests::class(kyma_beta, kyma_internal));
            let seen = (!beta || kyma_beta) && (!internal || kyma_internal);
            let sees = |mandatory| class.hidden_template_rule(&template("t", &of_template, mandatory)).is_none();
            assert_eq!(sees(false), seen, "{bits:04b}");
            assert!(!sees(true), "mandatory {bits:04b}");
        }
    }

    #[test]
    fn spaces_in_the_list_of_restricted_modules_do_not_count() {
        // A name that does not match would leave its module open to all Kymas.
        assert_eq!(restricted_modules(["a", " b", "c ", "", " "]), ["a", "b", "c"].map(str::to_owned).into());
        assert_eq!(restricted_modules([""]), BTreeSet::new());
    }

    /// `acceptance.md` C1 27.
    #[test]
    fn restricted_modules_are_admitted_only_by_their_selector() {
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
            let class = VisibilityClass::of(&matching, [("m", &admission)]);
            assert_eq!(
                class.exclusion_rule("m", &admission).is_none(),
                admitted,
                "restricted {is_restricted}: {:?}",
                meta.spec.kyma_selector
            );
        }
    }

    #[test]
    fn hidden_channels_report_their_rule() {
        let beta = labels(&[(label::BETA, "true")]);
        let internal = labels(&[(label::INTERNAL, "TRUE")]);
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
        let results = |class: &VisibilityClass, meta: &ModuleReleaseMeta| -> Vec<(String, String)> {
            let result =
                |channel: Result<String, HidingRule>| channel.unwrap_or_else(|hidden| hidden.as_str().to_owned());
            channels(class, meta, found).into_iter().map(|(name, channel)| (name.to_owned(), result(channel))).collect()
        };
        let expect = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs.iter().map(|(channel, result)| ((*channel).to_owned(), (*result).to_owned())).collect()
        };
        let rest = [("next", "no-template"), ("rapid", "mandatory"), ("regular", "m-1.0.0")];
        let plain = [&[("dev", "internal"), ("fast", "beta")][..], &rest[..]].concat();
        assert_eq!(results(&class(false, false), &all), expect(&plain));
        let whole = [&[("dev", "m-5.0.0"), ("fast", "m-2.0.0")][..], &rest[..]].concat();
        assert_eq!(results(&class(true, true), &all), expect(&whole));

        let hidden = |entries: &[(&str, &str)]| {
            let meta = meta(entries);
            module_rule(&channels(&class(false, false), &meta, found)).map(|hidden| hidden.as_str())
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
    fn excluded_modules_report_their_rule() {
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
            let class = VisibilityClass::of(&labels(&[("team", "a")]), [("m", &admission)]);
            let hidden = class.exclusion_rule("m", &admission);
            assert_eq!(hidden.as_ref().map(HidingRule::as_str), rule, "restricted {is_restricted}: {spec}");
        }
    }
}
