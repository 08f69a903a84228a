//! The user's choice of a channel or a version, for the Kyma and for each module.

use std::collections::BTreeMap;

use tidewatch_api::names::annotation;

use super::*;

impl Fixture {
    /// `keda` 1.0.0 in the channel `regular` and 1.1.0 in `fast`, of which the Kyma follows `regular`.
    async fn with_channels() -> Self {
        let mut fixture = Self::settled().await;
        fixture.roll_out_at_once();
        fixture.publish(&["1.0.0", "1.1.0"]);
        fixture.release(&[("regular", "1.0.0"), ("fast", "1.1.0")], json!([]));
        fixture.choose(json!({"name": "keda"})).await;
        assert_eq!(fixture.version(), ("1.0.0".to_owned(), Some("regular".to_owned())));
        fixture
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
    let mut fixture = Fixture::with_channels().await;
    fixture.choose(json!({"name": "keda", "channel": "fast"})).await;
    assert_eq!(fixture.version(), ("1.1.0".to_owned(), Some("fast".to_owned())));
    fixture.set_manifest_state("Ready");
    fixture.choose(json!({"name": "keda", "channel": "regular"})).await;
    let refused = "module template update not allowed: ignore channel skew (from fast to regular), as a higher version (1.1.0) \
                   of the module was previously installed";
    assert_eq!(fixture.module(), ("Warning".to_owned(), refused.to_owned()));
    assert_eq!((fixture.version().0.as_str(), fixture.status()["state"].as_str()), ("1.1.0", Some("Warning")));
    assert_eq!(fixture.status()["modules"][0]["version"], "1.1.0");
    fixture.choose(json!({"name": "keda", "channel": "fast"})).await;
    assert_eq!((fixture.module(), fixture.version().0.as_str()), (("Ready".to_owned(), String::new()), "1.1.0"));
}

/// `acceptance.md` C2 44: the channel `none` of a module is an error of this module; what is installed stays.
#[tokio::test]
async fn channel_none_is_an_error_of_the_module_and_keeps_what_is_installed() {
    let mut fixture = Fixture::with_channels().await;
    fixture.choose(json!({"name": "keda", "channel": "none"})).await;
    let message = "invalid module in spec: the value \"none\" is not allowed for the channel";
    assert_eq!((fixture.module(), fixture.version().0.as_str()), (("Error".to_owned(), message.to_owned()), "1.0.0"));
    assert_eq!(fixture.status()["state"], "Error");
    // The channel `none` of the Kyma rejects the whole selection.
    fixture.select(json!([]));
    fixture.runtime.edit("kymas/default", |kyma| kyma["spec"]["channel"] = "none".into());
    fixture.kyma().await;
    assert_eq!((fixture.status()["state"].as_str(), fixture.is_manifest_deleted()), (Some("Error"), false));
    let operation = fixture.status()["lastOperation"]["operation"].clone();
    assert_eq!(operation, "invalid Kyma: the value \"none\" is not allowed for the channel");
}

/// `acceptance.md` C2 44 and 45: a pinned version needs no channel, and one that does not exist is an error.
#[tokio::test]
async fn pinned_version_follows_no_channel() {
    let mut fixture = Fixture::with_channels().await;
    fixture.choose(json!({"name": "keda"})).await;
    fixture.pin("1.0.0").await;
    assert_eq!(fixture.version(), ("1.0.0".to_owned(), None));
    fixture.release(&[("regular", "1.1.0"), ("fast", "1.1.0")], json!([]));
    fixture.kyma().await;
    assert_eq!(fixture.version(), ("1.0.0".to_owned(), None), "a moved channel is of no concern");
    fixture.pin("1.2.0").await;
    let missing = "failed to get module template: ModuleTemplate.operator.kyma-project.io \"keda-1.2.0\" not found; \
                   version 1.2.0 is pinned by the annotation version.operator.kyma-project.io/keda";
    assert_eq!((fixture.module(), fixture.version().0.as_str()), (("Error".to_owned(), missing.to_owned()), "1.0.0"));
    fixture.pin("1.1.0").await;
    assert_eq!(fixture.version(), ("1.1.0".to_owned(), None));
    fixture.pin("1.0.0").await;
    assert_eq!((fixture.module().0.as_str(), fixture.version().0.as_str()), ("Warning", "1.1.0"), "no downgrade");
}

/// `acceptance.md` C1 22, in the control plane: an unmanaged module has no Manifest, counts as ready, and gets a new Manifest when
/// it is managed again. Disabling it while it is unmanaged deletes nothing.
#[tokio::test]
async fn unmanaged_module_has_no_manifest_until_it_is_managed_again() {
    let mut fixture = Fixture::with_channels().await;
    for policy in ["CreateAndDelete", "Ignore"] {
        let keda = |managed: bool| json!({"name": "keda", "managed": managed, "customResourcePolicy": policy});
        fixture.choose(keda(true)).await;
        fixture.choose(keda(false)).await;
        let (id, manifest) = fixture.manifest().unwrap();
        assert_eq!(manifest["metadata"]["annotations"][annotation::UNMANAGED], "true");
        assert_eq!(fixture.module(), ("Unmanaged".to_owned(), String::new()));
        // Its controller releases the objects, and removes it.
        fixture.kcp.remove(&id);
        fixture.kyma().await;
        assert_eq!((fixture.module().0.as_str(), fixture.status()["state"].as_str()), ("Unmanaged", Some("Ready")));
        assert!(fixture.manifest().is_none());
        fixture.forget_calls();
        fixture.kyma().await;
        assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]));
        // Disabled and listed again, it is still unmanaged.
        fixture.select(json!([]));
        fixture.kyma().await;
        assert_eq!(fixture.status()["modules"], json!([]));
        fixture.choose(keda(false)).await;
        assert!(fixture.manifest().is_none());
        fixture.choose(keda(true)).await;
        let (id, manifest) = fixture.manifest().unwrap();
        assert_eq!(manifest["spec"]["customResourcePolicy"], policy);
        assert!(manifest["metadata"]["annotations"].get(annotation::UNMANAGED).is_none(), "{manifest}");
        assert_eq!(fixture.module().0, "Processing");
        // Managed again before the Manifest is gone, it waits for that.
        fixture.choose(keda(false)).await;
        fixture.choose(keda(true)).await;
        assert_eq!(fixture.manifest().unwrap().1["metadata"]["annotations"][annotation::UNMANAGED], "true");
        fixture.kcp.remove(&id);
        fixture.kyma().await;
        assert!(fixture.manifest().unwrap().1["metadata"]["annotations"].get(annotation::UNMANAGED).is_none());
    }
}

/// `acceptance.md` C2 47: a mandatory module and an unknown one in the spec are a warning, which stays until they are deselected.
#[tokio::test]
async fn mandatory_or_unknown_module_in_the_spec_is_a_warning() {
    for (name, message) in [
        ("warden", "no templates were found: for module warden-1.0.0 in channel regular"),
        ("other", "no ModuleReleaseMeta found for module \"other\" in namespace \"kcp-system\""),
    ] {
        let mut fixture = Fixture::with_mandatory().await;
        fixture.choose(json!({"name": name})).await;
        assert_eq!(fixture.module(), ("Warning".to_owned(), message.to_owned()));
        assert_eq!(
            (&fixture.status()["state"], &fixture.shown()["state"]),
            (&json!("Warning"), &json!("Warning")),
            "{name}"
        );
        fixture.forget_calls();
        fixture.kyma().await;
        assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]), "{name}");
        fixture.select(json!([]));
        fixture.kyma().await;
        assert_eq!(
            (&fixture.status()["state"], &fixture.shown()["state"]),
            (&json!("Ready"), &json!("Ready")),
            "{name}"
        );
    }
}

/// A release meta finds its users when it appears, and takes effect a little later.
#[tokio::test]
async fn module_selected_while_its_release_meta_takes_effect_is_looked_up_again() {
    let mut fixture = Fixture::settled().await;
    fixture.select(json!([{"name": "other"}]));
    fixture.ctx.catalog.mark_undecided("other");
    assert_eq!(fixture.kyma().await.requeue_after, Some(CATALOG_AGAIN));
    drop(fixture.ctx.catalog.refresh(&fixture.ctx.stores));
    assert_eq!(fixture.kyma().await.requeue_after, None, "it has taken effect, and is another one's");
    fixture.ctx.catalog.mark_undecided("another");
    assert_eq!(fixture.kyma().await.requeue_after, None);
}

/// `acceptance.md` C2 52: neither the name of a template nor that of a component selects a module.
#[tokio::test]
async fn module_is_selected_by_its_own_name_only() {
    let mut fixture = Fixture::settled().await;
    for name in ["keda-1.0.0", "kyma-project.io/module/keda"] {
        fixture.choose(json!({"name": name})).await;
        let message = format!("no ModuleReleaseMeta found for module {name:?} in namespace \"kcp-system\"");
        assert_eq!(fixture.module(), ("Warning".to_owned(), message));
        assert!(fixture.manifest().is_none(), "{name}");
    }
    fixture.choose(json!({"name": "keda"})).await;
    assert_eq!(fixture.version().0, "1.0.0");
}

/// `acceptance.md` C2 46: each selected module has one Manifest, and the Kyma has the state of the worst of them.
#[tokio::test]
async fn manifests_follow_the_selection_and_the_kyma_follows_their_states() {
    let mut fixture = Fixture::settled().await;
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
    fixture.ctx.stores.templates = filled::<ModuleTemplate>(&names.map(template)).0;
    fixture.set_release_metas(filled::<ModuleReleaseMeta>(&names.map(meta)).0);
    let manifests = |fixture: &Fixture| -> BTreeMap<String, String> {
        let entry = |it: &Value| {
            let metadata = &it["metadata"];
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            (text(&metadata["labels"][label::MODULE_NAME]), format!("manifests/{}", text(&metadata["name"])))
        };
        let found = fixture.kcp.all("manifests");
        let entries: BTreeMap<_, _> = found.iter().map(entry).collect();
        assert_eq!(entries.len(), found.len(), "one each");
        entries
    };
    for count in [1, 3, 2] {
        fixture.select(names[..count].iter().map(|name| json!({"name": name})).collect());
        fixture.kyma().await;
        let found = manifests(&fixture);
        let selected = &names[..count];
        for (name, id) in &found {
            let is_deleted = fixture.kcp.object(id).unwrap()["metadata"]["deletionTimestamp"].is_string();
            assert_ne!(is_deleted, selected.contains(&name.as_str()), "{name}");
            if is_deleted {
                fixture.kcp.remove(id);
            }
        }
        assert!(manifests(&fixture).keys().eq(selected));
        for state in ["Ready", "Error", "Warning", "Processing", "Ready"] {
            for (name, id) in manifests(&fixture) {
                let of_this = if name == "a" { state } else { "Ready" };
                fixture.kcp.edit(&id, |manifest| manifest["status"] = json!({"state": of_this}));
            }
            fixture.kyma().await;
            assert_eq!(
                (fixture.status()["state"].as_str(), fixture.shown()["state"].as_str()),
                (Some(state), Some(state))
            );
        }
    }
}

/// `acceptance.md` C2 51: the label of a Manifest that stops its reconcile survives an upgrade, and the removal of fields that
/// another writer added.
#[tokio::test]
async fn skip_label_of_a_manifest_is_preserved() {
    let mut fixture = Fixture::with_channels().await;
    let (id, _) = fixture.manifest().unwrap();
    fixture.kcp.edit(&id, |manifest| manifest["metadata"]["labels"][label::SKIP_RECONCILIATION] = "true".into());
    let skip =
        |fixture: &Fixture| fixture.manifest().unwrap().1["metadata"]["labels"][label::SKIP_RECONCILIATION].clone();
    fixture.choose(json!({"name": "keda", "channel": "fast"})).await;
    assert_eq!((fixture.version().0.as_str(), skip(&fixture)), ("1.1.0", json!("true")));
    fixture.kcp.edit(&id, |manifest| manifest["spec"]["localizedImages"] = json!(["evil"]));
    fixture.forget_calls();
    fixture.kyma().await;
    assert!(fixture.kcp.writes().contains(&format!("PUT {id}")));
    assert_eq!(
        (&fixture.manifest().unwrap().1["spec"]["localizedImages"], skip(&fixture)),
        (&Value::Null, json!("true"))
    );
}

/// A removed module must not come back if the receiver ends between the two writes. A new Manifest does not wait.
#[tokio::test]
async fn selection_is_recorded_before_a_module_is_removed_and_after_a_conflict() {
    let mut fixture = Fixture::with_channels().await;
    fixture.forget_calls();
    fixture.select(json!([]));
    fixture.kyma().await;
    let writes = fixture.kcp.writes();
    let place = |call: &str| writes.iter().position(|write| write.starts_with(call)).unwrap();
    assert!(place("PATCH kymas/k") < place("DELETE manifests/"), "{writes:?}");
    let (id, _) = fixture.manifest().unwrap();
    fixture.kcp.remove(&id);
    fixture.kyma().await;

    let accepted = |fixture: &Fixture| {
        fixture.kcp.object("kymas/k").unwrap()["metadata"]["annotations"][annotation::ACCEPTED_SPEC].to_string()
    };
    fixture.kcp.meanwhile("PATCH kymas/k", "kymas/k", |kyma| kyma["metadata"]["labels"]["other"] = "writer".into());
    fixture.select(json!([{"name": "keda"}]));
    assert!(!fixture.kyma().await.failed.is_empty());
    assert!(fixture.manifest().is_some() && !accepted(&fixture).contains("keda"));
    assert!(fixture.kyma().await.failed.is_empty());
    assert!(accepted(&fixture).contains("keda"));
}
