//! Rules of release metas.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use tidewatch_api::{
    ModuleReleaseMeta, Withdrawal,
    labels::{is_label_key, is_label_value},
    names::label,
};
use tidewatch_select::catalog::{
    desired::ReleaseBody,
    retirement::{self, parse_date},
    selector::{Selector, SelectorError},
    visibility::template_name,
};

use super::{Context, NAME, size_advice};
use crate::check::{
    advice,
    document::Step::{self, Index, Key},
    finding::{Code, Finding},
    object::Object,
};

/// Reserved channel name, with which a user selects no channel.
const RESERVED: &str = "none";

pub(super) fn check(object: &Object, meta: &ModuleReleaseMeta, context: &Context<'_>, findings: &mut Vec<Finding>) {
    let spec = &meta.spec;
    if let Err(unfit) = ReleaseBody::of(meta) {
        findings.push(object.finding(&[], Code::TooLarge, unfit.to_string()).suggest(size_advice(object)));
    }
    if spec.module_name.is_empty() {
        let finding = object.finding(&[Key("spec"), Key("moduleName")], Code::Nameless, "it names no module");
        findings.push(finding.suggest(format!("write {}", object.name)));
    } else if spec.module_name != object.name {
        let message = format!("it is left out: its name should be {}", spec.module_name);
        findings.push(object.finding(&NAME, Code::Name, message).suggest(format!("name it {}", spec.module_name)));
    }
    if spec.ocm_component_name.as_deref().is_none_or(str::is_empty) {
        let path = [Key("spec"), Key("ocmComponentName")];
        let message = "it has no ocmComponentName, so nothing can be installed";
        let suggestion = format!("write that of its component, as kyma-project.io/module/{}", object.name);
        findings.push(object.finding(&path, Code::NoComponent, message).suggest(suggestion));
    }
    // `spec.beta` hides nothing either, but Busola marks the module as beta by it.
    if spec.internal == Some(true) {
        let finding = object.finding(&[Key("spec"), Key("internal")], Code::NoEffect, "this field hides nothing");
        findings.push(finding.suggest(format!("set the label {} of the templates", label::INTERNAL)));
    }
    check_kind(object, meta, context, findings);
    check_channels(object, meta, context, findings);
    check_selector(object, meta, context, findings);
    check_versions(object, meta, context, findings);
}

/// Checks that exactly one of `mandatory` and `channels` is set.
fn check_kind(object: &Object, meta: &ModuleReleaseMeta, context: &Context<'_>, findings: &mut Vec<Finding>) {
    let spec = &meta.spec;
    let latest = context.latest(&spec.module_name);
    let channel = latest.map(|version| format!("{{channel: regular, version: {version}}}"));
    let both = |message: &str| object.finding(&[Key("spec")], Code::MandatoryAndChannels, message);
    match (&spec.mandatory, &spec.channels) {
        (Some(_), Some(_)) => findings.push(both("it has both mandatory and channels").suggest("keep one of them")),
        (None, None) => {
            findings.push(both("it has neither mandatory nor channels").suggest(match channel {
                Some(channel) => format!("add channels: [{channel}], or mandatory"),
                None => "add channels or mandatory".to_owned(),
            }));
        }
        (None, Some(channels)) if channels.is_empty() => {
            let path = [Key("spec"), Key("channels")];
            let finding = object.finding(&path, Code::NoChannel, "no Kyma sees a module without a channel");
            findings.push(finding.suggest(match channel {
                Some(channel) => format!("add {channel}"),
                None => "add a template and a channel that points to it, or remove the release meta".to_owned(),
            }));
        }
        _ => {}
    }
}

fn check_channels(object: &Object, meta: &ModuleReleaseMeta, context: &Context<'_>, findings: &mut Vec<Finding>) {
    let spec = &meta.spec;
    let module = &spec.module_name;
    let unknown = |path: &[_], name: String| {
        let finding = object.finding(path, Code::UnknownVersion, format!("there is no template {name}"));
        match context.versions(module) {
            Some(versions) => finding.suggest(format!("point to another version: {versions}")),
            None => finding.suggest("add it, or point to another version"),
        }
    };
    let withdrawn = |path: &[_], version: &str| {
        let message = retirement::withdrawn(meta, version, context.options.today)?;
        let finding = object.finding(path, Code::WithdrawnVersion, message);
        Some(finding.suggest(format!("point to {}: it is installed nowhere any more", other_version(meta, context))))
    };
    if let Some(mandatory) = &spec.mandatory {
        let path = [Key("spec"), Key("mandatory"), Key("version")];
        let name = template_name(module, &mandatory.version);
        if !context.templates.contains_key(&*name) {
            findings.push(unknown(&path, name));
        }
        findings.extend(withdrawn(&path, &mandatory.version));
    }
    for (index, entry) in spec.channels().iter().enumerate() {
        let path = |field| [Key("spec"), Key("channels"), Index(index), Key(field)];
        if entry.channel == RESERVED {
            let message = "no Kyma can choose a channel of this name";
            findings
                .push(object.finding(&path("channel"), Code::ReservedChannel, message).suggest("give it another name"));
        }
        findings.extend(withdrawn(&path("version"), &entry.version));
        let name = template_name(module, &entry.version);
        match context.templates.get(&*name) {
            None => findings.push(unknown(&path("version"), name)),
            Some(Some(template)) if template.spec.is_mandatory() => {
                let message = format!("the template {name} is mandatory, so no Kyma can select it");
                let finding = object.finding(&path("version"), Code::MandatoryTemplate, message);
                findings.push(finding.suggest("make the template selectable, or the release meta mandatory"));
            }
            Some(_) => {}
        }
    }
}

fn check_selector(object: &Object, meta: &ModuleReleaseMeta, context: &Context<'_>, findings: &mut Vec<Finding>) {
    let restricted = context.options.restricted.as_ref();
    let is_restricted = restricted.map(|restricted| restricted.contains(&meta.spec.module_name));
    let path = [Key("spec"), Key("kymaSelector")];
    let Some(selector) = &meta.spec.kyma_selector else {
        if is_restricted == Some(true) && meta.spec.mandatory.is_none() {
            let message = "no Kyma sees the module: it is restricted, and has no kymaSelector";
            let finding = object.finding(&[Key("spec"), Key("moduleName")], Code::SelectsNobody, message);
            findings.push(finding.suggest("add a kymaSelector that names what those have who may see it"));
        }
        return;
    };
    if meta.spec.mandatory.is_some() && meta.spec.channels.is_none() {
        let message = "every runtime has a mandatory module: its selector has no effect";
        findings.push(object.finding(&path, Code::NotRestricted, message).suggest("remove the selector"));
        return;
    }
    match Selector::parse(selector) {
        Err(error) => {
            let message = format!("it cannot be read, so no Kyma sees the module: {error}");
            let is_valid = |match_labels, match_expressions| {
                Selector::parse(&LabelSelector { match_labels, match_expressions }).is_ok()
            };
            let mut expressions = selector.match_expressions.iter().flatten().zip(0..);
            let broken = expressions.find(|(expression, _)| !is_valid(None, Some(vec![(*expression).clone()])));
            let place = broken.map(|(_, index)| [path[0], path[1], Key("matchExpressions"), Index(index)]);
            // Labels are parsed before expressions.
            let place = place.filter(|_| is_valid(selector.match_labels.clone(), None));
            let finding = object.finding(place.as_ref().map_or(&path[..], |place| &place[..]), Code::Selector, message);
            findings.push(finding.suggest(selector_advice(&error, broken.map(|(expression, _)| expression))));
        }
        Ok(selector) if selector.is_empty() => {
            let message = "a selector without a requirement selects no Kyma";
            findings.push(object.finding(&path, Code::SelectsNobody, message).suggest(
                "name what those have who may see it, as matchLabels: {team: a}; or remove it, if everybody may",
            ));
        }
        Ok(_) => {}
    }
    if is_restricted == Some(false) {
        let message = "no Kyma sees the module: it has a selector, but is not restricted";
        let finding = object.finding(&path, Code::NotRestricted, message);
        findings.push(finding.suggest("remove the selector, or name the module in --restricted-default-modules"));
    }
}

/// Suggestion for a malformed selector.
fn selector_advice(error: &SelectorError, expression: Option<&LabelSelectorRequirement>) -> String {
    let text = |wrong: &str, is_valid: fn(&str) -> bool| match advice::repair(wrong, is_valid) {
        Some(other) => format!("write {other:?}"),
        None => "write at most 63 letters, digits, '-', '_' and '.', a letter or digit at either end".to_owned(),
    };
    match error {
        SelectorError::Operator(operator) => {
            match advice::closest(operator, ["In", "NotIn", "Exists", "DoesNotExist"]) {
                Some(operator) => format!("write operator: {operator}"),
                None => "write In or NotIn with values, or Exists or DoesNotExist without".to_owned(),
            }
        }
        SelectorError::Values(key) => match expression.map(|expression| expression.operator.as_str()) {
            Some("In") => format!("add values, or write Exists, if any value of {key} will do"),
            Some("NotIn") => format!("add values, or write DoesNotExist, if {key} must not be there"),
            Some("Exists") => "remove the values, or write In".to_owned(),
            _ => "remove the values, or write NotIn".to_owned(),
        },
        SelectorError::Key(key) => text(key, is_label_key),
        SelectorError::Value(value) => text(value, is_label_value),
    }
}

/// Checks the entries of retired versions.
fn check_versions(object: &Object, meta: &ModuleReleaseMeta, context: &Context<'_>, findings: &mut Vec<Finding>) {
    for (index, entry) in meta.spec.versions().iter().enumerate() {
        let path = |field| [Key("spec"), Key("versions"), Index(index), Key(field)];
        let module = &meta.spec.module_name;
        let name = template_name(module, &entry.version);
        if !context.templates.contains_key(&*name) {
            let message = format!("there is no template {name}");
            let finding = object.finding(&path("version"), Code::DeprecationWithoutTemplate, message);
            findings.push(finding.suggest("remove the entry once no runtime has the version"));
        }
        if let Some(withdrawal) = &entry.withdrawal {
            let path = [Key("spec"), Key("versions"), Index(index), Key("withdrawal"), Key("replacement")];
            findings.extend(check_replacement(object, meta, withdrawal, &path, context));
        }
        let day = entry.deprecation_date.as_deref().and_then(parse_date);
        let Some(day) = day.filter(|day| *day < context.options.today) else { continue };
        let channels = meta.spec.channels().iter().filter(|channel| channel.version == entry.version);
        let channels: Vec<_> = channels.map(|channel| channel.channel.as_str()).collect();
        let message = format!("the version {} is deprecated since {day}", entry.version);
        let finding = object.finding(&path("deprecationDate"), Code::PastDeprecation, message);
        findings.push(if channels.is_empty() {
            finding.suggest("remove its template once no runtime has it")
        } else {
            finding.suggest(format!("move {} to {}", channels.join(", "), other_version(meta, context)))
        });
    }
}

/// Checks that users can follow the advice to use the replacement of a withdrawn version.
fn check_replacement(
    object: &Object,
    meta: &ModuleReleaseMeta,
    withdrawal: &Withdrawal,
    path: &[Step<'_>],
    context: &Context<'_>,
) -> Option<Finding> {
    let replacement = withdrawal.replacement.as_deref().filter(|version| !version.is_empty())?;
    let name = template_name(&meta.spec.module_name, replacement);
    let (code, message) = if !context.templates.contains_key(&*name) {
        (Code::UnknownReplacement, format!("there is no template {name}"))
    } else if meta.spec.versions().iter().any(|entry| entry.version == replacement && entry.withdrawal.is_some()) {
        (Code::WithdrawnReplacement, format!("the version {replacement} is withdrawn, too"))
    } else {
        return None;
    };
    Some(object.finding(path, code, message).suggest(format!("name {}", other_version(meta, context))))
}

/// Highest version of a module, unless it is retired, for a suggestion.
fn other_version<'a>(meta: &ModuleReleaseMeta, context: &Context<'a>) -> &'a str {
    let is_retired = |version: &str| {
        let entries = meta.spec.versions().iter().filter(|entry| entry.version == version);
        entries.into_iter().any(|entry| entry.deprecation_date.is_some() || entry.withdrawal.is_some())
    };
    context.latest(&meta.spec.module_name).filter(|latest| !is_retired(latest)).unwrap_or("another version")
}
