//! API discovery: preferred version of a group, and kind and status subresource of a resource.

use serde::Deserialize;

use super::target::group_version;
use crate::kubernetes::{Accept, ApiClient, ApiError};

/// Maximum size of a discovery response in bytes. A group with thousands of custom kinds stays far below.
const LIMIT: usize = 2 << 20;
/// Maximum length in bytes of a kind or a version, which are DNS labels. The limit bounds events, which carry both.
const NAME: usize = 253;

/// A resource that the API server serves.
#[derive(Debug, PartialEq, Eq)]
pub struct ServedResource {
    /// API version.
    pub version: String,
    /// Kind of its objects.
    pub kind: String,
    /// True if it has a status subresource, so that the generation separates spec changes from status changes.
    pub has_status: bool,
}

#[derive(Deserialize)]
struct Group {
    #[serde(rename = "preferredVersion")]
    preferred: GroupVersion,
}

#[derive(Deserialize)]
struct GroupVersion {
    version: String,
}

#[derive(Deserialize)]
struct Resources {
    resources: Vec<Resource>,
}

#[derive(Deserialize)]
struct Resource {
    name: String,
    #[serde(default)]
    kind: String,
}

/// Resolves a resource; version `*` stands for the preferred one of the group.
pub(super) async fn discover(
    client: &ApiClient,
    group: &str,
    version: &str,
    resource: &str,
) -> Result<ServedResource, ApiError> {
    let version = match version {
        "*" => preferred(client, group).await?,
        fixed => fixed.to_owned(),
    };
    let bytes = client.get(&group_version(group, &version), Accept::Full, LIMIT).await?;
    find_resource(&bytes, version, resource)?.ok_or_else(|| ApiError::NotServed(format!("{group}/{resource}")))
}

async fn preferred(client: &ApiClient, group: &str) -> Result<String, ApiError> {
    if group.is_empty() {
        // The core group has one version and no group document.
        return Ok("v1".to_owned());
    }
    preferred_version_of(&client.get(&format!("/apis/{group}"), Accept::Full, LIMIT).await?)
}

/// Preferred version in the `APIGroup` document of a group.
pub(crate) fn preferred_version_of(document: &[u8]) -> Result<String, ApiError> {
    let group: Group = serde_json::from_slice(document).map_err(ApiError::Parse)?;
    Ok(group.preferred.version)
}

/// Finds a resource in the `APIResourceList` document of a group version; `None` if it is absent, or its version or
/// kind is too long.
pub(crate) fn find_resource(
    document: &[u8],
    version: String,
    resource: &str,
) -> Result<Option<ServedResource>, ApiError> {
    let found: Resources = serde_json::from_slice(document).map_err(ApiError::Parse)?;
    let status = format!("{resource}/status");
    let has_status = found.resources.iter().any(|served| served.name == status);
    let served = found.resources.into_iter().find(|served| served.name == resource);
    let served = served.map(|served| ServedResource { version, kind: served.kind, has_status });
    Ok(served.filter(|served| served.version.len().max(served.kind.len()) <= NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_subresource_is_detected_by_its_name() {
        let response = r#"{"resources":[{"name":"kymas","kind":"Kyma"},{"name":"kymas/status","kind":"Kyma"},
                         {"name":"others","kind":"Other"}]}"#;
        let find_resource = |resource| find_resource(response.as_bytes(), "v1".to_owned(), resource).unwrap();
        assert_eq!(
            find_resource("kymas"),
            Some(ServedResource { version: "v1".into(), kind: "Kyma".into(), has_status: true })
        );
        assert_eq!(find_resource("others").map(|served| served.has_status), Some(false));
        assert_eq!(find_resource("none"), None);
    }
}
