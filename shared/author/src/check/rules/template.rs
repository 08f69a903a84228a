//! Rules of templates.

use kube::ResourceExt as _;
use serde_json::Value;
use tidewatch_api::{ModuleTemplate, labels::is_dns_subdomain, names::label};
use tidewatch_select::catalog::{desired, visibility::template_name};

use super::{Context, NAME, size_advice};
use crate::check::{
    advice,
    document::Step::Key,
    finding::{Code, Finding},
    object::Object,
};

pub(super) fn check(object: &Object, template: &ModuleTemplate, context: &Context<'_>, findings: &mut Vec<Finding>) {
    if let Err(unfit) = desired::template(template) {
        findings.push(object.finding(&[], Code::TooLarge, unfit.to_string()).suggest(size_advice(object)));
    }
    if let Some(advice) = old_form_advice(object, template) {
        let message = "it has the old form, in which a template names its channel: nothing finds it";
        findings.push(object.finding(&[], Code::Nameless, message).suggest(advice));
        return;
    }
    let non_empty = |text: &&str| !text.is_empty();
    if template.spec.channel.as_deref().is_some_and(|channel| !channel.is_empty()) {
        let path = [Key("spec"), Key("channel")];
        let finding = object.finding(&path, Code::NoEffect, "a template is in no channel by itself");
        findings.push(finding.suggest("remove it; the release meta of the module names its channels"));
    }
    let module = template.spec.module_name.as_deref().filter(non_empty);
    let version = template.spec.version.as_deref().filter(non_empty);
    let (Some(module), Some(version)) = (module, version) else {
        let missing = if module.is_none() { "moduleName" } else { "version" };
        let message = format!("it has no {missing}, so nothing finds it");
        let finding = object.finding(&[Key("spec"), Key(missing)], Code::Nameless, message);
        findings.push(finding.suggest(match missing_from_name(&object.name, module, version) {
            Some(value) => format!("write {missing}: {value}, as its name says"),
            None => format!("add {missing}: {}", advice::field_format(missing).unwrap_or_default()),
        }));
        return;
    };
    let expected = template_name(module, version);
    if object.name != expected {
        let finding = object.finding(&NAME, Code::Name, format!("nothing finds it: its name should be {expected}"));
        let named = |version: &str| is_dns_subdomain(&template_name(module, version));
        findings.push(finding.suggest(match advice::repair(version, named) {
            _ if is_dns_subdomain(&expected) => format!("name it {expected}"),
            Some(other) => format!("{expected} cannot be a name: make it version {other}"),
            None => format!("{expected} cannot be a name: choose another version"),
        }));
        return;
    }
    check_label(object, template, module, findings);
    check_component(object, template, module, context, findings);
    if let Some(finding) = reachability(object, template, module, version, context) {
        findings.push(finding);
    }
}

/// Reports a template whose label does not name its module: by the label alone, Busola finds the templates of a module, and
/// lifecycle-manager copies the label as it is.
fn check_label(object: &Object, template: &ModuleTemplate, module: &str, findings: &mut Vec<Finding>) {
    let named = template.metadata.labels.as_ref().and_then(|labels| labels.get(label::MODULE_NAME));
    if template.spec.is_mandatory() || named.is_some_and(|named| named == module) {
        return;
    }
    let message = match named {
        Some(other) => format!("the label {} names the module {other:?} instead of {module}", label::MODULE_NAME),
        None => format!("it lacks the label {}, by which Busola finds the module", label::MODULE_NAME),
    };
    let path = [Key("metadata"), Key("labels"), Key(label::MODULE_NAME)];
    let finding = object.finding(&path, Code::ModuleLabel, message);
    findings.push(finding.suggest(format!("write {}: {module}", label::MODULE_NAME)));
}

/// Reports a component descriptor of another component than the release meta names: with each version that changes it, the
/// Manifests of all runtimes would be replaced.
fn check_component(
    object: &Object,
    template: &ModuleTemplate,
    module: &str,
    context: &Context<'_>,
    findings: &mut Vec<Finding>,
) {
    let described = template.spec.descriptor.pointer("/component/name").and_then(Value::as_str);
    let named = context.modules.get(module).and_then(|meta| meta.as_ref()?.spec.ocm_component_name.as_deref());
    if let (Some(described), Some(named)) = (described, named.filter(|name| !name.is_empty()))
        && described != named
    {
        let path = [Key("spec"), Key("descriptor"), Key("component"), Key("name")];
        let message = format!("the component {described} is not {named}, which the ModuleReleaseMeta {module} names");
        let finding = object.finding(&path, Code::ComponentMismatch, message);
        findings.push(finding.suggest(format!("keep the name {named} in every version of the module")));
    }
}

/// Finding on a template that no Kyma can select by a channel.
fn reachability(
    object: &Object,
    template: &ModuleTemplate,
    module: &str,
    version: &str,
    context: &Context<'_>,
) -> Option<Finding> {
    let unreached = |message: &str| object.finding(&NAME, Code::UnreachedTemplate, message);
    let Some(meta) = context.modules.get(module) else {
        let message = format!("the module {module} has no release meta");
        let points = if template.spec.is_mandatory() { "whose mandatory" } else { "with a channel that" };
        return Some(object.finding(&NAME, Code::NoReleaseMeta, message).suggest(format!(
            "no runtime gets it until there is one: add the ModuleReleaseMeta {module}, {points} names {version}"
        )));
    };
    // A release meta that does not deserialize is reported there.
    let meta = meta.filter(|_| !context.referenced.contains(&object.name))?;
    Some(match (&meta.spec.mandatory, template.spec.is_mandatory()) {
        (Some(mandatory), _) => unreached(&format!("every runtime gets {}, and none gets this one", mandatory.version))
            .suggest(format!("remove it, or let mandatory of the ModuleReleaseMeta {module} name {version}")),
        (None, true) => unreached("it is mandatory, but its release meta is not").suggest(format!(
            "remove mandatory here, or give the ModuleReleaseMeta {module} mandatory: {{version: {version}}} for its \
             channels"
        )),
        (None, false) => unreached("no channel points to it")
            .suggest("it can only be installed by its version; remove it if no user should install it"),
    })
}

/// What to write instead of a template that names a channel, and neither its module nor its version.
fn old_form_advice(object: &Object, template: &ModuleTemplate) -> Option<String> {
    let spec = &template.spec;
    let given = |text: &Option<String>| text.as_deref().is_some_and(|text| !text.is_empty());
    let channel = spec.channel.as_deref().filter(|channel| !channel.is_empty())?;
    if given(&spec.module_name) || given(&spec.version) {
        return None;
    }
    let component = |member: &str| spec.descriptor.pointer(&format!("/component/{member}")).and_then(Value::as_str);
    let labelled = template.labels().get(label::MODULE_NAME).map(String::as_str);
    let named = || object.name.strip_suffix(channel)?.strip_suffix('-');
    let described = || component("name")?.rsplit('/').next();
    let module = labelled.or_else(named).or_else(described).filter(|module| !module.is_empty()).unwrap_or("<module>");
    let version = component("version").filter(|version| !version.is_empty()).unwrap_or("<version>");
    Some(format!(
        "name it {}, write moduleName: {module} and version: {version}, remove channel, and let the ModuleReleaseMeta \
         {module} have {{channel: {channel}, version: {version}}} in its channels",
        template_name(module, version)
    ))
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
