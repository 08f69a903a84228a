//! What the API server says of a group: its preferred version, and of a resource its kind and whether it has a status.

use serde::Deserialize;

use super::target::group_version;
use crate::kubernetes::{Accept, Call, Lane};

/// Bytes of a discovery answer. A group with thousands of custom kinds stays far below.
const LIMIT: usize = 2 << 20;
/// Bytes of a kind or of a version, which are DNS labels: every event says both.
const NAME: usize = 253;

/// A resource that is served.
#[derive(Debug, PartialEq, Eq)]
pub struct Served {
    /// Of the group.
    pub version: String,
    /// Of its objects.
    pub kind: String,
    /// It has a status subresource, so its generation tells spec from status.
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

/// Asks for a resource; version `*` is the group's preferred one.
pub(super) async fn discover(lane: &Lane, group: &str, version: &str, resource: &str) -> Result<Served, Call> {
    let version = match version {
        "*" => preferred(lane, group).await?,
        fixed => fixed.to_owned(),
    };
    let bytes = lane.get(&group_version(group, &version), Accept::Whole, LIMIT).await?;
    find(&bytes, version, resource)?.ok_or_else(|| Call::NotServed(format!("{group}/{resource}")))
}

async fn preferred(lane: &Lane, group: &str) -> Result<String, Call> {
    if group.is_empty() {
        // The core group has one version and no group document.
        return Ok("v1".to_owned());
    }
    preferred_of(&lane.get(&format!("/apis/{group}"), Accept::Whole, LIMIT).await?)
}

/// The version that a group's document prefers.
pub(crate) fn preferred_of(document: &[u8]) -> Result<String, Call> {
    let group: Group = serde_json::from_slice(document).map_err(Call::Parse)?;
    Ok(group.preferred.version)
}

/// A resource in the document of a group's version; `None` if it is not there, or under names that are none.
pub(crate) fn find(document: &[u8], version: String, resource: &str) -> Result<Option<Served>, Call> {
    let found: Resources = serde_json::from_slice(document).map_err(Call::Parse)?;
    let status = format!("{resource}/status");
    let has_status = found.resources.iter().any(|served| served.name == status);
    let served = found.resources.into_iter().find(|served| served.name == resource);
    let served = served.map(|served| Served { version, kind: served.kind, has_status });
    Ok(served.filter(|served| served.version.len().max(served.kind.len()) <= NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_subresource_is_told_by_its_name() {
        let answer = r#"{"resources":[{"name":"kymas","kind":"Kyma"},{"name":"kymas/status","kind":"Kyma"},
                         {"name":"others","kind":"Other"}]}"#;
        let find = |resource| find(answer.as_bytes(), "v1".to_owned(), resource).unwrap();
        assert_eq!(find("kymas"), Some(Served { version: "v1".into(), kind: "Kyma".into(), has_status: true }));
        assert_eq!(find("others").map(|served| served.has_status), Some(false));
        assert_eq!(find("none"), None);
    }
}
