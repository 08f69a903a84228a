//! Visibility of KCP's catalog to one Kyma, with the rule that hides each hidden part. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use jiff::civil::Date;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::core::ObjectMeta;
use serde::Serialize;
use tidewatch_kit::{table, variant::VariantName as _};
use tidewatch_select::catalog::{
    releases::Ledger,
    removal_guard::{HeldRemoval, LostReleases},
    retirement,
    snapshot::{ModuleVisibility, Snapshot},
    visibility::{HidingRule, VisibilityClass},
};

use super::{check::Objects, preview::OmissionView};

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
    /// Removals that wait for a confirmation: until then runtimes keep what they have.
    pub held: Vec<HeldRemoval>,
    /// Hold of every removal, because the accepted state is lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<LostReleases>,
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
    /// Deprecation or withdrawal of the version that the channel points to, as its users see it; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub notice: Option<String>,
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
    /// Deprecation or withdrawal of the version, as its users see it; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub notice: Option<String>,
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
}

/// Computes the visibility of these objects to the Kyma with this metadata; `restricted` are the modules of
/// `--restricted-default-modules`, `releases` is the ConfigMap of releases, and `today` the day on which versions are
/// deprecated or withdrawn.
pub fn view(
    kyma: ObjectMeta,
    objects: &Objects,
    restricted: &BTreeSet<String>,
    releases: Option<&ConfigMap>,
    today: Date,
) -> View {
    let templates = objects.templates.iter().cloned();
    let metas = objects.release_metas.iter().cloned();
    let snapshot = Snapshot::new(templates, metas, restricted, BTreeSet::new());
    let class = snapshot.class(&kyma.labels.unwrap_or_default());
    let mut modules = snapshot.modules(&class);
    modules.extend(unreleased(objects, &modules));
    modules.sort_by(|a, b| a.module.cmp(&b.module));
    View {
        kyma: kyma.name.unwrap_or_default(),
        namespace: kyma.namespace.unwrap_or_default(),
        class,
        modules: modules.into_iter().map(|module| ModuleView::of(module, &snapshot, today)).collect(),
        left_out: OmissionView::all(&snapshot),
        held: Ledger::held(releases),
        lost: Ledger::lost(releases),
    }
}

/// Modules with templates but without a valid release meta.
fn unreleased(objects: &Objects, released: &[ModuleVisibility]) -> Vec<ModuleVisibility> {
    let mut modules = BTreeMap::new();
    for template in &objects.templates {
        if let (Some(module), Some(version)) = (template.spec.module_name.as_deref(), template.spec.version.as_deref())
            && !module.is_empty()
            && released.iter().all(|released| released.module != module)
        {
            let unreleased = modules.entry(module).or_insert_with(|| ModuleVisibility {
                module: module.to_owned(),
                hidden: Some(HidingRule::NoReleaseMeta),
                channels: BTreeMap::new(),
                versions: BTreeMap::new(),
            });
            unreleased.versions.insert(version.to_owned(), None);
        }
    }
    modules.into_values().collect()
}

impl ModuleView {
    /// Channels and versions without a rule of their own inherit the rule that hides the module.
    fn of(module: ModuleVisibility, snapshot: &Snapshot, today: Date) -> Self {
        let ModuleVisibility { module, hidden, channels, versions } = module;
        let meta = snapshot.release_meta(&module).map(|(meta, _)| meta);
        let notice = |version: &str| Some(retirement::notice(meta?, version, today)?.text);
        let own_or_module = |own: Option<&HidingRule>| Visibility::of(own.or(hidden.as_ref()));
        let channels = channels.into_iter().map(|(channel, found)| {
            let visibility = own_or_module(found.as_ref().err());
            let notice = meta.and_then(|meta| notice(meta.spec.version_of(&channel)?));
            ChannelView { channel, template: found.ok().filter(|_| visibility.visible), visibility, notice }
        });
        let channels = channels.collect();
        let versions = versions.into_iter().map(|(version, own)| {
            let notice = notice(&version);
            VersionView { version, visibility: own_or_module(own.as_ref()), notice }
        });
        Self { module, versions: versions.collect(), channels, visibility: Visibility::of(hidden.as_ref()) }
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = format!("Kyma {}/{}: {}\n\n", self.namespace, self.kyma, self.class);
        f.write_str(&head)?;
        let row = |module: &str, channel: &str, version: &str, visibility: &Visibility, notice: &Option<String>| {
            let rule = visibility.rule.unwrap_or("visible");
            let reason = visibility.reason.as_deref().or(notice.as_deref()).unwrap_or_default();
            [module, channel, version, rule, reason].map(str::to_owned)
        };
        let mut rows = Vec::new();
        for module in &self.modules {
            rows.push(row(&module.module, "-", "-", &module.visibility, &None));
            for channel in &module.channels {
                let template = channel.template.as_deref().unwrap_or("-");
                rows.push(row("", &channel.channel, template, &channel.visibility, &channel.notice));
            }
            for version in &module.versions {
                rows.push(row("", "-", &version.version, &version.visibility, &version.notice));
            }
        }
        f.write_str(&table::aligned(["MODULE", "CHANNEL", "VERSION", "RULE", "WHY"], rows))?;
        let left_out = self.left_out.iter().map(|OmissionView { object, message, .. }| format!("{object}: {message}"));
        let held = self.held.iter().map(HeldRemoval::to_string);
        let lost = self.lost.iter().map(LostReleases::to_string);
        left_out.chain(held).chain(lost).try_for_each(|line| writeln!(f, "{}", table::sanitize(&line)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};
    use tidewatch_api::names::label;

    use super::*;

    const TODAY: Date = jiff::civil::date(2026, 6, 1);

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

    fn kyma(labels: &[(&str, &str)]) -> ObjectMeta {
        serde_json::from_value(json!({"name": "k", "namespace": "kcp-system",
            "labels": labels.iter().copied().collect::<BTreeMap<_, _>>()}))
        .unwrap()
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
        let view = super::view(kyma(&[]), &objects, &restricted, None, TODAY);
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

        let other = super::view(kyma(&[(label::BETA, "true"), ("team", "a")]), &objects, &restricted, None, TODAY);
        assert!(other.modules[0].channels[0].visibility.visible && other.modules[2].visibility.visible);
        assert_eq!(other.class.to_string(), "beta, selected for secret");
    }

    #[test]
    fn withdrawn_version_is_shown_with_its_replacement() {
        let meta = json!({"moduleName": "keda", "channels": [{"channel": "regular", "version": "1.0.0"}],
            "versions": [{"version": "1.0.0", "withdrawal": {"date": "2026-06-01", "replacement": "1.1.0"}}]});
        let objects = objects(&[("keda", "1.0.0", &[], false), ("keda", "1.1.0", &[], false)], &[meta]);
        let view = super::view(kyma(&[]), &objects, &BTreeSet::new(), None, TODAY);
        let text = "version 1.0.0 of module keda is withdrawn as of 2026-06-01, use version 1.1.0";
        let json = serde_json::to_value(&view).unwrap();
        assert_eq!(json["modules"][0]["channels"][0]["notice"], text);
        assert_eq!(json["modules"][0]["versions"][0], json!({"version": "1.0.0", "visible": true, "notice": text}));
        assert_eq!(json["modules"][0]["versions"][1], json!({"version": "1.1.0", "visible": true}));
        assert_eq!(view.to_string().matches(text).count(), 2, "{view}");
    }
}
