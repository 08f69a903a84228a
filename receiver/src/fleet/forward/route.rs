//! Which watch's events go where.

use std::{collections::BTreeMap, fmt, str::FromStr, sync::Arc};

use http::Uri;
use thiserror::Error;
use tidewatch_shared::v2;

/// A service in KCP: two DNS labels (RFC 1123) and a port, so that it can stand in a URL as nothing but itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Service {
    name: String,
    namespace: String,
    port: u16,
}

impl Service {
    /// `None` when a name is no DNS label, or the port is 0.
    #[must_use]
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

/// A manager at a service: one lane of its own.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    manager: String,
    service: Service,
}

impl Target {
    /// `None` when the manager cannot stand in a path.
    #[must_use]
    pub fn new(manager: &str, service: Service) -> Option<Self> {
        v2::is_manager(manager).then(|| Self { manager: manager.to_owned(), service })
    }

    /// The manager's name.
    #[must_use]
    pub fn manager(&self) -> &str {
        &self.manager
    }

    /// Where it listens.
    #[must_use]
    pub fn service(&self) -> &Service {
        &self.service
    }
}

/// The target of each forwarded watch, by the watch's name in the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes(BTreeMap<Arc<str>, Arc<Target>>);

impl Routes {
    /// The target of a watch.
    #[must_use]
    pub fn of(&self, watch: &str) -> Option<&Arc<Target>> {
        self.0.get(watch)
    }

    /// The first target of a manager.
    #[must_use]
    pub fn of_manager(&self, manager: &str) -> Option<&Arc<Target>> {
        self.0.values().find(|target| target.manager == manager)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Arc<Target>)> {
        self.0.iter()
    }

    /// All targets; one may stand several times.
    pub(crate) fn targets(&self) -> impl Iterator<Item = &Arc<Target>> {
        self.0.values()
    }
}

impl FromIterator<(String, Target)> for Routes {
    fn from_iter<I: IntoIterator<Item = (String, Target)>>(routes: I) -> Self {
        Self(routes.into_iter().map(|(watch, target)| (watch.into(), Arc::new(target))).collect())
    }
}

/// The text is no template.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("a template is an http URL without path, for example http://{{service}}.{{namespace}}.svc:{{port}}")]
pub struct InvalidTemplate;

/// How the URL of a service is made: `{service}`, `{namespace}` and `{port}` stand for its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UrlTemplate(String);

impl UrlTemplate {
    /// The URL of a target's events.
    pub(crate) fn url(&self, target: &Target) -> Result<Uri, InvalidTemplate> {
        let Service { name, namespace, port } = &target.service;
        let base = self.0.replace("{service}", name).replace("{namespace}", namespace);
        let base = base.replace("{port}", &port.to_string());
        format!("{base}{}", v2::path(&target.manager)).parse().map_err(|_| InvalidTemplate)
    }
}

impl FromStr for UrlTemplate {
    type Err = InvalidTemplate;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let template = Self(text.strip_suffix('/').unwrap_or(text).to_owned());
        let service = Service { name: "s".to_owned(), namespace: "n".to_owned(), port: 1 };
        let target = Target { manager: "m".to_owned(), service };
        let url = template.url(&target)?;
        let plain = url.scheme_str() == Some("http") && url.path() == "/v2/m/event" && url.query().is_none();
        let host = url.authority().is_some_and(|authority| !authority.as_str().contains('@'));
        (plain && host).then_some(template).ok_or(InvalidTemplate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    pub(crate) fn urls_are_made_of_a_template_and_can_say_nothing_else() {
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
            assert_eq!(bad.parse::<UrlTemplate>(), Err(InvalidTemplate), "{bad}");
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
