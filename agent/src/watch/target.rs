//! Paths of lists and watches.

use std::fmt::Write as _;

use crate::kubernetes::Accept;

/// What to list and watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Path without query.
    path: String,
    /// Selectors, each with a `&` before it.
    selectors: String,
    /// Only metadata is asked for.
    metadata_only: bool,
}

impl Target {
    /// A collection: all namespaces, or one.
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

    /// Narrows it by selectors in the API's query syntax; an empty one selects all.
    #[must_use]
    pub(crate) fn select(mut self, labels: &str, fields: &str) -> Self {
        for (name, selector) in [("labelSelector", labels), ("fieldSelector", fields)] {
            if !selector.is_empty() {
                self.selectors.push('&');
                self.selectors.push_str(name);
                self.selectors.push('=');
                encode_into(&mut self.selectors, selector);
            }
        }
        self
    }

    /// Asks for whole objects.
    #[must_use]
    pub(crate) fn whole(self) -> Self {
        Self { metadata_only: false, ..self }
    }

    /// Path without query.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// One page. No resource version: the list is read by quorum.
    pub(super) fn list(&self, limit: usize, token: &str) -> String {
        let mut path = format!("{}?limit={limit}{}", self.path, self.selectors);
        if !token.is_empty() {
            path.push_str("&continue=");
            encode_into(&mut path, token);
        }
        path
    }

    /// A watch from a resource version, closed by the server after a time.
    pub(super) fn watch(&self, version: &str, seconds: u64) -> String {
        let mut path = format!("{}?watch=true&allowWatchBookmarks=true&timeoutSeconds={seconds}", self.path);
        path.push_str(&self.selectors);
        path.push_str("&resourceVersion=");
        encode_into(&mut path, version);
        path
    }

    pub(super) const fn list_accept(&self) -> Accept {
        if self.metadata_only { Accept::MetadataList } else { Accept::Whole }
    }

    pub(super) const fn item_accept(&self) -> Accept {
        if self.metadata_only { Accept::Metadata } else { Accept::Whole }
    }
}

/// Root path of a group and version; the core group has its own.
pub(super) fn group_version(group: &str, version: &str) -> String {
    if group.is_empty() { format!("/api/{version}") } else { format!("/apis/{group}/{version}") }
}

/// RFC 3986: everything but unreserved characters is escaped.
fn encode_into(path: &mut String, text: &str) {
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            path.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(path, "%{byte:02X}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_api() {
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
