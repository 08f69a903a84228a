//! Runtimes that store, list or answer more than an API server would: what is kept of it is bounded.

use http::StatusCode;
use tidewatch_kit::metrics::Registry;

use super::*;
use crate::catalog::inventory::MAX_OBJECTS;

const INVENTORY: &str = "configmaps/tidewatch-catalog";

/// Lines of an inventory in the runtime that name this many objects.
fn lines(count: usize) -> String {
    (0..count).map(|n| format!("moduletemplates/m-{n} - u-{n} 1\n")).collect()
}

/// Samples of the inventories that were ignored, with their values.
fn ignored(fixture: &Fixture) -> Vec<String> {
    let mut registry = Registry::default();
    fixture.catalog.metrics().register_in(&mut registry);
    let text = registry.encode().unwrap();
    let samples = text.lines().filter_map(|line| line.strip_prefix("catalog_unreadable_inventories_total"));
    samples.filter(|sample| !sample.ends_with(" 0")).map(str::to_owned).collect()
}

/// Objects in the cached inventory; `None` if there is no cached inventory.
fn cached(fixture: &Fixture) -> Option<usize> {
    let inventories = fixture.catalog.0.inventories.lock();
    let inventory = inventories.get(&fixture.key)?.as_ref()?;
    Some(inventory.data()["objects"].lines().count())
}

#[tokio::test]
async fn stored_inventory_beyond_a_limit_is_counted_and_rebuilt() {
    for (objects, fault) in [
        (lines(MAX_OBJECTS + 1), "too-many-objects"),
        (format!("moduletemplates/m - {} 1\n", "u".repeat(1_000)), "too-long"),
        ("\n".repeat(2 << 20), "too-large"),
        ("?".to_owned(), "malformed"),
    ] {
        let fixture = Fixture::synced().await;
        fixture.runtime.edit(INVENTORY, |map| map["data"]["objects"] = json!(objects));
        fixture.catalog.forget(&fixture.key);
        let calls = fixture.sync(Drift::None).await;
        assert!(calls.iter().all(|call| call.starts_with("list ")) && calls.len() >= 2, "{fault}: {calls:?}");
        assert_eq!(fixture.runtime.inventory().len(), ALL.len(), "{fault}: rewritten");
        assert_eq!((cached(&fixture), fixture.runtime.ids()), (Some(ALL.len()), ALL.map(str::to_owned).to_vec()));
        assert_eq!(ignored(&fixture), [format!("{{fault=\"{fault}\"}} 1")]);
    }
}

#[tokio::test]
async fn failing_reads_of_ever_new_objects_do_not_grow_the_inventory() {
    let fixture = Fixture::synced().await;
    let mut kept = Vec::new();
    for names in [0..3_000, 3_000..5_000] {
        let event = |n| {
            fixture.runtime.respond_with(&format!("get moduletemplates/m-{n}"), Some(StatusCode::FORBIDDEN));
            agent_event("moduletemplates", &format!("m-{n}"), "u", "1", Change::Created)
        };
        let error = fixture.try_sync(Drift::Objects(names.map(event).collect())).await.unwrap_err();
        assert!(error.to_string().contains(" and "), "{error}");
        kept.push(cached(&fixture));
    }
    assert_eq!(kept, [Some(3_000 + ALL.len()), None]);
    fixture.sync(Drift::None).await;
    assert_eq!(cached(&fixture), Some(ALL.len()), "rebuilt from a list");
}

#[tokio::test]
async fn objects_whose_names_no_api_server_accepts_are_ignored() {
    let fixture = Fixture::synced().await;
    let long = format!("moduletemplates/{}", "n".repeat(300));
    fixture.runtime.edit(&long, |object| {
        object["metadata"]["managedFields"] = json!([{"manager": "catalog-sync"}]);
    });
    let calls = fixture.sync(Drift::All).await;
    assert!(calls.iter().all(|call| call.starts_with("list ")), "{calls:?}");
    assert_eq!(cached(&fixture), Some(ALL.len()));
}

#[tokio::test]
async fn identifiers_in_responses_are_bounded() {
    let mut fixture = Fixture::synced().await;
    let long = "9".repeat(10_000);
    for id in ALL {
        fixture.runtime.edit(id, |object| object["metadata"]["uid"] = json!(long));
    }
    fixture.meta("omega", &[]);
    drop(fixture.try_sync(Drift::All).await);
    let inventories = fixture.catalog.0.inventories.lock();
    let inventory = inventories[&fixture.key].as_ref().unwrap();
    assert!(!inventory.entries.is_empty());
    let longest = inventory.entries.iter().map(|(_, entry)| entry.uid.len().max(entry.resource_version.len())).max();
    assert!(longest <= Some(64), "{longest:?}");
}
