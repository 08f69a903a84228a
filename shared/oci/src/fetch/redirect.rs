//! Redirects: of manifests to the registry's own host and to listed hosts, of blobs to any public host with TLS as well,
//! never from https to http.

use http::{HeaderMap, Uri, header::LOCATION, uri::PathAndQuery};

use super::{Trust, error::RedirectError};
use crate::credentials::{AllowedHost, Origin, Scheme};

/// Redirects followed in one fetch.
pub(super) const MAX_REDIRECTS: usize = 3;
/// Longest location, in bytes; signed URLs of object stores have about 2,000.
const MAX_LOCATION_BYTES: usize = 16 << 10;

/// Place to which a redirect leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hop {
    pub(super) uri: Uri,
    pub(super) trust: Trust,
}

/// Returns the target of a redirect, if it may be followed. With [`Trust::Public`], that is any public host with TLS as well.
///
/// # Errors
/// [`RedirectError`].
pub(super) fn target(
    from: &Uri,
    headers: &HeaderMap,
    registry: &Origin,
    allowed: &[AllowedHost],
    reach: Trust,
) -> Result<Hop, RedirectError> {
    let location = headers.get(LOCATION).and_then(|value| value.to_str().ok());
    let location = location.filter(|location| location.len() <= MAX_LOCATION_BYTES).ok_or(RedirectError::Location)?;
    let uri = resolve(from, location).ok_or(RedirectError::Location)?;
    let (origin, before) = Origin::of(&uri).zip(Origin::of(from)).ok_or(RedirectError::Location)?;
    if origin.scheme() == Scheme::Http && before.scheme() == Scheme::Https {
        return Err(RedirectError::Downgrade);
    }
    if is_permitted(&origin, registry, allowed) {
        return Ok(Hop { uri, trust: Trust::Known });
    }
    match (reach, origin.scheme()) {
        (Trust::Public, Scheme::Https) => Ok(Hop { uri, trust: Trust::Public }),
        (Trust::Public, Scheme::Http) => Err(RedirectError::Plain(origin.host().to_owned())),
        (Trust::Known, _) => Err(RedirectError::Host(origin.host().to_owned())),
    }
}

/// Returns whether requests may be sent to a server: on the registry's host, or listed.
pub(super) fn is_permitted(origin: &Origin, registry: &Origin, allowed: &[AllowedHost]) -> bool {
    origin.host() == registry.host() || allowed.iter().any(|host| host.permits(origin))
}

/// Resolves an absolute URL, one without scheme, or an absolute path (RFC 3986, section 5.2). Relative paths are not
/// used by registries.
fn resolve(from: &Uri, location: &str) -> Option<Uri> {
    let location = location.split('#').next()?;
    if let Some(rest) = location.strip_prefix("//") {
        return format!("{}://{rest}", from.scheme_str()?).parse().ok();
    }
    if !location.starts_with('/') {
        return location.parse().ok();
    }
    let mut parts = from.clone().into_parts();
    parts.path_and_query = Some(location.parse::<PathAndQuery>().ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registry() -> Uri {
        Uri::from_static("https://registry:5000/v2/a/blobs/x")
    }

    fn follow(from: &Uri, location: &'static str, reach: Trust) -> Result<(String, Trust), RedirectError> {
        let allowed = ["storage.example.com".parse().unwrap(), "other:444".parse().unwrap()];
        let headers = [(LOCATION, location.parse().unwrap())].into_iter().collect();
        let hop = target(from, &headers, &Origin::of(from).unwrap(), &allowed, reach);
        hop.map(|Hop { uri, trust }| (uri.to_string(), trust))
    }

    #[test]
    fn known_hosts_are_followed() {
        for (location, uri) in [
            ("https://storage.example.com/b?sig=1", "https://storage.example.com/b?sig=1"),
            ("/v2/b?x=y#z", "https://registry:5000/v2/b?x=y"),
            ("//registry/b", "https://registry/b"),
            ("https://other:444/", "https://other:444/"),
        ] {
            for reach in [Trust::Known, Trust::Public] {
                assert_eq!(follow(&registry(), location, reach), Ok((uri.to_owned(), Trust::Known)), "{location}");
            }
        }
    }

    #[test]
    fn other_hosts_are_followed_for_blobs_only_and_over_tls_only() {
        for location in ["https://cdn.example.com/", "https://storage.example.com.evil/", "https://other/"] {
            assert_eq!(
                follow(&registry(), location, Trust::Public),
                Ok((location.to_owned(), Trust::Public)),
                "{location}"
            );
            let refused = follow(&registry(), location, Trust::Known);
            assert!(matches!(refused, Err(RedirectError::Host(host)) if location.contains(&host)), "{location}");
        }
        let plain = Uri::from_static("http://registry:5000/v2/a/blobs/x");
        let refused = follow(&plain, "http://cdn.example.com/", Trust::Public);
        assert_eq!(refused, Err(RedirectError::Plain("cdn.example.com".to_owned())));
    }

    #[test]
    fn downgrades_and_malformed_locations_are_refused() {
        for (location, error) in [
            ("http://registry:5000/b", RedirectError::Downgrade),
            ("http://storage.example.com/", RedirectError::Downgrade),
            ("https://storage.example.com@evil/", RedirectError::Location),
            ("ftp://registry/", RedirectError::Location),
            ("blobs/y", RedirectError::Location),
            ("", RedirectError::Location),
        ] {
            for reach in [Trust::Known, Trust::Public] {
                assert_eq!(follow(&registry(), location, reach), Err(error.clone()), "{location}");
            }
        }
        let from = registry();
        let refused = target(&from, &HeaderMap::new(), &Origin::of(&from).unwrap(), &[], Trust::Public);
        assert_eq!(refused, Err(RedirectError::Location));
    }
}
