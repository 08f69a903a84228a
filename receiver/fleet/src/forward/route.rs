//! Routes from watches to the services of their managers.

use std::{collections::BTreeMap, fmt, str::FromStr, sync::Arc};

use http::Uri;
use thiserror::Error;
use tidewatch_contract::v2;

/// Service in KCP: two DNS labels (RFC 1123) and a port, so that it cannot inject anything into a URL.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Service {
    name: String,
    namespace: String,
    port: u16,
}

impl Service {
    /// Returns `None` if a name is no DNS label or the port is 0.
    pub fn new(name: &str, namespace: &str, port: u16) -> Option<Self> {
        let valid = is_label(name) && is_label(namespace) && port > 0;
        valid.then(|| Self { name: name.to_owned(), namespace: namespace.to_owned(), port })
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}:{}", self.namespace, self.name, self.port)
    }
}

fn is_label(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&text.len()) && text.bytes().all(allowed) && !text.starts_with('-') && !text.ends_with('-')
}

/// Manager at a service; each target has a lane of its own.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    manager: String,
    service: Service,
}

impl Target {
    /// Returns `None` if the manager's name cannot be a path segment.
    pub fn new(manager: &str, service: Service) -> Option<Self> {
        v2::is_manager(manager).then(|| Self { manager: manager.to_owned(), service })
    }

    /// Name of the manager.
    pub fn manager(&self) -> &str {
        &self.manager
    }

    /// Service at which the manager listens.
    pub fn service(&self) -> &Service {
        &self.service
    }
}

/// Target of each forwarded watch, by the watch's name in the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes(BTreeMap<Arc<str>, Arc<Target>>);

impl Routes {
    /// Returns the target of a watch.
    pub fn of(&self, watch: &str) -> Option<&Arc<Target>> {
        self.0.get(watch)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Arc<Target>)> {
        self.0.iter()
    }

    /// Iterates over the targets; a target of several watches is repeated.
    pub fn targets(&self) -> impl Iterator<Item = &Arc<Target>> {
        self.0.values()
    }
}

impl FromIterator<(String, Target)> for Routes {
    fn from_iter<I: IntoIterator<Item = (String, Target)>>(routes: I) -> Self {
        Self(routes.into_iter().map(|(watch, target)| (watch.into(), Arc::new(target))).collect())
    }
}

/// The text is not a valid URL template.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("a template is an http URL without path, for example http://{{service}}.{{namespace}}.svc:{{port}}")]
pub struct ParseTemplateError;

/// Template of a service's URL with the placeholders `{service}`, `{namespace}` and `{port}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UrlTemplate(String);

impl UrlTemplate {
    /// Returns the URL that receives a target's events.
    pub(crate) fn url(&self, target: &Target) -> Result<Uri, ParseTemplateError> {
        let Service { name, namespace, port } = &target.service;
        let base = self.0.replace("{service}", name).replace("{namespace}", namespace);
        let base = base.replace("{port}", &port.to_string());
        format!("{base}{}", v2::path(&target.manager)).parse().map_err(|_| ParseTemplateError)
    }
}

impl FromStr for UrlTemplate {
    type Err = ParseTemplateError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let template = Self(text.strip_suffix('/').unwrap_or(text).to_owned());
        let service = Service { name: "s".to_owned(), namespace: "n".to_owned(), port: 1 };
        let target = Target { manager: "m".to_owned(), service };
        let url = template.url(&target)?;
        let plain = url.scheme_str() == Some("http") && url.path() == "/v2/m/event" && url.query().is_none();
        let host = url.authority().is_some_and(|authority| !authority.as_str().contains('@'));
        (plain && host).then_some(template).ok_or(ParseTemplateError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_contain_only_the_template_and_its_parts() {
        let target = Target::new("other", Service::new("events", "team-a", 8082).unwrap()).unwrap();
        for (template, url) in [
            ("http://{service}.{namespace}.svc:{port}", "http://events.team-a.svc:8082/v2/other/event"),
            ("http://127.0.0.1:{port}/", "http://127.0.0.1:8082/v2/other/event"),
        ] {
            assert_eq!(template.parse::<UrlTemplate>().unwrap().url(&target).unwrap(), url);
        }
        for bad in
            ["", "{service}", "https://{service}", "http://{service}/x", "http://a@{service}", "http://{service}?"]
        {
            assert_eq!(bad.parse::<UrlTemplate>(), Err(ParseTemplateError), "{bad}");
        }
        for (name, namespace, port) in [
            ("", "n", 1),
            ("a.b", "n", 1),
            ("a", "n/x", 1),
            ("a", "n", 0),
            ("-a", "n", 1),
            ("A", "n", 1),
            ("a@b", "n", 1),
        ] {
            assert_eq!(Service::new(name, namespace, port), None, "{name}");
        }
        assert_eq!(Target::new("../x", Service::new("a", "n", 1).unwrap()), None);
    }
}
