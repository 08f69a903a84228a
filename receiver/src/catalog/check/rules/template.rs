//! Templates.

use tidewatch_shared::api::ModuleTemplate;

use super::{Around, NAME, is_subdomain};
use crate::catalog::{
    check::{
        document::Step::Key,
        finding::{Code, Finding},
        object::Object,
    },
    desired,
    visibility::template_name,
};

pub(super) fn check(object: &Object, template: &ModuleTemplate, around: &Around<'_>, findings: &mut Vec<Finding>) {
    if let Err(unfit) = desired::template(template) {
        findings.push(object.finding(&[], Code::TooLarge, unfit.to_string()));
    }
    if template.spec.channel.as_deref().is_some_and(|channel| !channel.is_empty()) {
        let finding =
            object.finding(&[Key("spec"), Key("channel")], Code::NoEffect, "a template is in no channel by itself");
        findings.push(finding.suggest("remove it; the release meta of the module names its channels"));
    }
    let said = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let (Some(module), Some(version)) = (said(&template.spec.module_name), said(&template.spec.version)) else {
        let missing = if said(&template.spec.module_name).is_none() { "moduleName" } else { "version" };
        let finding = object.finding(
            &[Key("spec"), Key(missing)],
            Code::Nameless,
            format!("it has no {missing}, so nothing finds it"),
        );
        findings.push(finding.suggest(format!("set spec.{missing}")));
        return;
    };
    let expected = template_name(&module, &version);
    if object.name != expected {
        let finding = object.finding(&NAME, Code::Name, format!("nothing finds it: its name should be {expected}"));
        findings.push(if is_subdomain(&expected) {
            finding.suggest(format!("name it {expected}"))
        } else {
            finding.suggest(format!("{expected} cannot be a name: choose another version"))
        });
        return;
    }
    reach(object, template, &module, around, findings);
}

/// Who can have it.
fn reach(object: &Object, template: &ModuleTemplate, module: &str, around: &Around<'_>, findings: &mut Vec<Finding>) {
    let unreached = |why: &str| object.finding(&NAME, Code::UnreachedTemplate, why);
    match around.modules.get(module) {
        None => {
            let finding =
                object.finding(&NAME, Code::NoReleaseMeta, format!("the module {module} has no release meta"));
            findings.push(finding.suggest("nobody can install it until one names it"));
        }
        // It cannot be taken, which is said there.
        Some(None) => {}
        Some(Some(_)) if around.reached.contains(&object.name) => {}
        Some(Some(meta)) => findings.push(match (&meta.spec.mandatory, template.spec.is_mandatory()) {
            (Some(mandatory), _) => {
                unreached(&format!("every runtime gets {}, and nobody this one", mandatory.version))
            }
            (None, true) => unreached("it is mandatory, but its release meta is not"),
            (None, false) => unreached("no channel points to it")
                .suggest("it can only be installed by its version; remove it if nobody should"),
        }),
    }
}
