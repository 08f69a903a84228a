//! Discovery requests. A response that a Kubernetes API server does not send is an error.

use std::collections::BTreeSet;

use kube::Client;
use serde::{Deserialize, de::DeserializeOwned};

use super::Kind;

/// Resources of a group in one version. The largest groups in use have about a hundred.
const MAX_RESOURCES: usize = 1_000;
/// Versions of a group.
const MAX_VERSIONS: usize = 50;
/// Characters of a group (a DNS subdomain), and of a version, a kind or a plural (a DNS label).
const MAX_GROUP_LENGTH: usize = 253;
const MAX_LABEL_LENGTH: usize = 63;

#[derive(Deserialize)]
struct Group {
    versions: Vec<Version>,
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

#[derive(Deserialize)]
struct Resources {
    resources: Option<Vec<Resource>>,
}

#[derive(Deserialize)]
struct Resource {
    /// Plural; `<plural>/<subresource>` for a subresource.
    name: String,
    kind: String,
    namespaced: bool,
}

/// Versions of a group that the API server serves, the preferred one first.
pub(super) async fn versions(client: &Client, group: &str) -> kube::Result<Vec<String>> {
    if group.is_empty() {
        return Ok(vec!["v1".to_owned()]);
    }
    if !is_group(group) {
        return Ok(Vec::new());
    }
    let Some(found) = read::<Group>(client, &format!("/apis/{group}")).await? else { return Ok(Vec::new()) };
    if found.versions.len() > MAX_VERSIONS || !found.versions.iter().all(|it| is_label(&it.version)) {
        return Err(malformed(group));
    }
    Ok(found.versions.into_iter().map(|it| it.version).collect())
}

/// Those of the kinds that the API server serves in a version of a group.
pub(super) async fn kinds(
    client: &Client,
    group: &str,
    version: &str,
    kinds: &BTreeSet<&str>,
) -> kube::Result<Vec<Kind>> {
    let mut found = resources(client, group, version).await?;
    found.retain(|kind| kinds.contains(&*kind.kind));
    Ok(found)
}

/// All kinds that the API server serves in a version of a group.
pub(super) async fn resources(client: &Client, group: &str, version: &str) -> kube::Result<Vec<Kind>> {
    // No API server serves them, and they would change the path.
    if !(group.is_empty() || is_group(group)) || !is_label(version) {
        return Ok(Vec::new());
    }
    let path = if group.is_empty() { format!("/api/{version}") } else { format!("/apis/{group}/{version}") };
    let Some(found) = read::<Resources>(client, &path).await? else { return Ok(Vec::new()) };
    let mut resources = found.resources.unwrap_or_default();
    if resources.len() > MAX_RESOURCES {
        return Err(malformed(group));
    }
    resources.retain(|resource| !resource.name.contains('/'));
    let served = resources.into_iter().map(|Resource { name, kind, namespaced }| {
        if !is_label(&name) || kind.len() > MAX_LABEL_LENGTH {
            return Err(malformed(group));
        }
        let group = group.to_owned().into();
        let version = version.to_owned().into();
        Ok(Kind { group, version, kind: kind.into(), plural: name.into(), namespaced })
    });
    served.collect()
}

/// Reads a discovery document; `None` if the API server has none at this path.
async fn read<T: DeserializeOwned>(client: &Client, path: &str) -> kube::Result<Option<T>> {
    let request = http::Request::get(path).body(Vec::new()).map_err(kube::Error::HttpError)?;
    match client.request_text(request).await {
        // kube would log the whole body when it cannot parse it.
        Ok(text) => serde_json::from_str(&text).map(Some).map_err(kube::Error::SerdeError),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        Err(error) => Err(error),
    }
}

fn malformed(group: &str) -> kube::Error {
    let text = format!("the discovery response of the API group {group:?} is not one of a Kubernetes API server");
    kube::Error::SerdeError(serde::de::Error::custom(text))
}

/// Returns true for a DNS subdomain, as far as a path of a URL is concerned.
pub(super) fn is_group(text: &str) -> bool {
    text.len() <= MAX_GROUP_LENGTH && text.split('.').all(is_label)
}

/// Returns true for a DNS label, as far as a path of a URL is concerned.
pub(super) fn is_label(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=MAX_LABEL_LENGTH).contains(&text.len()) && text.bytes().all(is_allowed)
}
