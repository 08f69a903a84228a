//! Which runtime, and what of it, a request's path names.

/// What a path below a runtime's prefix names.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place<'a> {
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
    /// Empty for all, and for what has none.
    pub(super) namespace: &'a str,
    /// Empty for a collection.
    pub(super) name: &'a str,
    /// `status`, or empty.
    pub(super) subresource: &'a str,
}

impl Objects<'_> {
    /// What the keys of all its objects begin with.
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

/// Reads the rest.
pub(super) fn place(path: &str) -> Option<Place<'_>> {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let (group, version, rest) = match parts.as_slice() {
        ["api", version, rest @ ..] => ("", *version, rest),
        ["apis", group] => return Some(Place::Group(group)),
        ["apis", group, version, rest @ ..] => (*group, *version, rest),
        _ => return None,
    };
    let objects = |resource, namespace, name, subresource| {
        Some(Place::Objects(Objects { group, resource, namespace, name, subresource }))
    };
    match *rest {
        [] => Some(Place::Resources { group, version }),
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
    fn paths_name_what_api_servers_say_they_name() {
        assert_eq!(cluster("/clusters/one/api/v1"), Some(("one", "/api/v1")));
        assert_eq!(cluster("/api/v1"), None);
        let objects = |path| match place(path) {
            Some(Place::Objects(objects)) => (objects.key(objects.name), objects.subresource),
            other => panic!("{other:?}"),
        };
        assert_eq!(objects("/api/v1/namespaces/kyma-system"), ("/namespaces//kyma-system".to_owned(), ""));
        assert_eq!(objects("/api/v1/namespaces/n/configmaps/c"), ("/configmaps/n/c".to_owned(), ""));
        assert_eq!(objects("/apis/g/v1/namespaces/n/kymas/k/status"), ("g/kymas/n/k".to_owned(), "status"));
        assert_eq!(objects("/apis/g/v1/definitions/d/status"), ("g/definitions//d".to_owned(), "status"));
        assert_eq!(place("/apis/g/v1"), Some(Place::Resources { group: "g", version: "v1" }));
        assert_eq!(place("/apis/g"), Some(Place::Group("g")));
        assert_eq!(place("/version"), None);
    }
}
