//! Redirects of blobs: to the registry's own host and to listed hosts, never from https to http.

use http::{HeaderMap, Uri, header::LOCATION, uri::PathAndQuery};

use super::error::RedirectError;
use crate::oci::credentials::{AllowedHost, Origin, Scheme};

/// Redirects followed in one fetch.
pub(super) const MAX_REDIRECTS: usize = 3;
/// Longest location, in bytes; signed URLs of object stores have about 2,000.
const MAX_LOCATION_BYTES: usize = 16 << 10;

/// Returns the target of a redirect, if it may be followed.
///
/// # Errors
/// [`RedirectError`].
pub(super) fn target(
    from: &Uri,
    headers: &HeaderMap,
    registry: &Origin,
    allowed: &[AllowedHost],
) -> Result<Uri, RedirectError> {
    let location = headers.get(LOCATION).and_then(|value| value.to_str().ok());
    let location = location.filter(|location| location.len() <= MAX_LOCATION_BYTES).ok_or(RedirectError::Location)?;
    let uri = resolve(from, location).ok_or(RedirectError::Location)?;
    let (origin, before) = Origin::of(&uri).zip(Origin::of(from)).ok_or(RedirectError::Location)?;
    if origin.scheme() == Scheme::Http && before.scheme() == Scheme::Https {
        return Err(RedirectError::Downgrade);
    }
    if is_permitted(&origin, registry, allowed) { Ok(uri) } else { Err(RedirectError::Host) }
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

    #[test]
    fn only_permitted_locations_are_followed() {
        let from = Uri::from_static("https://registry:5000/v2/a/blobs/x");
        let registry = Origin::of(&from).unwrap();
        let allowed = ["storage.example.com".parse().unwrap(), "other:444".parse().unwrap()];
        let to = |location: &'static str| {
            let headers = [(LOCATION, location.parse().unwrap())].into_iter().collect();
            target(&from, &headers, &registry, &allowed).map(|uri| uri.to_string())
        };
        for (location, uri) in [
            ("https://storage.example.com/b?sig=1", "https://storage.example.com/b?sig=1"),
            ("/v2/b?x=y#z", "https://registry:5000/v2/b?x=y"),
            ("//registry/b", "https://registry/b"),
            ("https://other:444/", "https://other:444/"),
        ] {
            assert_eq!(to(location), Ok(uri.to_owned()), "{location}");
        }
        for (location, error) in [
            ("https://evil.example.com/", RedirectError::Host),
            ("https://storage.example.com.evil/", RedirectError::Host),
            ("https://other/", RedirectError::Host),
            ("http://registry:5000/b", RedirectError::Downgrade),
            ("http://storage.example.com/", RedirectError::Downgrade),
            ("https://storage.example.com@evil/", RedirectError::Location),
            ("ftp://registry/", RedirectError::Location),
            ("blobs/y", RedirectError::Location),
            ("", RedirectError::Location),
        ] {
            assert_eq!(to(location), Err(error), "{location}");
        }
        assert_eq!(target(&from, &HeaderMap::new(), &registry, &allowed), Err(RedirectError::Location));
    }
}
