//! API discovery: versions of a group, and kind, verbs and status subresource of a resource.

mod documents;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, de::Error as _};
use tidewatch_api::plan::PlannedWatch;

use super::{Definitions, target::group_version};
use crate::kubernetes::{ApiClient, ApiError};
use documents::Documents;

/// Maximum length in bytes of a kind or a version, which are DNS labels. The limit bounds events, which carry both.
const NAME: usize = 253;
/// Maximum number of versions of a group in which a resource is looked up.
const VERSIONS: usize = 8;

/// A resource that the API server serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedResource {
    /// API version.
    pub version: String,
    /// Kind of its objects.
    pub kind: String,
    /// True if it has a status subresource, so that the generation separates spec changes from status changes.
    pub has_status: bool,
    /// True if it supports lists and watches.
    pub is_watchable: bool,
}

#[derive(Deserialize)]
struct Group {
    #[serde(rename = "preferredVersion")]
    preferred: GroupVersion,
    #[serde(default)]
    versions: Vec<GroupVersion>,
}

#[derive(Deserialize)]
struct GroupVersion {
    version: String,
}

#[derive(Deserialize)]
struct Resources {
    resources: Vec<Resource>,
}

/// A resource of a group version.
#[derive(Deserialize)]
struct Resource {
    /// Plural name; that of a subresource contains a `/`.
    name: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    namespaced: bool,
    /// Absent only in responses of servers that are not built with the Kubernetes libraries: then the verbs are unknown.
    verbs: Option<Verbs>,
}

/// Verbs of a resource, of which only the result is kept.
#[derive(Deserialize)]
#[serde(from = "Vec<Verb>")]
struct Verbs {
    is_watchable: bool,
}

#[derive(PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Verb {
    List,
    Watch,
    #[serde(other)]
    Other,
}

impl From<Vec<Verb>> for Verbs {
    fn from(verbs: Vec<Verb>) -> Self {
        Self { is_watchable: verbs.contains(&Verb::List) && verbs.contains(&Verb::Watch) }
    }
}

impl Resource {
    /// True if it supports lists and watches.
    fn is_watchable(&self) -> bool {
        self.verbs.as_ref().is_none_or(|verbs| verbs.is_watchable)
    }
}

/// Lookups of kinds for all watches; clones share them.
#[derive(Clone, Default)]
pub(crate) struct Discovery {
    /// Changes of CRDs.
    pub(super) definitions: Definitions,
    documents: Documents,
}

impl Discovery {
    /// Resolves the resource of a watch; version `*` stands for the preferred version of the group, or the first other
    /// one that has the resource.
    ///
    /// # Errors
    /// [`ApiError::NotServed`] if the API server answered that it has no such group, version or resource,
    /// [`ApiError::Unwatchable`] if the resource cannot be listed and watched. No other failure proves an absence: a
    /// request to an unavailable aggregated API is answered with 503.
    pub(super) async fn resolve(&self, client: &ApiClient, planned: &PlannedWatch) -> Result<ServedResource, ApiError> {
        let PlannedWatch { group, version, resource, .. } = planned;
        let not_served = || ApiError::NotServed(format!("{group}/{resource}"));
        let versions = match version.as_str() {
            "*" => self.versions(client, group).await?.ok_or_else(not_served)?,
            fixed => vec![fixed.to_owned()],
        };
        for version in versions {
            let Some(document) = self.documents.read(client, &group_version(group, &version)).await? else { continue };
            match find_resource(&document, version, resource)? {
                Some(served) if served.is_watchable => return Ok(served),
                Some(_) => return Err(ApiError::Unwatchable(format!("{group}/{resource}"))),
                None => {}
            }
        }
        Err(not_served())
    }

    /// Names of the resources of a group that a watch on it includes: those that can be listed and watched and carry no
    /// secrets. Version `*` includes resources of all versions. Empty if the API server has no such group or version.
    ///
    /// # Errors
    /// [`ApiError`]: nothing is known then, not even about the part of the group that was read.
    pub(super) async fn expand(
        &self,
        client: &ApiClient,
        planned: &PlannedWatch,
    ) -> Result<BTreeSet<String>, ApiError> {
        let versions = match planned.version.as_str() {
            "*" => self.versions(client, &planned.group).await?.unwrap_or_default(),
            fixed => vec![fixed.to_owned()],
        };
        // A resource is watched in the first version that has it.
        let mut found = BTreeMap::new();
        for version in versions {
            let path = group_version(&planned.group, &version);
            let Some(document) = self.documents.read(client, &path).await? else { continue };
            for resource in resources_of(&document)? {
                let is_selected = resource.is_watchable() && (resource.namespaced || planned.namespace.is_none());
                found.entry(resource.name).or_insert(is_selected);
            }
        }
        found.retain(|name, is_selected| *is_selected && planned.of_resource(name).is_ok());
        Ok(found.into_keys().collect())
    }

    /// Versions of a group, the preferred one first; `None` if there is no such group.
    async fn versions(&self, client: &ApiClient, group: &str) -> Result<Option<Vec<String>>, ApiError> {
        if group.is_empty() {
            // The core group has one version and no group document.
            return Ok(Some(vec!["v1".to_owned()]));
        }
        let document = self.documents.read(client, &format!("/apis/{group}")).await?;
        document.map(|document| versions_of(&document)).transpose()
    }
}

/// Versions in the `APIGroup` document of a group, the preferred one first, at most eight.
pub(crate) fn versions_of(document: &[u8]) -> Result<Vec<String>, ApiError> {
    let Group { preferred, versions } = serde_json::from_slice(document).map_err(ApiError::Parse)?;
    let others = versions.into_iter().map(|served| served.version).filter(|version| *version != preferred.version);
    let mut versions: Vec<_> = others.take(VERSIONS - 1).collect();
    versions.insert(0, preferred.version);
    Ok(versions)
}

/// All resources in the `APIResourceList` document of a group version.
fn resources_of(document: &[u8]) -> Result<Vec<Resource>, ApiError> {
    let list: Resources = serde_json::from_slice(document).map_err(ApiError::Parse)?;
    Ok(list.resources)
}

/// Finds a resource in the `APIResourceList` document of a group version; `None` if it is absent.
///
/// # Errors
/// [`ApiError::Parse`], also if its version or kind is too long.
pub(crate) fn find_resource(
    document: &[u8],
    version: String,
    resource: &str,
) -> Result<Option<ServedResource>, ApiError> {
    let resources = resources_of(document)?;
    let status = format!("{resource}/status");
    let has_status = resources.iter().any(|served| served.name == status);
    let Some(served) = resources.into_iter().find(|served| served.name == resource) else { return Ok(None) };
    if version.len().max(served.kind.len()) > NAME {
        return Err(ApiError::Parse(serde_json::Error::custom("version or kind is too long")));
    }
    let is_watchable = served.is_watchable();
    Ok(Some(ServedResource { version, kind: served.kind, has_status, is_watchable }))
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
            Some(ServedResource { version: "v1".into(), kind: "Kyma".into(), has_status: true, is_watchable: true })
        );
        assert_eq!(find_resource("others").map(|served| served.has_status), Some(false));
        assert_eq!(find_resource("none"), None);
    }

    #[test]
    fn watchable_resource_supports_list_and_watch() {
        for (verbs, is_watchable) in [
            (r#"["create","delete","get","list","watch"]"#, true),
            (r#"["get","list"]"#, false),
            (r#"["watch"]"#, false),
            ("[]", false),
            ("null", true),
        ] {
            let response = format!(r#"{{"resources":[{{"name":"things","kind":"Thing","verbs":{verbs}}}]}}"#);
            let served = find_resource(response.as_bytes(), "v1".to_owned(), "things").unwrap().unwrap();
            assert_eq!(served.is_watchable, is_watchable, "{verbs}");
        }
    }

    #[test]
    fn subresources_and_verbs_of_all_resources_are_read() {
        let document = r#"{"resources":[{"name":"things","namespaced":true,"kind":"Thing","verbs":["list","watch"]},
                         {"name":"things/status","namespaced":true,"verbs":["get"]},{"name":"others"}]}"#;
        let listed = resources_of(document.as_bytes()).unwrap().into_iter();
        let listed: Vec<_> = listed.map(|one| (one.name.clone(), one.namespaced, one.is_watchable())).collect();
        let expected = [("things", true, true), ("things/status", true, false), ("others", false, true)];
        assert_eq!(listed, expected.map(|(name, namespaced, watchable)| (name.to_owned(), namespaced, watchable)));
        assert!(resources_of(b"{}").is_err());
    }

    #[test]
    fn preferred_version_is_the_first() {
        let versions = |more: &str| {
            let response = format!(r#"{{"preferredVersion":{{"version":"v2"}}{more}}}"#);
            versions_of(response.as_bytes()).unwrap()
        };
        assert_eq!(versions(""), ["v2"]);
        assert_eq!(versions(r#","versions":[{"version":"v1"},{"version":"v2"},{"version":"v3"}]"#), ["v2", "v1", "v3"]);
        let many: Vec<_> = (10..99).map(|n| format!(r#"{{"version":"v{n}"}}"#)).collect();
        assert_eq!(versions(&format!(r#","versions":[{}]"#, many.join(","))).len(), VERSIONS);
    }
}
