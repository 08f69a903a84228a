//! What one runtime may see of KCP's catalog, and by which rule the rest is hidden. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use k8s_openapi::api::core::v1::ConfigMap;
use serde::Serialize;
use tidewatch_shared::table;

use super::{
    check::Objects,
    facts::Held,
    preview::{Mistake, Seer},
    releases::Ledger,
    snapshot::{Seen, Snapshot},
    visibility::Hidden,
};

/// The rule of a template whose module has no release meta.
const NO_RELEASE_META: &str = "no-release-meta";

/// What a Kyma may see.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct View {
    /// The Kyma.
    pub kyma: String,
    /// Its namespace in KCP.
    pub namespace: String,
    /// What of its labels counts.
    pub class: Seer,
    /// Every module of KCP, by name.
    pub modules: Vec<ModuleView>,
    /// What is in nobody's catalog because of a mistake in it.
    pub left_out: Vec<Mistake>,
    /// Modules of which a removal waits for a confirmation: until then runtimes keep what they have of them.
    pub held: BTreeSet<String>,
}

/// A module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ModuleView {
    /// Its name.
    pub module: String,
    /// Whether it is seen, and if not, why.
    #[serde(flatten)]
    pub sight: Sight,
    /// Its channels, by name.
    pub channels: Vec<ChannelView>,
    /// Its versions that have a template.
    pub versions: Vec<VersionView>,
}

/// A channel of a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ChannelView {
    /// Its name.
    pub channel: String,
    /// The template it points to; absent where it is hidden.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Whether it is seen, and if not, why.
    #[serde(flatten)]
    pub sight: Sight,
}

/// A version of a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VersionView {
    /// The version.
    pub version: String,
    /// Whether it is seen, and if not, why.
    #[serde(flatten)]
    pub sight: Sight,
}

/// Whether something is seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Sight {
    /// It is.
    pub visible: bool,
    /// The rule that hides it: one word of a closed set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<&'static str>,
    /// The same in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Sight {
    fn of(hidden: Option<&Hidden>) -> Self {
        match hidden {
            None => Self { visible: true, rule: None, reason: None },
            Some(hidden) => Self { visible: false, rule: Some(hidden.as_str()), reason: Some(hidden.to_string()) },
        }
    }

    fn no_release_meta() -> Self {
        let reason = "its module has no release meta, or one with a mistake in it".to_owned();
        Self { visible: false, rule: Some(NO_RELEASE_META), reason: Some(reason) }
    }
}

/// A Kyma, as far as its catalog goes.
#[derive(Clone, Debug)]
pub struct Viewer {
    /// Its name.
    pub name: String,
    /// Its namespace in KCP.
    pub namespace: String,
    /// Its labels in KCP.
    pub labels: BTreeMap<String, String>,
}

/// What a Kyma may see of these objects; `restricted` are the modules of `--restricted-default-modules`.
#[must_use]
pub fn view(kyma: &Viewer, objects: &Objects, restricted: &BTreeSet<String>, releases: Option<&ConfigMap>) -> View {
    let (templates, metas) = (objects.templates.iter().cloned(), objects.release_metas.iter().cloned());
    let snapshot = Snapshot::new(templates, metas, restricted, BTreeSet::new());
    let class = snapshot.class(&kyma.labels);
    let mut modules: Vec<_> = snapshot.modules(&class).into_iter().map(ModuleView::of).collect();
    modules.extend(unreleased(objects, &modules));
    modules.sort_by(|a, b| a.module.cmp(&b.module));
    View {
        kyma: kyma.name.clone(),
        namespace: kyma.namespace.clone(),
        class: Seer::of(&class),
        modules,
        left_out: snapshot.left_out().iter().map(Mistake::of).collect(),
        held: Ledger::held(releases).map(|held: Held| held.modules).unwrap_or_default(),
    }
}

/// Modules that have templates alone.
fn unreleased(objects: &Objects, released: &[ModuleView]) -> Vec<ModuleView> {
    let mut modules: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for template in &objects.templates {
        if let (Some(module), Some(version)) = (template.spec.module_name.as_deref(), template.spec.version.as_deref())
            && !module.is_empty()
            && released.iter().all(|released| released.module != module)
        {
            modules.entry(module).or_default().insert(version);
        }
    }
    let view = |(module, versions): (&str, BTreeSet<&str>)| ModuleView {
        module: module.to_owned(),
        sight: Sight::no_release_meta(),
        channels: Vec::new(),
        versions: versions
            .into_iter()
            .map(|version| VersionView { version: version.to_owned(), sight: Sight::no_release_meta() })
            .collect(),
    };
    modules.into_iter().map(view).collect()
}

impl ModuleView {
    /// What hides a module hides its channels and versions too, unless something else hides them anyway.
    fn of(seen: Seen) -> Self {
        let Seen { module, hidden, channels, versions } = seen;
        let or_whole = |own: Option<&Hidden>| Sight::of(own.or(hidden.as_ref()));
        let channels = channels.into_iter().map(|(channel, found)| {
            let sight = or_whole(found.as_ref().err());
            ChannelView { channel, template: found.ok().filter(|_| sight.visible), sight }
        });
        let channels = channels.collect();
        let versions =
            versions.into_iter().map(|(version, own)| VersionView { version, sight: or_whole(own.as_ref()) });
        Self { module, versions: versions.collect(), channels, sight: Sight::of(hidden.as_ref()) }
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = format!("Kyma {}/{}: {}\n\n", self.namespace, self.kyma, self.class);
        f.write_str(&head)?;
        let row = |module: &str, channel: &str, what: &str, sight: &Sight| {
            let rule = sight.rule.unwrap_or("visible").to_owned();
            [module.to_owned(), channel.to_owned(), what.to_owned(), rule, sight.reason.clone().unwrap_or_default()]
        };
        let mut rows = Vec::new();
        for module in &self.modules {
            rows.push(row(&module.module, "-", "-", &module.sight));
            for channel in &module.channels {
                rows.push(row("", &channel.channel, channel.template.as_deref().unwrap_or("-"), &channel.sight));
            }
            for version in &module.versions {
                rows.push(row("", "-", &version.version, &version.sight));
            }
        }
        f.write_str(&table::aligned(["MODULE", "CHANNEL", "VERSION", "RULE", "WHY"], rows))?;
        for Mistake { object, message, .. } in &self.left_out {
            writeln!(f, "{}", table::sanitize(&format!("{object}: {message}")))?;
        }
        for module in &self.held {
            writeln!(
                f,
                "{}",
                table::sanitize(&format!("{module}: a removal waits for a confirmation, runtimes keep what they have"))
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};
    use tidewatch_shared::names::label;

    use super::*;

    fn objects(templates: &[(&str, &str, &[&str], bool)], metas: &[Value]) -> Objects {
        let api = "operator.kyma-project.io/v1beta2";
        let template = |(module, version, labels, mandatory): &(&str, &str, &[&str], bool)| {
            let labels: BTreeMap<_, _> = labels.iter().map(|label| (*label, "true")).collect();
            let template = json!({"apiVersion": api, "kind": "ModuleTemplate",
                "metadata": {"name": format!("{module}-{version}"), "labels": labels},
                "spec": {"moduleName": module, "version": version, "descriptor": {}, "mandatory": mandatory}});
            Arc::new(serde_json::from_value(template).unwrap())
        };
        let meta = |spec: &Value| {
            let meta = json!({"apiVersion": api, "kind": "ModuleReleaseMeta",
                "metadata": {"name": spec["moduleName"]}, "spec": spec});
            Arc::new(serde_json::from_value(meta).unwrap())
        };
        Objects { templates: templates.iter().map(template).collect(), release_metas: metas.iter().map(meta).collect() }
    }

    fn viewer(labels: &[(&str, &str)]) -> Viewer {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Viewer { name: "k".to_owned(), namespace: "kcp-system".to_owned(), labels }
    }

    #[test]
    fn every_module_says_by_which_rule_it_is_hidden() {
        let channels = |module: &str, channels: &[(&str, &str)]| {
            let channels: Vec<_> =
                channels.iter().map(|(channel, version)| json!({"channel": channel, "version": version})).collect();
            json!({"moduleName": module, "channels": channels})
        };
        let mut selected = channels("secret", &[("regular", "1.0.0")]);
        selected["kymaSelector"] = json!({"matchLabels": {"team": "a"}});
        let objects = objects(
            &[
                ("keda", "1.0.0", &[], false),
                ("keda", "1.1.0", &[label::BETA], false),
                ("secret", "1.0.0", &[], false),
                ("watcher", "1.0.0", &[], true),
                ("lone", "1.0.0", &[], false),
            ],
            &[
                channels("keda", &[("regular", "1.0.0"), ("fast", "1.1.0"), ("next", "2.0.0")]),
                selected,
                json!({"moduleName": "watcher", "mandatory": {"version": "1.0.0"}}),
            ],
        );
        let restricted = BTreeSet::from(["secret".to_owned()]);
        let view = super::view(&viewer(&[]), &objects, &restricted, None);
        let said = |sight: &Sight| sight.rule.unwrap_or("visible");
        let modules: Vec<_> = view.modules.iter().map(|module| (&*module.module, said(&module.sight))).collect();
        assert_eq!(
            modules,
            [
                ("keda", "visible"),
                ("lone", "no-release-meta"),
                ("secret", "restricted-not-matching"),
                ("watcher", "mandatory")
            ]
        );
        let keda = &view.modules[0];
        let channels: Vec<_> = keda.channels.iter().map(|channel| (&*channel.channel, said(&channel.sight))).collect();
        assert_eq!(channels, [("fast", "beta"), ("next", "no-template"), ("regular", "visible")]);
        assert_eq!(keda.channels[2].template.as_deref(), Some("keda-1.0.0"));
        let versions: Vec<_> = keda.versions.iter().map(|version| (&*version.version, said(&version.sight))).collect();
        assert_eq!(versions, [("1.0.0", "visible"), ("1.1.0", "beta")]);
        assert_eq!(said(&view.modules[2].channels[0].sight), "restricted-not-matching", "hidden with its module");
        assert_eq!(view.left_out.len(), 1);

        let json = serde_json::to_value(&view).unwrap();
        assert_eq!(
            json["modules"][0]["channels"][2],
            json!({"channel": "regular", "template": "keda-1.0.0", "visible": true})
        );
        assert_eq!(json["modules"][0]["visible"], true);
        assert_eq!(json["modules"][3]["rule"], "mandatory");
        let page = view.to_string();
        assert!(page.starts_with("Kyma kcp-system/k: plain\n\nMODULE"), "{page}");
        assert!(page.lines().any(|line| line.contains("fast") && line.contains("beta")), "{page}");

        let other = super::view(&viewer(&[(label::BETA, "true"), ("team", "a")]), &objects, &restricted, None);
        assert!(other.modules[0].channels[0].sight.visible && other.modules[2].sight.visible);
        assert_eq!(other.class.to_string(), "beta, selected for secret");
    }
}
