//! Rules beyond the schemas: metadata, and the relations between the objects of a catalog.

mod history;
mod release;
mod template;
mod users;

use std::collections::{BTreeMap, BTreeSet};

use semver::Version;
use tidewatch_api::{
    ModuleReleaseMeta, ModuleTemplate,
    labels::{is_dns_subdomain, is_label_key, is_label_value},
    names::label,
};
use tidewatch_select::catalog::{desired::Kind, visibility::template_name};

pub(super) use users::PinnedUsers;

use super::{
    CheckOptions, advice,
    document::{Content, Node, Step},
    finding::{Code, Finding},
    object::Object,
};

/// All objects that a checked object may refer to. An object that does not deserialize is kept by name only, so that no
/// other object is reported to lack it.
struct Context<'a> {
    templates: BTreeMap<&'a str, Option<&'a ModuleTemplate>>,
    modules: BTreeMap<&'a str, Option<&'a ModuleReleaseMeta>>,
    /// Names of templates that a channel or `mandatory` points to.
    referenced: BTreeSet<String>,
    options: &'a CheckOptions,
}

impl<'a> Context<'a> {
    fn new(objects: &'a [Object], before: Option<&'a [Object]>, options: &'a CheckOptions) -> Self {
        let background = before.filter(|_| !options.whole).unwrap_or_default();
        let mut templates = BTreeMap::new();
        let mut modules = BTreeMap::new();
        // Objects of the texts replace those of the earlier state.
        for object in background.iter().chain(objects) {
            match object.kind {
                Kind::Template => drop(templates.insert(&*object.name, object.template())),
                Kind::ReleaseMeta => drop(modules.insert(&*object.name, object.release_meta())),
            }
        }
        let referenced = modules.values().flatten().flat_map(|meta| {
            let channels = meta.spec.channels().iter().map(|entry| &entry.version);
            let mandatory = meta.spec.mandatory.iter().map(|mandatory| &mandatory.version);
            channels.chain(mandatory).map(|version| template_name(&meta.spec.module_name, version))
        });
        Self { referenced: referenced.collect(), templates, modules, options }
    }

    /// Versions of a module with a template, at most the last five by name, for a message.
    fn versions(&self, module: &str) -> Option<String> {
        const NAMED: usize = 5;
        let versions: Vec<_> = self.templates_of(module).map(|(_, version)| version).collect();
        let more = if versions.len() > NAMED { "…, " } else { "" };
        let last = versions.len().saturating_sub(NAMED);
        (!versions.is_empty()).then(|| format!("there are templates of {more}{}", versions[last..].join(", ")))
    }

    /// Highest version of a module with a selectable template.
    fn latest(&self, module: &str) -> Option<&'a str> {
        let selectable = self.templates_of(module).filter(|(template, _)| !template.spec.is_mandatory());
        let numbered = selectable.filter_map(|(_, version)| Some((Version::parse(version).ok()?, version)));
        numbered.max().map(|(_, version)| version)
    }

    /// Templates of a module with their versions, by name. A template with another name than the derived one is not
    /// found.
    fn templates_of(&self, module: &str) -> impl Iterator<Item = (&'a ModuleTemplate, &'a str)> {
        self.templates.iter().filter_map(move |(name, template)| {
            let template = (*template)?;
            let version = template.spec.version.as_deref()?;
            (template_name(module, version) == **name).then_some((template, version))
        })
    }
}

/// Checks objects, and the change to them from those `before`; `users` pin versions.
pub(super) fn check(
    objects: &[Object],
    before: Option<&[Object]>,
    users: &PinnedUsers,
    options: &CheckOptions,
) -> Vec<Finding> {
    let context = Context::new(objects, before, options);
    let mut findings = Vec::new();
    let mut seen = BTreeMap::new();
    for object in objects {
        if !object.name.is_empty()
            && let Some(first) = seen.insert((object.kind, &*object.name), object)
        {
            let line = first.node.location_of(&NAME).line();
            let message = format!("another object has the same kind and name ({}:{line})", first.file);
            findings.push(object.finding(&NAME, Code::DuplicateObject, message).suggest("keep one of them"));
        }
        if let Some(template) = object.template() {
            template::check(object, template, &context, &mut findings);
        }
        if let Some(meta) = object.release_meta() {
            release::check(object, meta, &context, &mut findings);
        }
    }
    if let Some(before) = before {
        history::check(objects, before, options, &mut findings);
        if options.whole {
            users::check(objects, before, users, &mut findings);
        }
    }
    findings
}

/// Suggestion for an object that is too large.
fn size_advice(object: &Object) -> String {
    match advice::largest(&object.node.to_value()) {
        Some((field, bytes)) => format!("shorten {field}, which has {bytes} of them"),
        None => "shorten it".to_owned(),
    }
}

const NAME: [Step<'static>; 2] = [Step::Key("metadata"), Step::Key("name")];

/// Checks the metadata, which no CRD describes.
pub(super) fn metadata(object: &Object, findings: &mut Vec<Finding>) {
    let metadata = object.node.get("metadata");
    let mistake = match metadata.and_then(|metadata| metadata.get("name")).map(|name| &name.content) {
        Some(Content::Text(name)) if is_dns_subdomain(name) => None,
        Some(Content::Text(name)) => {
            let message = format!("{name:?} is no name: lower-case letters, digits, '-' and '.' make one");
            Some((&NAME[..], Code::Metadata, message))
        }
        Some(other) => Some((&NAME[..], Code::Type, format!("must be a string, and is {other}"))),
        None if metadata.is_none() => Some((&[][..], Code::Metadata, "it has no metadata".to_owned())),
        None => Some((&NAME[..1], Code::Metadata, "it has no name".to_owned())),
    };
    if let Some((path, code, message)) = mistake {
        findings.push(object.finding(path, code, message).suggest(name_advice(object)));
    }
    for (field, is_value) in [("labels", is_label_value as fn(&str) -> bool), ("annotations", |_| true)] {
        if let Some(texts) = metadata.and_then(|metadata| metadata.get(field)) {
            pairs(object, field, texts, is_value, findings);
        }
    }
}

/// Suggested name of an object: derived from its spec, or else its own name repaired.
pub(super) fn name_advice(object: &Object) -> String {
    let proper = object.proper_name();
    let name = proper.as_deref().unwrap_or(&object.name);
    match (is_dns_subdomain(name), advice::repair(name, is_dns_subdomain), object.kind) {
        (true, ..) => format!("write metadata.name: {name}"),
        (false, Some(name), _) if proper.is_none() => format!("write metadata.name: {name}"),
        (false, Some(name), _) => format!("write metadata.name: {name}, and in spec what fits it"),
        (false, None, Kind::Template) => "write metadata.name: <module>-<version>".to_owned(),
        (false, None, Kind::ReleaseMeta) => "write metadata.name: <module>".to_owned(),
    }
}

/// Checks labels or annotations.
fn pairs(object: &Object, field: &str, texts: &Node, is_value: fn(&str) -> bool, findings: &mut Vec<Finding>) {
    let path = [Step::Key("metadata"), Step::Key(field)];
    let members = match &texts.content {
        Content::Object(members) => members,
        Content::Null => return,
        other => {
            findings.push(object.type_finding(&path, "an object", other));
            return;
        }
    };
    for (key, value) in members {
        let path = [path[0], path[1], Step::Key(key)];
        if !is_label_key(key) {
            let finding = object.finding(&path, Code::Metadata, format!("{key:?} is no key"));
            findings.push(finding.suggest(match advice::repair(key, is_label_key) {
                Some(other) => format!("write {other:?}"),
                None => {
                    "write at most 63 letters, digits, '-', '_' and '.', after a domain and a slash if need be".into()
                }
            }));
        }
        let is_flag = field == "labels" && [label::BETA, label::INTERNAL].contains(&key.as_str());
        let is_bool = |text: &str| ["true", "false"].iter().any(|known| text.eq_ignore_ascii_case(known));
        match &value.content {
            Content::Text(text) if !is_value(text) => {
                let finding = object.finding(&path, Code::Metadata, format!("{text:?} is no value of a label"));
                findings.push(finding.suggest(match advice::repair(text, is_label_value) {
                    Some(other) => format!("write {other:?}, or make it an annotation"),
                    None => "write at most 63 letters, digits, '-', '_' and '.', or make it an annotation".into(),
                }));
            }
            Content::Text(text) if is_flag && !is_bool(text) => {
                let finding = object.finding(&path, Code::LabelValue, format!("{text:?} counts as false"));
                findings.push(finding.suggest("write \"true\" or \"false\""));
            }
            Content::Text(_) => {}
            other => findings.push(object.type_finding(&path, "a string", other)),
        }
    }
}
