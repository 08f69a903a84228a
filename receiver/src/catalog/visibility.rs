//! Who sees which module: the incumbent's rule, as pure functions.
//!
//! Visibility depends on three things of a Kyma only, its *class*: whether it is beta, whether it is internal, and which
//! restricted modules select it by its labels. Mandatory modules are in nobody's catalog.

use std::collections::{BTreeMap, BTreeSet};

use tidewatch_shared::{
    api::{ModuleReleaseMeta, ModuleTemplate},
    names::label,
};

use super::selector::{MalformedSelector, Selector};

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
        let labels = template.metadata.labels.as_ref();
        !template.spec.is_mandatory()
            && (self.beta || !is_true(labels, label::BETA))
            && (self.internal || !is_true(labels, label::INTERNAL))
    }

    /// Whether a module with this admission may be seen.
    #[must_use]
    pub fn admits(&self, module: &str, admission: &Admission) -> bool {
        match admission {
            Admission::Everyone => true,
            Admission::Selected(_) => self.restricted.contains(module),
            Admission::Nobody(_) => false,
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

/// Whether a label is `true` in any letter case.
#[must_use]
pub fn is_true(labels: Option<&BTreeMap<String, String>>, key: &str) -> bool {
    labels.and_then(|labels| labels.get(key)).is_some_and(|value| value.eq_ignore_ascii_case("true"))
}

/// The name that a template of this module and version has: what channels resolve to.
#[must_use]
pub fn template_name(module: &str, version: &str) -> String {
    format!("{module}-{version}")
}

/// The channels of a release meta whose template exists under its conventional name and may be seen.
#[must_use]
pub fn visible_channels<'a, T: AsRef<ModuleTemplate>>(
    class: &Class,
    meta: &'a ModuleReleaseMeta,
    templates: &BTreeMap<String, T>,
) -> BTreeMap<&'a str, String> {
    let channels = meta.spec.channels().iter().filter_map(|entry| {
        let template = template_name(&meta.spec.module_name, &entry.version);
        let seen = templates.get(&template).is_some_and(|found| class.sees_template(found.as_ref()));
        seen.then_some((entry.channel.as_str(), template))
    });
    channels.collect()
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
    fn only_channels_whose_template_is_seen_remain() {
        let beta = labels(&[(label::BETA, "true")]);
        let templates: BTreeMap<_, _> = [
            template("m-1.0.0", &BTreeMap::new(), false),
            template("m-2.0.0", &beta, false),
            template("m-3.0.0", &BTreeMap::new(), true),
        ]
        .map(|template| (template.metadata.name.clone().unwrap(), Arc::new(template)))
        .into();
        let channel = |channel: &str, version: &str| json!({"channel": channel, "version": version});
        let channels = [
            channel("regular", "1.0.0"),
            channel("fast", "2.0.0"),
            channel("rapid", "3.0.0"),
            channel("next", "4.0.0"),
        ];
        let meta = meta(json!({"moduleName": "m", "channels": channels}));
        let seen = |class: &Class| visible_channels(class, &meta, &templates).into_keys().collect::<Vec<_>>();
        assert_eq!(seen(&class(false, false)), ["regular"]);
        assert_eq!(seen(&class(true, false)), ["fast", "regular"]);
    }
}
