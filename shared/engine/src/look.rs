//! Looks for a module that the user installed by hand while the kinds of the module's objects are discovered.

use futures::future::join;
use kube::{Client, api::DynamicObject};
use serde_json::Value;
use tidewatch_api::Manifest;
use tidewatch_cluster::{kinds::Kinds, object};

use super::{
    inventory::split_api_version,
    module::{goal_of, inventory_of},
    ready::{Manager, manager_of},
    render::keys,
    step::Goal,
};

/// The manager of a module as it was before the objects were rendered.
pub(super) struct Look {
    pub(super) manager: Manager,
    /// Its metadata; `None` if it does not exist.
    pub(super) found: Option<DynamicObject>,
}

/// Discovers the kinds of a module's objects. If that takes requests before the first write of a Manifest, the manager is read
/// at the same time, so that both take one round trip. A look that fails is repeated, and reported, when the look is due.
pub(super) async fn discover(
    client: &Client,
    kinds: &mut Kinds,
    manifest: &Manifest,
    objects: &[Value],
) -> (kube::Result<()>, Option<Look>) {
    let is_unknown = |(group, version, kind): &(&str, &str, &str)| kinds.served(group, version, kind).is_none();
    let unknown: Vec<_> = objects.iter().filter_map(kind_of).filter(is_unknown).collect();
    let is_before_first_write = || goal_of(manifest) == Goal::Install && inventory_of(manifest).is_empty();
    if unknown.is_empty() || !is_before_first_write() {
        return (kinds.discover(client, unknown).await, None);
    }
    let keys = keys(objects, kinds);
    let manager = manager_of(manifest, keys.iter().map(|(key, version)| (key, *version)));
    let api_of = |Manager { key, version }: &Manager| kinds.api(client, &key.group, version, &key.kind, &key.namespace);
    let api = manager.as_ref().and_then(api_of);
    let look = async move {
        let (manager, api) = manager.zip(api)?;
        let found = object::get_metadata(&api, &manager.key.name).await.ok()?;
        Some(Look { manager, found })
    };
    join(kinds.discover(client, unknown), look).await
}

/// Group, version and kind of an object.
fn kind_of(object: &Value) -> Option<(&str, &str, &str)> {
    let (group, version) = split_api_version(object["apiVersion"].as_str()?);
    Some((group, version, object["kind"].as_str()?))
}
