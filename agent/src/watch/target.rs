//! Request paths of lists and watches.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};

use crate::kubernetes::Accept;

/// Everything but unreserved characters (RFC 3986, section 2.3).
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Collection to list and watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Path without query.
    path: String,
    /// Selectors as query parameters, each preceded by `&`.
    selectors: String,
    /// Request metadata only (`PartialObjectMetadata`).
    metadata_only: bool,
}

impl Target {
    /// Collection of a resource in all namespaces, or in one.
    pub(crate) fn collection(group: &str, version: &str, namespace: Option<&str>, resource: &str) -> Self {
        let mut path = group_version(group, version);
        if let Some(namespace) = namespace {
            path.push_str("/namespaces/");
            path.push_str(namespace);
        }
        path.push('/');
        path.push_str(resource);
        Self { path, selectors: String::new(), metadata_only: true }
    }

    /// Adds selectors in the API's query syntax; an empty selector matches all objects.
    #[must_use]
    pub(crate) fn select(mut self, labels: &str, fields: &str) -> Self {
        for (name, selector) in [("labelSelector", labels), ("fieldSelector", fields)] {
            if !selector.is_empty() {
                self.selectors.extend(["&", name, "="]);
                self.selectors.extend(encoded(selector));
            }
        }
        self
    }

    /// Requests whole objects instead of metadata.
    #[must_use]
    pub(crate) fn full_objects(self) -> Self {
        Self { metadata_only: false, ..self }
    }

    /// Path of a patch of one object by this agent.
    pub(crate) fn patch(&self, name: &str) -> String {
        format!("{}/{name}?fieldManager=tidewatch-agent", self.path)
    }

    /// Path of one page. Without a resourceVersion, the list is a quorum read.
    pub(super) fn list(&self, limit: usize, token: &str) -> String {
        let mut path = format!("{}?limit={limit}{}", self.path, self.selectors);
        if !token.is_empty() {
            path.push_str("&continue=");
            path.extend(encoded(token));
        }
        path
    }

    /// Path of a watch from a resourceVersion; the server closes it after `seconds`.
    pub(super) fn watch(&self, version: &str, seconds: u64) -> String {
        let mut path = format!("{}?watch=true&allowWatchBookmarks=true&timeoutSeconds={seconds}", self.path);
        path.push_str(&self.selectors);
        path.push_str("&resourceVersion=");
        path.extend(encoded(version));
        path
    }

    pub(super) const fn list_accept(&self) -> Accept {
        if self.metadata_only { Accept::MetadataList } else { Accept::Full }
    }

    pub(super) const fn item_accept(&self) -> Accept {
        if self.metadata_only { Accept::Metadata } else { Accept::Full }
    }
}

/// Root path of a group version; the core group is under `/api`.
pub(super) fn group_version(group: &str, version: &str) -> String {
    if group.is_empty() { format!("/api/{version}") } else { format!("/apis/{group}/{version}") }
}

fn encoded(text: &str) -> PercentEncode<'_> {
    utf8_percent_encode(text, RESERVED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_match_the_kubernetes_api() {
        let core = Target::collection("", "v1", None, "configmaps");
        assert_eq!(core.list(50, ""), "/api/v1/configmaps?limit=50");
        let kymas = Target::collection("operator.kyma-project.io", "v1beta2", Some("kyma-system"), "kymas")
            .select("a=b,c in (d)", "metadata.name=default");
        let path = "/apis/operator.kyma-project.io/v1beta2/namespaces/kyma-system/kymas";
        let selectors = "&labelSelector=a%3Db%2Cc%20in%20%28d%29&fieldSelector=metadata.name%3Ddefault";
        assert_eq!(kymas.list(1, "x/="), format!("{path}?limit=1{selectors}&continue=x%2F%3D"));
        let query = "watch=true&allowWatchBookmarks=true&timeoutSeconds=200";
        assert_eq!(kymas.watch("7", 200), format!("{path}?{query}{selectors}&resourceVersion=7"));
    }
}
