//! Requests to a runtime by verb and resource, with the names of an API server's audit log.

use std::{collections::BTreeMap, fmt};

use http::Method;

use super::path::{self, Target};

/// Counts of requests. A resource is a plural, with the subresource after a slash; requests without a resource count as
/// `discovery` or `other`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Calls(BTreeMap<(&'static str, String), u64>);

impl Calls {
    /// Counts one request to a path below the runtime's prefix.
    pub(super) fn record(&mut self, method: &Method, path: &str, is_watch: bool) {
        *self.0.entry(label(method, path, is_watch)).or_default() += 1;
    }

    /// Number of requests with this verb for this resource.
    pub fn of(&self, verb: &str, resource: &str) -> u64 {
        let of = |((had, of), _): &(&(&'static str, String), &u64)| *had == verb && of == resource;
        self.0.iter().filter(of).map(|(_, count)| count).sum()
    }

    /// Number of all requests.
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }

    /// Number of writes.
    pub fn writes(&self) -> u64 {
        let is_write = |verb: &str| matches!(verb, "create" | "update" | "patch" | "delete");
        self.0.iter().filter(|((verb, _), _)| is_write(verb)).map(|(_, count)| count).sum()
    }

    /// The difference to earlier counts of the same runtime.
    #[must_use]
    pub fn since(mut self, before: &Self) -> Self {
        self.0.retain(|call, count| {
            *count = count.saturating_sub(before.0.get(call).copied().unwrap_or_default());
            *count > 0
        });
        self
    }

    /// Sum over several runtimes.
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

fn label(method: &Method, path: &str, is_watch: bool) -> (&'static str, String) {
    let (is_collection, resource) = match path::parse(path) {
        Some(Target::Objects(at)) if at.subresource.is_empty() => (at.name.is_empty(), at.resource.to_owned()),
        Some(Target::Objects(at)) => (false, format!("{}/{}", at.resource, at.subresource)),
        Some(Target::Group(_) | Target::Resources { .. }) => (false, "discovery".to_owned()),
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
    fn calls_have_the_names_of_audit_logs() {
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
            assert_eq!(label(&method, &path, is_watch), (verb, resource.to_owned()), "{method} {path}");
        }
    }

    #[test]
    fn counts_are_subtracted_and_summed() {
        let mut calls = Calls::default();
        calls.record(&Method::PATCH, "/api/v1/namespaces/n/configmaps/c", false);
        let before = calls.clone();
        calls.record(&Method::PATCH, "/api/v1/namespaces/n/configmaps/c", false);
        calls.record(&Method::GET, "/api/v1/namespaces/n/configmaps/c", false);
        let since = calls.clone().since(&before);
        assert_eq!((since.of("patch", "configmaps"), since.total()), (1, 2));
        assert_eq!(calls.clone().since(&calls), Calls::default());
        assert_eq!(Calls::sum([&before, &since]), calls);
        assert_eq!(calls.to_string(), "1 get configmaps, 2 patch configmaps");
        assert_eq!(Calls::default().to_string(), "none");
    }
}
