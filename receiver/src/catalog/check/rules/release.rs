//! Release metas.

use tidewatch_shared::api::ModuleReleaseMeta;

use super::{Around, NAME};
use crate::catalog::{
    check::{
        document::Step::{Index, Key},
        finding::{Code, Finding},
        object::Object,
        schema::date,
    },
    desired::Release,
    selector::Selector,
    visibility::template_name,
};

/// The word with which a user leaves a module without a channel.
const RESERVED: &str = "none";

pub(super) fn check(object: &Object, meta: &ModuleReleaseMeta, around: &Around<'_>, findings: &mut Vec<Finding>) {
    let spec = &meta.spec;
    if let Err(unfit) = Release::of(meta) {
        findings.push(object.finding(&[], Code::TooLarge, unfit.to_string()));
    }
    if spec.module_name.is_empty() {
        let finding = object.finding(&[Key("spec"), Key("moduleName")], Code::Nameless, "it names no module");
        findings.push(finding.suggest(format!("write {}", object.name)));
    } else if spec.module_name != object.name {
        let message = format!("it is left out: its name should be {}", spec.module_name);
        findings.push(object.finding(&NAME, Code::Name, message).suggest(format!("name it {}", spec.module_name)));
    }
    if spec.ocm_component_name.as_deref().is_none_or(str::is_empty) {
        let finding =
            object.finding(&[Key("spec"), Key("ocmComponentName")], Code::NoComponent, "it has no ocmComponentName");
        findings.push(finding.suggest("without it nothing can be installed"));
    }
    for (field, set) in [("beta", spec.beta), ("internal", spec.internal)] {
        if set == Some(true) {
            let finding = object.finding(&[Key("spec"), Key(field)], Code::NoEffect, "this field hides nothing");
            findings.push(finding.suggest(format!("set the label operator.kyma-project.io/{field} of the templates")));
        }
    }
    channels(object, meta, around, findings);
    selector(object, meta, around, findings);
    deprecations(object, meta, around, findings);
}

fn channels(object: &Object, meta: &ModuleReleaseMeta, around: &Around<'_>, findings: &mut Vec<Finding>) {
    let spec = &meta.spec;
    let module = &spec.module_name;
    let both = |message: &str| object.finding(&[Key("spec")], Code::MandatoryAndChannels, message);
    match (&spec.mandatory, &spec.channels) {
        (Some(_), Some(_)) => findings.push(both("it has both mandatory and channels").suggest("keep one of them")),
        (None, None) => findings.push(both("it has neither mandatory nor channels").suggest("set one of them")),
        (None, Some(channels)) if channels.is_empty() => {
            let finding = object.finding(
                &[Key("spec"), Key("channels")],
                Code::NoChannel,
                "nobody sees a module without a channel",
            );
            findings.push(finding);
        }
        _ => {}
    }
    let unknown = |path: &[_], version: &str| {
        let name = template_name(module, version);
        let finding = object.finding(path, Code::UnknownVersion, format!("there is no template {name}"));
        match around.versions(module) {
            Some(versions) => finding.suggest(versions),
            None => finding.suggest("add it, or point to another version"),
        }
    };
    if let Some(mandatory) = &spec.mandatory
        && !around.templates.contains_key(&*template_name(module, &mandatory.version))
    {
        findings.push(unknown(&[Key("spec"), Key("mandatory"), Key("version")], &mandatory.version));
    }
    for (index, entry) in spec.channels().iter().enumerate() {
        let path = |field| [Key("spec"), Key("channels"), Index(index), Key(field)];
        if entry.channel == RESERVED {
            let finding =
                object.finding(&path("channel"), Code::ReservedChannel, "nobody can choose a channel of this name");
            findings.push(finding.suggest("give it another name"));
        }
        match around.templates.get(&*template_name(module, &entry.version)) {
            None => findings.push(unknown(&path("version"), &entry.version)),
            Some(Some(template)) if template.spec.is_mandatory() => {
                let message = format!(
                    "the template {} is mandatory, so nobody can select it",
                    template_name(module, &entry.version)
                );
                let finding = object.finding(&path("version"), Code::MandatoryTemplate, message);
                findings.push(finding.suggest("make the template selectable, or the release meta mandatory"));
            }
            Some(_) => {}
        }
    }
}

fn selector(object: &Object, meta: &ModuleReleaseMeta, around: &Around<'_>, findings: &mut Vec<Finding>) {
    let Some(selector) = &meta.spec.kyma_selector else { return };
    let path = [Key("spec"), Key("kymaSelector")];
    match Selector::parse(selector) {
        Err(error) => {
            let finding =
                object.finding(&path, Code::Selector, format!("it cannot be read, so nobody sees the module: {error}"));
            findings.push(finding);
        }
        Ok(selector) if selector.is_empty() => {
            findings.push(object.finding(
                &path,
                Code::SelectsNobody,
                "a selector without a requirement selects nobody",
            ));
        }
        Ok(_) => {}
    }
    let restricted = around.terms.restricted.as_ref();
    if restricted.is_some_and(|restricted| !restricted.contains(&meta.spec.module_name)) {
        let message = "nobody sees the module: it has a selector, but is not restricted";
        let finding = object.finding(&path, Code::NotRestricted, message);
        findings.push(finding.suggest("remove the selector, or name the module in --restricted-default-modules"));
    }
}

fn deprecations(object: &Object, meta: &ModuleReleaseMeta, around: &Around<'_>, findings: &mut Vec<Finding>) {
    for (index, entry) in meta.spec.versions().iter().enumerate() {
        let path = |field| [Key("spec"), Key("versions"), Index(index), Key(field)];
        let module = &meta.spec.module_name;
        if !around.templates.contains_key(&*template_name(module, &entry.version)) {
            let message = format!("there is no template {}", template_name(module, &entry.version));
            let finding = object.finding(&path("version"), Code::DeprecationWithoutTemplate, message);
            findings.push(finding.suggest("remove the entry once no runtime has the version"));
        }
        let Some(day) = entry.deprecation_date.as_deref().and_then(date).filter(|day| *day < around.terms.today) else {
            continue;
        };
        let channels = meta.spec.channels().iter().filter(|channel| channel.version == entry.version);
        let channels: Vec<_> = channels.map(|channel| channel.channel.as_str()).collect();
        let message = format!("the version {} is deprecated since {day}", entry.version);
        let finding = object.finding(&path("deprecationDate"), Code::PastDeprecation, message);
        findings.push(if channels.is_empty() {
            finding.suggest("remove its template once no runtime has it")
        } else {
            finding.suggest(format!("move {} to another version", channels.join(", ")))
        });
    }
}
