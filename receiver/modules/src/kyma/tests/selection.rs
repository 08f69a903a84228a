//! The user's choice of a channel or a version, for the Kyma and for each module.

use std::collections::BTreeMap;

use tidewatch_api::names::annotation;

use super::*;

impl Bed {
    /// `keda` 1.0.0 in the channel `regular` and 1.1.0 in `fast`, of which the Kyma follows `regular`.
    async fn with_channels() -> Self {
        let mut bed = Self::settled().await;
        bed.roll_out_at_once();
        bed.publish(&["1.0.0", "1.1.0"]);
        bed.release(&[("regular", "1.0.0"), ("fast", "1.1.0")], json!([]));
        bed.choose(json!({"name": "keda"})).await;
        assert_eq!(bed.version(), ("1.0.0".to_owned(), Some("regular".to_owned())));
        bed
    }

    async fn choose(&mut self, module: Value) {
        self.select(json!([module]));
        assert!(self.kyma().await.failed.is_empty());
    }
}

/// `acceptance.md` C2 42 and 43, C1 12: a module's channel wins over the Kyma's, and a switch to a channel with a lower
/// version keeps the installed one, with a warning and the reason.
#[tokio::test]
async fn channel_of_a_module_wins_and_a_switch_to_a_lower_version_is_refused() {
    let mut bed = Bed::with_channels().await;
    bed.choose(json!({"name": "keda", "channel": "fast"})).await;
    assert_eq!(bed.version(), ("1.1.0".to_owned(), Some("fast".to_owned())));
    bed.set_manifest_state("Ready");
    bed.choose(json!({"name": "keda", "channel": "regular"})).await;
    let refused = "module template update not allowed: ignore channel skew (from fast to regular), as a higher version (1.1.0) \
                   of the module was previously installed";
    assert_eq!(bed.module(), ("Warning".to_owned(), refused.to_owned()));
    assert_eq!((bed.version().0.as_str(), bed.status()["state"].as_str()), ("1.1.0", Some("Warning")));
    assert_eq!(bed.status()["modules"][0]["version"], "1.1.0");
    bed.choose(json!({"name": "keda", "channel": "fast"})).await;
    assert_eq!((bed.module(), bed.version().0.as_str()), (("Ready".to_owned(), String::new()), "1.1.0"));
}

/// `acceptance.md` C2 44: the channel `none` of a module is an error of this module; what is installed stays.
#[tokio::test]
async fn channel_none_is_an_error_of_the_module_and_keeps_what_is_installed() {
    let mut bed = Bed::with_channels().await;
    bed.choose(json!({"name": "keda", "channel": "none"})).await;
    let message = "invalid module in spec: the value \"none\" is not allowed for the channel";
    assert_eq!((bed.module(), bed.version().0.as_str()), (("Error".to_owned(), message.to_owned()), "1.0.0"));
    assert_eq!(bed.status()["state"], "Error");
    // The channel `none` of the Kyma rejects the whole selection.
    bed.select(json!([]));
    bed.runtime.edit("kymas/default", |kyma| kyma["spec"]["channel"] = "none".into());
    bed.kyma().await;
    assert_eq!((bed.status()["state"].as_str(), bed.is_manifest_deleted()), (Some("Error"), false));
    let operation = bed.status()["lastOperation"]["operation"].clone();
    assert_eq!(operation, "invalid Kyma: the value \"none\" is not allowed for the channel");
}

/// `acceptance.md` C2 44 and 45: a pinned version needs no channel, and one that does not exist is an error.
#[tokio::test]
async fn pinned_version_follows_no_channel() {
    let mut bed = Bed::with_channels().await;
    bed.choose(json!({"name": "keda"})).await;
    bed.pin("1.0.0").await;
    assert_eq!(bed.version(), ("1.0.0".to_owned(), None));
    bed.release(&[("regular", "1.1.0"), ("fast", "1.1.0")], json!([]));
    bed.kyma().await;
    assert_eq!(bed.version(), ("1.0.0".to_owned(), None), "a moved channel is of no concern");
    bed.pin("1.2.0").await;
    let missing = "failed to get module template: ModuleTemplate.operator.kyma-project.io \"keda-1.2.0\" not found; \
                   version 1.2.0 is pinned by the annotation version.operator.kyma-project.io/keda";
    assert_eq!((bed.module(), bed.version().0.as_str()), (("Error".to_owned(), missing.to_owned()), "1.0.0"));
    bed.pin("1.1.0").await;
    assert_eq!(bed.version(), ("1.1.0".to_owned(), None));
    bed.pin("1.0.0").await;
    assert_eq!((bed.module().0.as_str(), bed.version().0.as_str()), ("Warning", "1.1.0"), "no downgrade");
}

/// `acceptance.md` C1 22, in the control plane: an unmanaged module has no Manifest, counts as ready, and gets a new Manifest when
/// it is managed again. Disabling it while it is unmanaged deletes nothing.
#[tokio::test]
async fn unmanaged_module_has_no_manifest_until_it_is_managed_again() {
    let mut bed = Bed::with_channels().await;
    for policy in ["CreateAndDelete", "Ignore"] {
        let keda = |managed: bool| json!({"name": "keda", "managed": managed, "customResourcePolicy": policy});
        bed.choose(keda(true)).await;
        bed.choose(keda(false)).await;
        let (id, manifest) = bed.manifest().unwrap();
        assert_eq!(manifest["metadata"]["annotations"][annotation::UNMANAGED], "true");
        assert_eq!(bed.module(), ("Unmanaged".to_owned(), String::new()));
        // Its controller releases the objects, and removes it.
        bed.kcp.remove(&id);
        bed.kyma().await;
        assert_eq!((bed.module().0.as_str(), bed.status()["state"].as_str()), ("Unmanaged", Some("Ready")));
        assert!(bed.manifest().is_none());
        bed.forget_calls();
        bed.kyma().await;
        assert_eq!((bed.kcp.writes(), bed.runtime.writes()), (vec![], vec![]));
        // Disabled and listed again, it is still unmanaged.
        bed.select(json!([]));
        bed.kyma().await;
        assert_eq!(bed.status()["modules"], json!([]));
        bed.choose(keda(false)).await;
        assert!(bed.manifest().is_none());
        bed.choose(keda(true)).await;
        let (id, manifest) = bed.manifest().unwrap();
        assert_eq!(manifest["spec"]["customResourcePolicy"], policy);
        assert!(manifest["metadata"]["annotations"].get(annotation::UNMANAGED).is_none(), "{manifest}");
        assert_eq!(bed.module().0, "Processing");
        // Managed again before the Manifest is gone, it waits for that.
        bed.choose(keda(false)).await;
        bed.choose(keda(true)).await;
        assert_eq!(bed.manifest().unwrap().1["metadata"]["annotations"][annotation::UNMANAGED], "true");
        bed.kcp.remove(&id);
        bed.kyma().await;
        assert!(bed.manifest().unwrap().1["metadata"]["annotations"].get(annotation::UNMANAGED).is_none());
    }
}

/// `acceptance.md` C2 47: a mandatory module and an unknown one in the spec are a warning, which stays until they are deselected.
#[tokio::test]
async fn mandatory_or_unknown_module_in_the_spec_is_a_warning() {
    for (name, message) in [
        ("warden", "no templates were found: for module warden-1.0.0 in channel regular"),
        ("other", "no ModuleReleaseMeta found for module \"other\" in namespace \"kcp-system\""),
    ] {
        let mut bed = Bed::with_mandatory().await;
        bed.choose(json!({"name": name})).await;
        assert_eq!(bed.module(), ("Warning".to_owned(), message.to_owned()));
        assert_eq!((&bed.status()["state"], &bed.shown()["state"]), (&json!("Warning"), &json!("Warning")), "{name}");
        bed.forget_calls();
        bed.kyma().await;
        assert_eq!((bed.kcp.writes(), bed.runtime.writes()), (vec![], vec![]), "{name}");
        bed.select(json!([]));
        bed.kyma().await;
        assert_eq!((&bed.status()["state"], &bed.shown()["state"]), (&json!("Ready"), &json!("Ready")), "{name}");
    }
}

/// A release meta finds its users when it appears, and takes effect a little later.
#[tokio::test]
async fn module_selected_while_its_release_meta_takes_effect_is_looked_up_again() {
    let mut bed = Bed::settled().await;
    bed.select(json!([{"name": "other"}]));
    bed.ctx.catalog.mark_undecided("other");
    assert_eq!(bed.kyma().await.requeue_after, Some(CATALOG_AGAIN));
    drop(bed.ctx.catalog.refresh(&bed.ctx.stores));
    assert_eq!(bed.kyma().await.requeue_after, None, "it has taken effect, and is another one's");
    bed.ctx.catalog.mark_undecided("another");
    assert_eq!(bed.kyma().await.requeue_after, None);
}

/// `acceptance.md` C2 52: neither the name of a template nor that of a component selects a module.
#[tokio::test]
async fn module_is_selected_by_its_own_name_only() {
    let mut bed = Bed::settled().await;
    for name in ["keda-1.0.0", "kyma-project.io/module/keda"] {
        bed.choose(json!({"name": name})).await;
        let message = format!("no ModuleReleaseMeta found for module {name:?} in namespace \"kcp-system\"");
        assert_eq!(bed.module(), ("Warning".to_owned(), message));
        assert!(bed.manifest().is_none(), "{name}");
    }
    bed.choose(json!({"name": "keda"})).await;
    assert_eq!(bed.version().0, "1.0.0");
}

/// `acceptance.md` C2 46: each selected module has one Manifest, and the Kyma has the state of the worst of them.
#[tokio::test]
async fn manifests_follow_the_selection_and_the_kyma_follows_their_states() {
    let mut bed = Bed::settled().await;
    let names = ["a", "b", "keda"];
    let template = |name: &str| {
        let spec = json!({"moduleName": name, "version": "1.0.0", "descriptor": {}});
        of_kyma_group("ModuleTemplate", &format!("{name}-1.0.0"), spec)
    };
    let meta = |name: &str| {
        let channels = json!([{"channel": "regular", "version": "1.0.0"}]);
        let component = format!("kyma-project.io/module/{name}");
        of_kyma_group(
            "ModuleReleaseMeta",
            name,
            json!({"moduleName": name, "ocmComponentName": component, "channels": channels}),
        )
    };
    bed.ctx.stores.templates = filled::<ModuleTemplate>(&names.map(template)).0;
    bed.set_release_metas(filled::<ModuleReleaseMeta>(&names.map(meta)).0);
    let manifests = |bed: &Bed| -> BTreeMap<String, String> {
        let entry = |it: &Value| {
            let metadata = &it["metadata"];
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            (text(&metadata["labels"][label::MODULE_NAME]), format!("manifests/{}", text(&metadata["name"])))
        };
        let found = bed.kcp.all("manifests");
        let entries: BTreeMap<_, _> = found.iter().map(entry).collect();
        assert_eq!(entries.len(), found.len(), "one each");
        entries
    };
    for count in [1, 3, 2] {
        bed.select(names[..count].iter().map(|name| json!({"name": name})).collect());
        bed.kyma().await;
        let found = manifests(&bed);
        let selected = &names[..count];
        for (name, id) in &found {
            let is_deleted = bed.kcp.object(id).unwrap()["metadata"]["deletionTimestamp"].is_string();
            assert_ne!(is_deleted, selected.contains(&name.as_str()), "{name}");
            if is_deleted {
                bed.kcp.remove(id);
            }
        }
        assert!(manifests(&bed).keys().eq(selected));
        for state in ["Ready", "Error", "Warning", "Processing", "Ready"] {
            for (name, id) in manifests(&bed) {
                let of_this = if name == "a" { state } else { "Ready" };
                bed.kcp.edit(&id, |manifest| manifest["status"] = json!({"state": of_this}));
            }
            bed.kyma().await;
            assert_eq!((bed.status()["state"].as_str(), bed.shown()["state"].as_str()), (Some(state), Some(state)));
        }
    }
}

/// `acceptance.md` C2 51: the label of a Manifest that stops its reconcile survives an upgrade, and the removal of fields that
/// another writer added.
#[tokio::test]
async fn skip_label_of_a_manifest_is_preserved() {
    let mut bed = Bed::with_channels().await;
    let (id, _) = bed.manifest().unwrap();
    bed.kcp.edit(&id, |manifest| manifest["metadata"]["labels"][label::SKIP_RECONCILIATION] = "true".into());
    let skip = |bed: &Bed| bed.manifest().unwrap().1["metadata"]["labels"][label::SKIP_RECONCILIATION].clone();
    bed.choose(json!({"name": "keda", "channel": "fast"})).await;
    assert_eq!((bed.version().0.as_str(), skip(&bed)), ("1.1.0", json!("true")));
    bed.kcp.edit(&id, |manifest| manifest["spec"]["localizedImages"] = json!(["evil"]));
    bed.forget_calls();
    bed.kyma().await;
    assert!(bed.kcp.writes().contains(&format!("PUT {id}")));
    assert_eq!((&bed.manifest().unwrap().1["spec"]["localizedImages"], skip(&bed)), (&Value::Null, json!("true")));
}

/// A removed module must not come back if the receiver ends between the two writes. A new Manifest does not wait.
#[tokio::test]
async fn selection_is_recorded_before_a_module_is_removed_and_after_a_conflict() {
    let mut bed = Bed::with_channels().await;
    bed.forget_calls();
    bed.select(json!([]));
    bed.kyma().await;
    let writes = bed.kcp.writes();
    let place = |call: &str| writes.iter().position(|write| write.starts_with(call)).unwrap();
    assert!(place("PATCH kymas/k") < place("DELETE manifests/"), "{writes:?}");
    let (id, _) = bed.manifest().unwrap();
    bed.kcp.remove(&id);
    bed.kyma().await;

    let accepted = |bed: &Bed| {
        bed.kcp.object("kymas/k").unwrap()["metadata"]["annotations"][annotation::ACCEPTED_SPEC].to_string()
    };
    bed.kcp.meanwhile("PATCH kymas/k", "kymas/k", |kyma| kyma["metadata"]["labels"]["other"] = "writer".into());
    bed.select(json!([{"name": "keda"}]));
    assert!(!bed.kyma().await.failed.is_empty());
    assert!(bed.manifest().is_some() && !accepted(&bed).contains("keda"));
    assert!(bed.kyma().await.failed.is_empty());
    assert!(accepted(&bed).contains("keda"));
}
