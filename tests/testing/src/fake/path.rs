//! The runtime and the resource that a request's path names.

/// Target of a path below a runtime's prefix.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Target<'a> {
    /// `/apis/<group>`.
    Group(&'a str),
    /// `/api/v1` or `/apis/<group>/<version>`.
    Resources {
        /// Empty for the core group.
        group: &'a str,
        /// Version.
        version: &'a str,
    },
    /// Objects of a kind, or one of them.
    Objects(Objects<'a>),
}

/// A collection, or one object of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Objects<'a> {
    /// Empty for the core group.
    pub(super) group: &'a str,
    /// Plural.
    pub(super) resource: &'a str,
    /// Empty for all namespaces, and for cluster-scoped kinds.
    pub(super) namespace: &'a str,
    /// Empty for a collection.
    pub(super) name: &'a str,
    /// `status`, or empty.
    pub(super) subresource: &'a str,
}

impl Objects<'_> {
    /// Key prefix of all its objects.
    pub(super) fn prefix(&self) -> String {
        let Self { group, resource, namespace, .. } = self;
        if namespace.is_empty() { format!("{group}/{resource}/") } else { format!("{group}/{resource}/{namespace}/") }
    }

    /// The key of one object.
    pub(super) fn key(&self, name: &str) -> String {
        let Self { group, resource, namespace, .. } = self;
        format!("{group}/{resource}/{namespace}/{name}")
    }
}

/// Splits `/clusters/<name>/…` into the runtime's name and the rest.
pub(super) fn cluster(path: &str) -> Option<(&str, &str)> {
    let rest = path.strip_prefix("/clusters/")?;
    let end = rest.find('/')?;
    Some((&rest[..end], &rest[end..]))
}

/// Parses the path below the runtime's prefix.
pub(super) fn parse(path: &str) -> Option<Target<'_>> {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let (group, version, rest) = match parts.as_slice() {
        ["api", version, rest @ ..] => ("", *version, rest),
        ["apis", group] => return Some(Target::Group(group)),
        ["apis", group, version, rest @ ..] => (*group, *version, rest),
        _ => return None,
    };
    let objects = |resource, namespace, name, subresource| {
        Some(Target::Objects(Objects { group, resource, namespace, name, subresource }))
    };
    match *rest {
        [] => Some(Target::Resources { group, version }),
        [resource] => objects(resource, "", "", ""),
        [resource, name] => objects(resource, "", name, ""),
        ["namespaces", name, "status"] => objects("namespaces", "", name, "status"),
        ["namespaces", namespace, resource] => objects(resource, namespace, "", ""),
        ["namespaces", namespace, resource, name] => objects(resource, namespace, name, ""),
        ["namespaces", namespace, resource, name, subresource] => objects(resource, namespace, name, subresource),
        [resource, name, subresource] => objects(resource, "", name, subresource),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_parsed_as_by_api_servers() {
        assert_eq!(cluster("/clusters/one/api/v1"), Some(("one", "/api/v1")));
        assert_eq!(cluster("/api/v1"), None);
        let objects = |path| match parse(path) {
            Some(Target::Objects(objects)) => (objects.key(objects.name), objects.subresource),
            other => panic!("{other:?}"),
        };
        assert_eq!(objects("/api/v1/namespaces/kyma-system"), ("/namespaces//kyma-system".to_owned(), ""));
        assert_eq!(objects("/api/v1/namespaces/n/configmaps/c"), ("/configmaps/n/c".to_owned(), ""));
        assert_eq!(objects("/apis/g/v1/namespaces/n/kymas/k/status"), ("g/kymas/n/k".to_owned(), "status"));
        assert_eq!(objects("/apis/g/v1/definitions/d/status"), ("g/definitions//d".to_owned(), "status"));
        assert_eq!(parse("/apis/g/v1"), Some(Target::Resources { group: "g", version: "v1" }));
        assert_eq!(parse("/apis/g"), Some(Target::Group("g")));
        assert_eq!(parse("/version"), None);
    }
}
