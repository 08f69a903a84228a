//! Visibility of KCP's catalog to one Kyma, with the rule that hides each hidden part. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use k8s_openapi::api::core::v1::ConfigMap;
use serde::Serialize;
use tidewatch_shared::table;

use super::{
    check::Objects,
    preview::OmissionView,
    releases::Ledger,
    snapshot::{ModuleVisibility, Snapshot},
    visibility::{HidingRule, VisibilityClass},
};

/// Rule of a module without a valid release meta, and of its templates.
const NO_RELEASE_META: &str = "no-release-meta";

/// Visibility of KCP's catalog to one Kyma.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct View {
    /// Name of the Kyma.
    pub kyma: String,
    /// Namespace of the Kyma in KCP.
    pub namespace: String,
    /// Visibility class of the Kyma.
    pub class: VisibilityClass,
    /// All modules of KCP, by name.
    pub modules: Vec<ModuleView>,
    /// Objects left out of every catalog because of a mistake in them.
    pub left_out: Vec<OmissionView>,
    /// Modules with a held removal: until it is confirmed, runtimes keep the objects they have of them.
    pub held: BTreeSet<String>,
}

/// Visibility of a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ModuleView {
    /// Name of the module.
    pub module: String,
    /// Visibility of the module, flattened.
    #[serde(flatten)]
    pub visibility: Visibility,
    /// Channels, by name.
    pub channels: Vec<ChannelView>,
    /// Versions with a template.
    pub versions: Vec<VersionView>,
}

/// Visibility of a channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ChannelView {
    /// Name of the channel.
    pub channel: String,
    /// Template that the channel points to; absent if hidden.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Visibility of the channel, flattened.
    #[serde(flatten)]
    pub visibility: Visibility,
}

/// Visibility of a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VersionView {
    /// The version.
    pub version: String,
    /// Visibility of the version, flattened.
    #[serde(flatten)]
    pub visibility: Visibility,
}

/// Visibility of one item, with the rule if it is hidden.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Visibility {
    /// The item is visible.
    pub visible: bool,
    /// Hiding rule, one value of a closed set; absent if visible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<&'static str>,
    /// Explanation of the rule; absent if visible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Visibility {
    fn of(hidden: Option<&HidingRule>) -> Self {
        Self {
            visible: hidden.is_none(),
            rule: hidden.map(HidingRule::as_str),
            reason: hidden.map(HidingRule::to_string),
        }
    }

    fn no_release_meta() -> Self {
        let reason = "its module has no release meta, or one with a mistake in it".to_owned();
        Self { visible: false, rule: Some(NO_RELEASE_META), reason: Some(reason) }
    }
}

/// Metadata of a Kyma in KCP that determine its catalog.
#[derive(Clone, Debug)]
pub struct KymaMeta {
    /// Name of the Kyma.
    pub name: String,
    /// Namespace of the Kyma.
    pub namespace: String,
    /// Labels of the Kyma.
    pub labels: BTreeMap<String, String>,
}

/// Computes the visibility of these objects to a Kyma; `restricted` are the modules of `--restricted-default-modules`,
/// `releases` is the ConfigMap of releases.
#[must_use]
pub fn view(kyma: &KymaMeta, objects: &Objects, restricted: &BTreeSet<String>, releases: Option<&ConfigMap>) -> View {
    let (templates, metas) = (objects.templates.iter().cloned(), objects.release_metas.iter().cloned());
    let snapshot = Snapshot::new(templates, metas, restricted, BTreeSet::new());
    let class = snapshot.class(&kyma.labels);
    let mut modules: Vec<_> = snapshot.modules(&class).into_iter().map(ModuleView::of).collect();
    modules.extend(unreleased(objects, &modules));
    modules.sort_by(|a, b| a.module.cmp(&b.module));
    View {
        kyma: kyma.name.clone(),
        namespace: kyma.namespace.clone(),
        class,
        modules,
        left_out: snapshot.omissions().iter().map(OmissionView::of).collect(),
        held: Ledger::held(releases).map(|held| held.modules).unwrap_or_default(),
    }
}

/// Modules with templates but without a valid release meta.
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
        visibility: Visibility::no_release_meta(),
        channels: Vec::new(),
        versions: versions
            .into_iter()
            .map(|version| VersionView { version: version.to_owned(), visibility: Visibility::no_release_meta() })
            .collect(),
    };
    modules.into_iter().map(view).collect()
}

impl ModuleView {
    /// Channels and versions without a rule of their own inherit the rule that hides the module.
    fn of(module: ModuleVisibility) -> Self {
        let ModuleVisibility { module, hidden, channels, versions } = module;
        let own_or_module = |own: Option<&HidingRule>| Visibility::of(own.or(hidden.as_ref()));
        let channels = channels.into_iter().map(|(channel, found)| {
            let visibility = own_or_module(found.as_ref().err());
            ChannelView { channel, template: found.ok().filter(|_| visibility.visible), visibility }
        });
        let channels = channels.collect();
        let versions =
            versions.into_iter().map(|(version, own)| VersionView { version, visibility: own_or_module(own.as_ref()) });
        Self { module, versions: versions.collect(), channels, visibility: Visibility::of(hidden.as_ref()) }
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = format!("Kyma {}/{}: {}\n\n", self.namespace, self.kyma, self.class);
        f.write_str(&head)?;
        let row = |module: &str, channel: &str, version: &str, visibility: &Visibility| {
            let rule = visibility.rule.unwrap_or("visible").to_owned();
            [
                module.to_owned(),
                channel.to_owned(),
                version.to_owned(),
                rule,
                visibility.reason.clone().unwrap_or_default(),
            ]
        };
        let mut rows = Vec::new();
        for module in &self.modules {
            rows.push(row(&module.module, "-", "-", &module.visibility));
            for channel in &module.channels {
                rows.push(row("", &channel.channel, channel.template.as_deref().unwrap_or("-"), &channel.visibility));
            }
            for version in &module.versions {
                rows.push(row("", "-", &version.version, &version.visibility));
            }
        }
        f.write_str(&table::aligned(["MODULE", "CHANNEL", "VERSION", "RULE", "WHY"], rows))?;
        for OmissionView { object, message, .. } in &self.left_out {
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

    fn kyma(labels: &[(&str, &str)]) -> KymaMeta {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        KymaMeta { name: "k".to_owned(), namespace: "kcp-system".to_owned(), labels }
    }

    #[test]
    fn hidden_modules_report_their_rule() {
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
        let view = super::view(&kyma(&[]), &objects, &restricted, None);
        let rule = |visibility: &Visibility| visibility.rule.unwrap_or("visible");
        let modules: Vec<_> = view.modules.iter().map(|module| (&*module.module, rule(&module.visibility))).collect();
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
        let channels: Vec<_> =
            keda.channels.iter().map(|channel| (&*channel.channel, rule(&channel.visibility))).collect();
        assert_eq!(channels, [("fast", "beta"), ("next", "no-template"), ("regular", "visible")]);
        assert_eq!(keda.channels[2].template.as_deref(), Some("keda-1.0.0"));
        let versions: Vec<_> =
            keda.versions.iter().map(|version| (&*version.version, rule(&version.visibility))).collect();
        assert_eq!(versions, [("1.0.0", "visible"), ("1.1.0", "beta")]);
        assert_eq!(rule(&view.modules[2].channels[0].visibility), "restricted-not-matching", "hidden with its module");
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

        let other = super::view(&kyma(&[(label::BETA, "true"), ("team", "a")]), &objects, &restricted, None);
        assert!(other.modules[0].channels[0].visibility.visible && other.modules[2].visibility.visible);
        assert_eq!(other.class.to_string(), "beta, selected for secret");
    }
}
