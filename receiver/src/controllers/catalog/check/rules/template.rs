//! Rules of templates.

use tidewatch_shared::api::ModuleTemplate;

use super::{Context, NAME, is_subdomain, size_advice};
use crate::controllers::catalog::{
    check::{
        advice,
        document::Step::Key,
        finding::{Code, Finding},
        object::Object,
    },
    desired,
    visibility::template_name,
};

pub(super) fn check(object: &Object, template: &ModuleTemplate, context: &Context<'_>, findings: &mut Vec<Finding>) {
    if let Err(unfit) = desired::template(template) {
        findings.push(object.finding(&[], Code::TooLarge, unfit.to_string()).suggest(size_advice(object)));
    }
    if template.spec.channel.as_deref().is_some_and(|channel| !channel.is_empty()) {
        let finding =
            object.finding(&[Key("spec"), Key("channel")], Code::NoEffect, "a template is in no channel by itself");
        findings.push(finding.suggest("remove it; the release meta of the module names its channels"));
    }
    let non_empty = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let (Some(module), Some(version)) = (non_empty(&template.spec.module_name), non_empty(&template.spec.version))
    else {
        let (module, version) = (non_empty(&template.spec.module_name), non_empty(&template.spec.version));
        let missing = if module.is_none() { "moduleName" } else { "version" };
        let finding = object.finding(
            &[Key("spec"), Key(missing)],
            Code::Nameless,
            format!("it has no {missing}, so nothing finds it"),
        );
        findings.push(finding.suggest(match missing_from_name(&object.name, module.as_deref(), version.as_deref()) {
            Some(value) => format!("write {missing}: {value}, as its name says"),
            None => format!("add {missing}: {}", advice::field_format(missing).unwrap_or_default()),
        }));
        return;
    };
    let expected = template_name(&module, &version);
    if object.name != expected {
        let finding = object.finding(&NAME, Code::Name, format!("nothing finds it: its name should be {expected}"));
        let named = |version: &str| is_subdomain(&template_name(&module, version));
        findings.push(finding.suggest(match advice::repair(&version, named) {
            _ if is_subdomain(&expected) => format!("name it {expected}"),
            Some(other) => format!("{expected} cannot be a name: make it version {other}"),
            None => format!("{expected} cannot be a name: choose another version"),
        }));
        return;
    }
    check_reachability(object, template, &module, context, findings);
}

/// Reports a template that no Kyma can select by a channel.
fn check_reachability(
    object: &Object,
    template: &ModuleTemplate,
    module: &str,
    context: &Context<'_>,
    findings: &mut Vec<Finding>,
) {
    let version = template.spec.version.as_deref().unwrap_or_default();
    let unreached = |message: &str| object.finding(&NAME, Code::UnreachedTemplate, message);
    match context.modules.get(module) {
        None => {
            let finding =
                object.finding(&NAME, Code::NoReleaseMeta, format!("the module {module} has no release meta"));
            let points = if template.spec.is_mandatory() { "whose mandatory" } else { "with a channel that" };
            findings.push(finding.suggest(format!(
                "nobody can have it until there is one: add the ModuleReleaseMeta {module}, {points} names {version}"
            )));
        }
        // The release meta does not deserialize, which is reported there.
        Some(None) => {}
        Some(Some(_)) if context.referenced.contains(&object.name) => {}
        Some(Some(meta)) => findings.push(match (&meta.spec.mandatory, template.spec.is_mandatory()) {
            (Some(mandatory), _) => {
                unreached(&format!("every runtime gets {}, and nobody this one", mandatory.version))
                    .suggest(format!("remove it, or let mandatory of the ModuleReleaseMeta {module} name {version}"))
            }
            (None, true) => unreached("it is mandatory, but its release meta is not").suggest(format!(
                "remove mandatory here, or give the ModuleReleaseMeta {module} mandatory: {{version: {version}}} for its \
                 channels"
            )),
            (None, false) => unreached("no channel points to it")
                .suggest("it can only be installed by its version; remove it if nobody should"),
        }),
    }
}

/// Module or version that the spec lacks, taken from the template's name.
fn missing_from_name<'a>(name: &'a str, module: Option<&str>, version: Option<&str>) -> Option<&'a str> {
    let missing = match (module, version) {
        (Some(module), None) => name.strip_prefix(module)?.strip_prefix('-')?,
        (None, Some(version)) => name.strip_suffix(version)?.strip_suffix('-')?,
        _ => return None,
    };
    let is_version = missing.starts_with(|char: char| char.is_ascii_digit());
    (!missing.is_empty() && is_version == version.is_none()).then_some(missing)
}
