//! Status entries of modules.

use jiff::civil::Date;
use kube::{Resource, ResourceExt};
use serde_json::Value;
use tidewatch_api::{
    CustomResourcePolicy, Manifest, ModuleStatus, PartialMeta, State, TrackingObject,
    names::{GROUP, SKR_NAMESPACE, VERSION, annotation, label},
};
use tidewatch_engine::CreatedDefault;
use tidewatch_select::{
    catalog::retirement,
    kyma::{
        lookup::{LookupError, Resolved, Waiting},
        validate::WantedModule,
    },
};

/// Maximal number of modules in a status that cannot be installed. An API server needs as much time for a status with
/// hundreds of entries as for many small writes.
const MAX_REFUSED: usize = 50;

/// The status of a resolved module. `manifest` is its current Manifest; without one the module is not installed yet. The
/// day decides whether the version is retired, or will be.
pub(crate) fn resolved(
    module: &WantedModule,
    found: &Resolved,
    manifest: Option<&Manifest>,
    today: Date,
) -> ModuleStatus {
    let status = ModuleStatus {
        name: module.name.clone(),
        fqdn: Some(found.component.clone()),
        ocm_component_name: Some(found.component.clone()),
        channel: found.channel.clone().or_else(|| desired_channel(module)),
        version: manifest.map_or_else(|| Some(found.version.clone()), |manifest| manifest.spec.version.clone()),
        ..ModuleStatus::default()
    };
    if !module.managed {
        return ModuleStatus { state: State::Unmanaged, ..status };
    }
    let template = &found.template;
    let state = manifest.map_or(State::Processing, state_of);
    let notice = status.version.as_deref().and_then(|running| retirement::notice(&found.meta, running, today));
    let is_retired = notice.as_ref().is_some_and(|notice| notice.is_in_force);
    let operation = manifest.filter(|manifest| recorded_state(manifest) != State::Ready).and_then(operation_of);
    ModuleStatus {
        // It works, but its version is deprecated or withdrawn.
        state: if is_retired && state == State::Ready { State::Warning } else { state },
        message: with_pin(module, operation.or(notice.map(|notice| notice.text))),
        manifest: manifest.map(|manifest| tracking("Manifest", manifest)),
        resource: resource(module, found, manifest),
        template: Some(tracking("ModuleTemplate", template.as_ref())),
        ..status
    }
}

/// Channel that a status shows without a channel that named the version. The Kyma CLI deletes no module without one.
fn desired_channel(module: &WantedModule) -> Option<String> {
    module.channel().map(str::to_owned)
}

/// Adds the notice of a pin to a message.
fn with_pin(module: &WantedModule, message: Option<String>) -> Option<String> {
    match (message, module.pin()) {
        (Some(message), Some(pin)) => Some(format!("{message}; {pin}")),
        (message, pin) => message.or_else(|| pin.map(ToString::to_string)),
    }
}

/// The status of a module that did not resolve; `old` is its current entry, `manifest` its installed Manifest, which
/// the entry keeps.
pub(crate) fn unresolved(
    module: &WantedModule,
    error: &LookupError,
    old: Option<&ModuleStatus>,
    manifest: Option<&Manifest>,
) -> ModuleStatus {
    let goes_on = manifest.is_some()
        && matches!(
            error,
            LookupError::Downgrade { .. }
                | LookupError::WithdrawnUpdate { .. }
                | LookupError::UnknownVersion(_)
                | LookupError::NoReleaseMeta { .. }
                | LookupError::Waiting(_)
                | LookupError::UnknownWindow(_)
        );
    let old = old.filter(|_| goes_on).cloned().unwrap_or_default();
    let state = match error {
        LookupError::UnknownWindow(_) => State::Error,
        LookupError::Waiting(_) => manifest.map_or(State::Error, state_of),
        // Mistakes of the user, which keep no other module from being installed.
        LookupError::Mandatory { .. } | LookupError::NoReleaseMeta { .. } => State::Warning,
        _ if goes_on => State::Warning,
        _ => State::Error,
    };
    ModuleStatus {
        name: module.name.clone(),
        state,
        channel: old.channel.clone().or_else(|| desired_channel(module)),
        message: with_pin(module, Some(error.to_string())),
        maintenance: matches!(error, LookupError::Waiting(_)).then_some(true),
        manifest: manifest.map(|manifest| tracking("Manifest", manifest)),
        ..old
    }
}

/// Removes all but the first entries of modules that are in state Error or Warning and not installed, in their order. Returns
/// the text that reports the removed ones.
pub(crate) fn limit_refused(statuses: &mut Vec<ModuleStatus>) -> Option<String> {
    let mut refused = 0_usize;
    statuses.retain(|status| {
        let is_refused = matches!(status.state, State::Error | State::Warning) && status.manifest.is_none();
        refused += usize::from(is_refused);
        !is_refused || refused <= MAX_REFUSED
    });
    (refused > MAX_REFUSED).then(|| {
        format!(
            "{refused} of the selected modules cannot be installed; the status shows the first {MAX_REFUSED} of them"
        )
    })
}

/// The status of an installed module whose upgrade waits for a maintenance window.
pub(crate) fn waiting(status: ModuleStatus, waiting: &Waiting) -> ModuleStatus {
    let message = match &status.message {
        Some(message) => format!("{message}; {waiting}"),
        None => waiting.to_string(),
    };
    ModuleStatus { maintenance: Some(true), message: Some(message), ..status }
}

/// The status of a deselected module as long as its Manifest exists.
pub(crate) fn removed(manifest: &Manifest, old: Option<&ModuleStatus>) -> ModuleStatus {
    let component = manifest.annotations().get(annotation::OCM_COMPONENT_NAME).cloned();
    ModuleStatus {
        name: manifest.labels().get(label::MODULE_NAME).cloned().unwrap_or_else(|| manifest.name_any()),
        fqdn: component.clone(),
        ocm_component_name: component,
        // The Manifest of a pinned module names none.
        channel: manifest.labels().get(label::CHANNEL).or_else(|| old?.channel.as_ref()).cloned(),
        version: manifest.spec.version.clone(),
        // The last operation of the Manifest names the blocking objects.
        message: operation_of(manifest),
        state: State::Deleting,
        maintenance: None,
        manifest: Some(tracking("Manifest", manifest)),
        ..old.cloned().unwrap_or_default()
    }
}

fn state_of(manifest: &Manifest) -> State {
    if manifest.metadata.deletion_timestamp.is_some() {
        return State::Deleting;
    }
    match recorded_state(manifest) {
        // The state is that of the previous version.
        State::Ready if is_layer_outdated(manifest) => State::Processing,
        state => state,
    }
}

fn recorded_state(manifest: &Manifest) -> State {
    manifest.status.as_ref().map(|status| status.state).unwrap_or_default().known()
}

/// Returns true if the applied layer is not the one that the Manifest names: an upgrade has begun.
fn is_layer_outdated(manifest: &Manifest) -> bool {
    manifest.annotations().contains_key(annotation::SYNC_OCI_REF) && !manifest.is_synced()
}

/// Cause of a Manifest's state, in one sentence.
pub(super) fn operation_of(manifest: &Manifest) -> Option<String> {
    let last = manifest.status.as_ref()?.last_operation.as_ref()?;
    Some(last.operation.clone()).filter(|operation| !operation.is_empty())
}

fn tracking<K: Resource>(kind: &str, object: &K) -> Box<TrackingObject> {
    Box::new(TrackingObject {
        api_version: Some(format!("{GROUP}/{VERSION}")),
        kind: Some(kind.to_owned()),
        metadata: Some(PartialMeta {
            name: Some(object.name_any()),
            namespace: object.namespace(),
            generation: object.meta().generation,
            ..PartialMeta::default()
        }),
        ..TrackingObject::default()
    })
}

/// The default module CR if the policy creates it: that of an earlier version if one was created for it, since it stays.
fn resource(module: &WantedModule, found: &Resolved, manifest: Option<&Manifest>) -> Option<Box<TrackingObject>> {
    if module.policy != CustomResourcePolicy::CreateAndDelete {
        return None;
    }
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let data = found.template.spec.data.as_ref().unwrap_or(&Value::Null);
    let named = CreatedDefault {
        api_version: text(&data["apiVersion"]).unwrap_or_default(),
        kind: text(&data["kind"]).unwrap_or_default(),
        namespace: text(&data["metadata"]["namespace"]).unwrap_or_else(|| SKR_NAMESPACE.to_owned()),
        name: text(&data["metadata"]["name"]).or_else(|| manifest.map(ResourceExt::name_any)).unwrap_or_default(),
    };
    let recorded = manifest.and_then(CreatedDefault::recorded).map(|created| {
        // The version in which it was created may not be served any more.
        let is_same_kind = (created.group(), &created.kind) == (named.group(), &named.kind);
        let api_version = if is_same_kind { named.api_version.clone() } else { created.api_version.clone() };
        CreatedDefault { api_version, ..created }
    });
    let CreatedDefault { api_version, kind, namespace, name } = recorded.unwrap_or(named);
    let some = |text: String| Some(text).filter(|text| !text.is_empty());
    let cluster_scoped =
        found.template.annotations().get(annotation::CLUSTER_SCOPED).is_some_and(|value| value == "true");
    Some(Box::new(TrackingObject {
        kind: Some(some(kind)?),
        api_version: some(api_version),
        metadata: Some(PartialMeta {
            name: some(name),
            namespace: Some(namespace).filter(|_| !cluster_scoped),
            ..PartialMeta::default()
        }),
        ..TrackingObject::default()
    }))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;
    use tidewatch_api::KymaStatus;
    use tidewatch_select::kyma::{
        pin::{Pin, PinnedIn},
        validate::Follow,
    };

    use super::*;
    use crate::kyma::status::for_runtime;

    fn pin() -> Pin {
        Pin::parse("template-operator", "2.0.0", PinnedIn::Runtime, "regular".to_owned()).unwrap()
    }

    fn resolved(module: &WantedModule, found: &Resolved, manifest: Option<&Manifest>) -> ModuleStatus {
        super::resolved(module, found, manifest, jiff::civil::date(2026, 6, 1))
    }

    fn wanted(managed: bool) -> WantedModule {
        let policy = CustomResourcePolicy::CreateAndDelete;
        WantedModule { name: "keda".into(), follows: Ok(Follow::Channel("fast".into())), managed, policy }
    }

    fn found() -> Resolved {
        let template = serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
            "metadata": {"name": "keda-2.0.0", "namespace": "kcp-system", "generation": 3},
            "spec": {"moduleName": "keda", "version": "2.0.0", "descriptor": {},
                     "data": {"apiVersion": "a/v1", "kind": "Keda", "metadata": {"name": "default"}}}
        }));
        Resolved {
            template: Arc::new(template.unwrap()),
            channel: Some("fast".into()),
            version: "2.0.0".into(),
            component: "kyma-project.io/module/keda".into(),
            meta: Arc::default(),
        }
    }

    fn manifest(status: Value) -> Manifest {
        let mut manifest = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "k-keda-1", "namespace": "kcp-system", "generation": 2, "labels": {
                "operator.kyma-project.io/module-name": "keda", "operator.kyma-project.io/channel": "regular"
            }},
            "spec": {"remote": true, "version": "1.0.0", "install": {"name": "raw-manifest", "source": {}}}
        });
        if !status.is_null() {
            manifest["status"] = status;
        }
        serde_json::from_value(manifest).unwrap()
    }

    #[test]
    fn manifest_without_state_is_processing() {
        for (status, state) in [
            (Value::Null, State::Processing),
            (json!({"state": ""}), State::Processing),
            (json!({"state": "Ready"}), State::Ready),
            (json!({"state": "Warning"}), State::Warning),
        ] {
            assert_eq!(resolved(&wanted(true), &found(), Some(&manifest(status.clone()))).state, state, "{status}");
        }
        let new = resolved(&wanted(true), &found(), None);
        assert_eq!((new.state, new.version.as_deref(), new.manifest), (State::Processing, Some("2.0.0"), None));
    }

    #[test]
    fn operation_of_the_manifest_is_the_message_unless_it_is_ready() {
        for (state, message) in
            [("Processing", Some("o")), ("Error", Some("o")), ("Warning", Some("o")), ("Ready", None)]
        {
            let status = json!({"state": state, "lastOperation": {"operation": "o"}});
            let status = resolved(&wanted(true), &found(), Some(&manifest(status)));
            assert_eq!(status.message.as_deref(), message, "{state}");
        }
    }

    #[test]
    fn upgrade_is_processing_until_its_layer_is_applied() {
        for (applied, shown) in [(None, State::Ready), (Some("new"), State::Ready), (Some("old"), State::Processing)] {
            let mut manifest =
                manifest(json!({"state": "Ready", "lastOperation": {"operation": "resources are ready"}}));
            Arc::make_mut(&mut manifest.spec.install.source)["ref"] = json!("new");
            manifest.annotations_mut().extend(applied.map(|layer| (annotation::SYNC_OCI_REF.into(), layer.into())));
            let status = resolved(&wanted(true), &found(), Some(&manifest));
            assert_eq!((status.state, status.message), (shown, None), "{applied:?}");
        }
    }

    #[test]
    fn failed_upgrade_names_its_cause() {
        let operation = "failed to apply Deployment kyma-system/keda: forbidden";
        let mut manifest = manifest(json!({"state": "Error", "lastOperation": {"operation": operation}}));
        Arc::make_mut(&mut manifest.spec.install.source)["ref"] = json!("new");
        manifest.annotations_mut().insert(annotation::SYNC_OCI_REF.into(), "old".into());
        let status = resolved(&wanted(true), &found(), Some(&manifest));
        assert_eq!((status.state, status.message.as_deref()), (State::Error, Some(operation)));
    }

    #[test]
    fn resolved_module_references_template_and_manifest() {
        let status = resolved(&wanted(true), &found(), Some(&manifest(json!({"state": "Ready"}))));
        assert_eq!(
            serde_json::to_value(status).unwrap(),
            json!({
                "name": "keda", "state": "Ready", "channel": "fast", "version": "1.0.0",
                "fqdn": "kyma-project.io/module/keda", "ocmComponentName": "kyma-project.io/module/keda",
                "manifest": {"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
                             "metadata": {"name": "k-keda-1", "namespace": "kcp-system", "generation": 2}},
                "template": {"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
                             "metadata": {"name": "keda-2.0.0", "namespace": "kcp-system", "generation": 3}},
                "resource": {"apiVersion": "a/v1", "kind": "Keda", "metadata": {"name": "default", "namespace": "kyma-system"}}
            })
        );
    }

    /// `acceptance.md` C2 49.
    #[test]
    fn default_cr_of_a_cluster_scoped_kind_has_no_namespace_in_either_status() {
        for (value, namespace) in [("true", None), ("false", Some(SKR_NAMESPACE))] {
            let mut found = found();
            let annotations = Arc::make_mut(&mut found.template).annotations_mut();
            annotations.insert(annotation::CLUSTER_SCOPED.into(), value.into());
            let module = resolved(&wanted(true), &found, Some(&manifest(json!({"state": "Ready"}))));
            let in_kcp = KymaStatus { modules: Some(vec![module]), ..KymaStatus::default() };
            for status in [in_kcp.clone(), for_runtime(in_kcp)] {
                let resource = status.modules()[0].resource.as_ref().unwrap();
                assert_eq!(resource.metadata.as_ref().unwrap().namespace.as_deref(), namespace, "{value}");
            }
        }
    }

    #[test]
    fn default_cr_of_an_earlier_version_is_the_one_that_exists() {
        let resource = |recorded: Value| {
            let mut manifest = manifest(json!({"state": "Ready"}));
            manifest.annotations_mut().insert(annotation::CREATED_DEFAULT.into(), recorded.to_string());
            let resource = resolved(&wanted(true), &found(), Some(&manifest)).resource.unwrap();
            let name = resource.metadata.unwrap().name;
            (resource.kind, resource.api_version, name)
        };
        let created = |version: &str, kind: &str| json!({"apiVersion": version, "kind": kind, "namespace": "kyma-system", "name": "former"});
        assert_eq!(resource(created("a/v1alpha1", "Keda")), (some("Keda"), some("a/v1"), some("former")));
        assert_eq!(resource(created("b/v1", "Keda")), (some("Keda"), some("b/v1"), some("former")));
        assert_eq!(resource(json!("malformed")), (some("Keda"), some("a/v1"), some("default")));
    }

    /// `keda` with this entry of the version 1.0.0 in its release meta.
    fn found_with(entry: &Value) -> Resolved {
        let mut versions = json!([{"version": "1.0.0"}, {"version": "2.0.0"}]);
        entry.as_object().unwrap().iter().for_each(|(key, value)| versions[0][key] = value.clone());
        let meta = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"name": "keda"}, "spec": {"moduleName": "keda", "channels": [], "versions": versions}});
        Resolved { meta: Arc::new(serde_json::from_value(meta).unwrap()), ..found() }
    }

    #[test]
    fn deprecated_version_is_only_a_warning_and_an_announcement_not_even_that() {
        for (date, verb, ready) in [
            ("2026-06-01", "is deprecated as of", State::Warning),
            ("2026-06-02", "will be deprecated on", State::Ready),
        ] {
            let found = found_with(&json!({"deprecationDate": date, "deprecationMessage": "use 2.0.0"}));
            let said = format!("version 1.0.0 of module keda {verb} {date}: use 2.0.0");
            for (state, shown) in [("Ready", ready), ("Error", State::Error), ("Processing", State::Processing)] {
                let status = resolved(&wanted(true), &found, Some(&manifest(json!({"state": state}))));
                assert_eq!((status.state, status.message.as_deref()), (shown, Some(&*said)), "{state}");
            }
            let new = resolved(&wanted(true), &found, None);
            assert_eq!((new.state, new.message), (State::Processing, None), "nothing is said of 2.0.0");
        }
    }

    #[test]
    fn pinned_module_has_the_channel_that_it_would_follow_and_names_its_pin() {
        let module = |managed| WantedModule { follows: Ok(Follow::Pin(pin())), ..wanted(managed) };
        let found = || Resolved { channel: None, ..found() };
        let notice = pin().to_string();
        let status = resolved(&module(true), &found(), None);
        let shown = |status: &ModuleStatus| (status.channel.clone(), status.message.clone());
        assert_eq!((shown(&status), status.version.as_deref()), ((some("regular"), some(&notice)), Some("2.0.0")));
        let failed = manifest(json!({"state": "Error", "lastOperation": {"operation": "o"}}));
        let status = resolved(&module(true), &found(), Some(&failed));
        assert_eq!(shown(&status), (some("regular"), Some(format!("o; {notice}"))));
        let unmanaged = resolved(&module(false), &found(), None);
        assert_eq!(shown(&unmanaged), (some("regular"), None));

        let missing = LookupError::NoTemplate("keda-2.0.0".into());
        let status = unresolved(&module(true), &missing, None, None);
        assert_eq!(shown(&status), (some("regular"), Some(format!("{missing}; {notice}"))));
        let old = ModuleStatus { channel: some("fast"), ..ModuleStatus::default() };
        let mut without_channel = manifest(Value::Null);
        without_channel.labels_mut().remove(label::CHANNEL);
        assert_eq!(removed(&without_channel, Some(&old)).channel, some("fast"));
    }

    fn some(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn an_unmanaged_module_names_nothing_of_ours() {
        let status = resolved(&wanted(false), &found(), Some(&manifest(json!({"state": "Ready"}))));
        assert_eq!(
            (status.state, status.manifest, status.resource, status.template),
            (State::Unmanaged, None, None, None)
        );
    }

    #[test]
    fn a_lookup_error_is_an_error_unless_something_installed_can_be_kept_or_the_module_cannot_be_selected() {
        let manifest = manifest(json!({"state": "Ready"}));
        let old = ModuleStatus { version: Some("1.0.0".into()), state: State::Ready, ..ModuleStatus::default() };
        let missing = LookupError::NoReleaseMeta { module: "keda".into(), namespace: "kcp-system".into() };
        let kept = unresolved(&wanted(true), &missing, Some(&old), Some(&manifest));
        assert_eq!((kept.state, kept.version.as_deref()), (State::Warning, Some("1.0.0")));
        let again = unresolved(
            &wanted(true),
            &missing,
            Some(&ModuleStatus { state: State::Error, ..ModuleStatus::default() }),
            None,
        );
        assert_eq!((again.state, again.manifest), (State::Warning, None));
        let channel = LookupError::NoSuchChannel { channel: "rapid".into(), module: "keda".into() };
        let fresh = unresolved(&wanted(true), &channel, Some(&old), Some(&manifest));
        assert_eq!((fresh.state, fresh.version.as_deref()), (State::Error, None));
        let name = fresh.manifest.and_then(|manifest| manifest.metadata?.name);
        assert_eq!(name.as_deref(), Some("k-keda-1"), "the installed Manifest stays visible");
        let mandatory = LookupError::Mandatory { template: "keda-1".into(), channel: "fast".into() };
        assert_eq!(unresolved(&wanted(true), &mandatory, None, None).state, State::Warning);
    }

    #[test]
    fn removed_module_reports_its_blocking_objects() {
        let waiting =
            manifest(json!({"state": "Deleting", "lastOperation": {"operation": "waiting for module crs deletion"}}));
        let status = removed(&waiting, None);
        assert_eq!((status.name.as_str(), status.state), ("keda", State::Deleting));
        assert_eq!(status.message.as_deref(), Some("waiting for module crs deletion"));
    }
}
