//! The selection of a Kyma as KCP knows it.

use std::{collections::BTreeSet, sync::Arc};

use kube::ResourceExt as _;
use tidewatch_api::{
    Kyma, KymaSpec, Manifest, Module,
    labels::is_true,
    names::{annotation, label},
    selection::{Pins, UserSelection},
};
use tidewatch_select::kyma::{
    installed::{is_unmanaged, module_of},
    mandatory::is_mandatory,
    validate::{Validated, validate},
};

/// Selection of a Kyma, and its source.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Selection {
    /// The one that the last reconcile accepted; for a new Kyma that of KCP.
    Accepted(UserSelection),
    /// It was never accepted, or is too large to be recorded: the installed modules, each in its channel or version.
    Installed(UserSelection),
}

/// Finds the selection of a Kyma with these Manifests.
pub(super) fn selection_of(kyma: &Kyma, manifests: &[Arc<Manifest>]) -> Selection {
    let is_recorded = kyma.annotations().contains_key(annotation::ACCEPTED_SPEC);
    let is_reset = is_true(Some(kyma.labels()), label::RESET_MODULES);
    if is_recorded || is_reset || manifests.is_empty() {
        let accepted = UserSelection::accepted(kyma).filter(|_| !is_reset).and_then(Result::ok);
        return Selection::Accepted(accepted.unwrap_or_else(|| UserSelection::of_spec(kyma)));
    }
    let is_selected = |manifest: &&Arc<Manifest>| {
        manifest.metadata.deletion_timestamp.is_none() && !is_mandatory(manifest) && module_of(manifest).is_some()
    };
    let selected: Vec<_> = manifests.iter().filter(is_selected).collect();
    let modules = selected.iter().map(|manifest| Module {
        name: module_of(manifest).unwrap_or_default().to_owned(),
        channel: channel_of(manifest).map(str::to_owned),
        managed: !is_unmanaged(manifest),
        custom_resource_policy: manifest.spec.custom_resource_policy,
        ..Module::default()
    });
    let spec = KymaSpec { modules: Some(modules.collect()), ..kyma.spec.clone() };
    let pinned = selected.iter().filter(|manifest| channel_of(manifest).is_none());
    let pins = pinned.filter_map(|manifest| Some((module_of(manifest)?.to_owned(), manifest.spec.version.clone()?)));
    Selection::Installed(UserSelection { spec, pins: Pins::new(pins) })
}

/// Channel that named the version of a Manifest; `None` for a pinned version.
fn channel_of(manifest: &Manifest) -> Option<&str> {
    manifest.labels().get(label::CHANNEL).map(String::as_str).filter(|channel| !channel.is_empty())
}

impl Selection {
    /// The valid selection with the pins of this Kyma in KCP, limited to these modules; `None` if it is invalid.
    pub(super) fn validated(&self, kyma: &Kyma, modules: &BTreeSet<String>) -> Option<Validated> {
        let (Self::Accepted(selection) | Self::Installed(selection)) = self;
        let mut validated = validate(selection, kyma.annotations()).ok()?;
        validated.modules.retain(|module| modules.contains(&module.name));
        Some(validated)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn kyma(labels: &Value, annotations: &Value) -> Kyma {
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": "k", "labels": labels, "annotations": annotations},
            "spec": {"channel": "fast", "modules": [{"name": "default"}]}}))
        .unwrap()
    }

    fn manifest(module: &str, metadata: Value) -> Arc<Manifest> {
        let mut manifest = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": module, "labels": {label::MODULE_NAME: module}},
            "spec": {"remote": true, "version": "1.0.0", "install": {"name": "raw-manifest", "source": {}}}});
        for (member, value) in metadata.as_object().unwrap() {
            let Some(members) = value.as_object() else {
                manifest["metadata"][member] = value.clone();
                continue;
            };
            members.iter().for_each(|(key, value)| manifest["metadata"][member][key] = value.clone());
        }
        Arc::new(serde_json::from_value(manifest).unwrap())
    }

    fn names(selection: &Selection) -> Vec<&str> {
        let (Selection::Accepted(selection) | Selection::Installed(selection)) = selection;
        selection.spec.modules().iter().map(|module| module.name.as_str()).collect()
    }

    #[test]
    fn accepted_selection_counts_unless_it_is_to_be_reset() {
        let accepted =
            json!({annotation::ACCEPTED_SPEC: json!({"channel": "fast", "modules": [{"name": "mine"}]}).to_string()});
        let installed = [manifest("installed", json!({}))];
        let of = |kyma: &Kyma, manifests: &[Arc<Manifest>]| {
            let selection = selection_of(kyma, manifests);
            (matches!(selection, Selection::Accepted(_)), names(&selection).join(" "))
        };
        assert_eq!(of(&kyma(&json!({}), &accepted), &installed), (true, "mine".to_owned()));
        let reset = json!({label::RESET_MODULES: "true"});
        assert_eq!(of(&kyma(&reset, &accepted), &installed), (true, "default".to_owned()));
        assert_eq!(of(&kyma(&reset, &json!({})), &installed), (true, "default".to_owned()));
        assert_eq!(of(&kyma(&json!({}), &json!({})), &[]), (true, "default".to_owned()), "a new Kyma");
        assert_eq!(of(&kyma(&json!({}), &json!({})), &installed), (false, "installed".to_owned()));
    }

    #[test]
    fn installed_modules_keep_their_channel_or_version() {
        let manifests = [
            manifest("channel", json!({"labels": {label::CHANNEL: "regular"}})),
            manifest("pinned", json!({"labels": {label::CHANNEL: ""}})),
            manifest("unmanaged", json!({"annotations": {annotation::UNMANAGED: "true"}})),
            manifest("leaving", json!({"deletionTimestamp": "2026-01-01T00:00:00Z"})),
            manifest("mandatory", json!({"labels": {label::MANDATORY_MODULE: "true"}})),
        ];
        let kyma = kyma(&json!({}), &json!({}));
        let selection = selection_of(&kyma, &manifests);
        let Selection::Installed(UserSelection { spec, pins }) = &selection else { panic!("{selection:?}") };
        let modules: Vec<_> = spec
            .modules()
            .iter()
            .map(|it| (it.name.as_str(), it.channel.as_deref(), pins.of_module(&it.name), it.managed))
            .collect();
        let expected = [
            ("channel", Some("regular"), None, true),
            ("pinned", None, Some("1.0.0"), true),
            ("unmanaged", None, Some("1.0.0"), false),
        ];
        assert_eq!(modules, expected);
        let some = BTreeSet::from(["pinned".to_owned(), "other".to_owned()]);
        let validated = selection.validated(&kyma, &some).unwrap();
        assert_eq!(validated.modules.iter().map(|module| module.name.as_str()).collect::<Vec<_>>(), ["pinned"]);
    }
}
