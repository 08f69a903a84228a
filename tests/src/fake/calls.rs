//! What a runtime was asked, by verb and resource, as the audit log of an API server names them.

use std::{collections::BTreeMap, fmt};

use http::Method;

use super::path::{self, Place};

/// Counts of calls. A resource is a plural, with the subresource after a slash; what concerns no resource is `discovery` or `other`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Calls(BTreeMap<(&'static str, String), u64>);

impl Calls {
    /// Notes one call to a path below the runtime's prefix.
    pub(super) fn note(&mut self, method: &Method, path: &str, is_watch: bool) {
        *self.0.entry(named(method, path, is_watch)).or_default() += 1;
    }

    /// How many there were with this verb, of this resource.
    #[must_use]
    pub fn of(&self, verb: &str, resource: &str) -> u64 {
        let of = |((had, of), _): &(&(&'static str, String), &u64)| *had == verb && of == resource;
        self.0.iter().filter(of).map(|(_, count)| count).sum()
    }

    /// How many there were.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }

    /// Those that are not among the earlier ones of the same runtime.
    #[must_use]
    pub fn since(mut self, before: &Self) -> Self {
        self.0.retain(|call, count| {
            *count = count.saturating_sub(before.0.get(call).copied().unwrap_or_default());
            *count > 0
        });
        self
    }

    /// Those of several runtimes together.
    #[must_use]
    pub fn sum<'a>(all: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut sum = Self::default();
        for (call, count) in all.into_iter().flat_map(|calls| &calls.0) {
            *sum.0.entry(call.clone()).or_default() += count;
        }
        sum
    }
}

impl fmt::Display for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (number, ((verb, resource), count)) in self.0.iter().enumerate() {
            let comma = if number == 0 { "" } else { ", " };
            write!(f, "{comma}{count} {verb} {resource}")?;
        }
        Ok(())
    }
}

fn named(method: &Method, path: &str, is_watch: bool) -> (&'static str, String) {
    let (is_collection, resource) = match path::place(path) {
        Some(Place::Objects(at)) if at.subresource.is_empty() => (at.name.is_empty(), at.resource.to_owned()),
        Some(Place::Objects(at)) => (false, format!("{}/{}", at.resource, at.subresource)),
        Some(Place::Group(_) | Place::Resources { .. }) => (false, "discovery".to_owned()),
        None => (false, "other".to_owned()),
    };
    let verb = match method.as_str() {
        "GET" if is_watch => "watch",
        "GET" if is_collection => "list",
        "GET" => "get",
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => "other",
    };
    (verb, resource)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_named_as_audit_logs_name_them() {
        let kymas = "/apis/operator.kyma-project.io/v1beta2/namespaces/kyma-system/kymas";
        for (method, path, is_watch, verb, resource) in [
            (Method::GET, kymas.to_owned(), false, "list", "kymas"),
            (Method::GET, kymas.to_owned(), true, "watch", "kymas"),
            (Method::POST, kymas.to_owned(), false, "create", "kymas"),
            (Method::GET, format!("{kymas}/default"), false, "get", "kymas"),
            (Method::PATCH, format!("{kymas}/default"), false, "patch", "kymas"),
            (Method::PUT, format!("{kymas}/default/status"), false, "update", "kymas/status"),
            (Method::DELETE, "/api/v1/namespaces/n/configmaps/c".to_owned(), false, "delete", "configmaps"),
            (Method::GET, "/apis/operator.kyma-project.io/v1beta2".to_owned(), false, "get", "discovery"),
            (Method::GET, "/openid/v1/jwks".to_owned(), false, "get", "other"),
        ] {
            assert_eq!(named(&method, &path, is_watch), (verb, resource.to_owned()), "{method} {path}");
        }
    }

    #[test]
    fn counts_are_told_apart_from_earlier_ones_and_summed() {
        let mut calls = Calls::default();
        calls.note(&Method::PATCH, "/api/v1/namespaces/n/configmaps/c", false);
        let before = calls.clone();
        calls.note(&Method::PATCH, "/api/v1/namespaces/n/configmaps/c", false);
        calls.note(&Method::GET, "/api/v1/namespaces/n/configmaps/c", false);
        let since = calls.clone().since(&before);
        assert_eq!((since.of("patch", "configmaps"), since.total()), (1, 2));
        assert_eq!(calls.clone().since(&calls), Calls::default());
        assert_eq!(Calls::sum([&before, &since]), calls);
        assert_eq!(calls.to_string(), "1 get configmaps, 2 patch configmaps");
        assert_eq!(Calls::default().to_string(), "none");
    }
}
