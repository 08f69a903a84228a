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
pub(super) struct Served {
    pub(super) version: String,
    pub(super) kind: String,
    /// It has a status subresource, so its generation tells spec from status.
    pub(super) has_status: bool,
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
    let found = serde_json::from_slice(&bytes).map_err(Call::Parse)?;
    let served = find(found, version, resource).filter(|served| served.version.len().max(served.kind.len()) <= NAME);
    served.ok_or_else(|| Call::NotServed(format!("{group}/{resource}")))
}

async fn preferred(lane: &Lane, group: &str) -> Result<String, Call> {
    if group.is_empty() {
        // The core group has one version and no group document.
        return Ok("v1".to_owned());
    }
    let bytes = lane.get(&format!("/apis/{group}"), Accept::Whole, LIMIT).await?;
    let group: Group = serde_json::from_slice(&bytes).map_err(Call::Parse)?;
    Ok(group.preferred.version)
}

fn find(found: Resources, version: String, resource: &str) -> Option<Served> {
    let status = format!("{resource}/status");
    let has_status = found.resources.iter().any(|served| served.name == status);
    let served = found.resources.into_iter().find(|served| served.name == resource)?;
    Some(Served { version, kind: served.kind, has_status })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_subresource_is_told_by_its_name() {
        let answer = r#"{"resources":[{"name":"kymas","kind":"Kyma"},{"name":"kymas/status","kind":"Kyma"},
                         {"name":"others","kind":"Other"}]}"#;
        let find = |resource| find(serde_json::from_str(answer).unwrap(), "v1".to_owned(), resource);
        assert_eq!(find("kymas"), Some(Served { version: "v1".into(), kind: "Kyma".into(), has_status: true }));
        assert_eq!(find("others").map(|served| served.has_status), Some(false));
        assert_eq!(find("none"), None);
    }
}
