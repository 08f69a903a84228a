//! Address of the receiver.

use std::str::FromStr;

use http::{Uri, uri::Authority};
use thiserror::Error;

/// The text is not an endpoint.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("the receiver's address does not have the form https://host:port")]
pub struct ParseEndpointError;

/// Host and port in lower case; the default port is omitted, as in `:authority`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(Authority);

impl Endpoint {
    /// The authority, as used in requests and signatures.
    #[must_use]
    pub fn authority(&self) -> &str {
        self.0.as_str()
    }

    /// The URI of a path.
    ///
    /// # Errors
    /// The path is invalid.
    pub(crate) fn uri(&self, path: &str) -> Result<Uri, http::Error> {
        Uri::builder().scheme("https").authority(self.0.clone()).path_and_query(path).build()
    }
}

impl FromStr for Endpoint {
    type Err = ParseEndpointError;

    fn from_str(text: &str) -> Result<Self, ParseEndpointError> {
        let uri: Uri = text.to_ascii_lowercase().parse().map_err(|_| ParseEndpointError)?;
        let authority = uri.authority().ok_or(ParseEndpointError)?;
        let plain = uri.scheme_str() == Some("https")
            && matches!(uri.path(), "" | "/")
            && uri.query().is_none()
            && !authority.as_str().contains('@')
            && !authority.host().is_empty();
        let text = authority.as_str();
        let text = if authority.port_u16() == Some(443) { text.trim_end_matches(":443") } else { text };
        plain.then(|| text.parse().ok()).flatten().map(Self).ok_or(ParseEndpointError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_plain_https_address_is_an_endpoint() {
        for (text, authority) in [
            ("https://KCP.example:8443", "kcp.example:8443"),
            ("https://kcp.example/", "kcp.example"),
            ("https://kcp.example:443", "kcp.example"),
            ("https://[::1]:1", "[::1]:1"),
        ] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!(endpoint.authority(), authority);
            assert_eq!(endpoint.uri("/v3/events").unwrap().to_string(), format!("https://{authority}/v3/events"));
        }
        for bad in
            ["", "kcp.example", "http://kcp.example", "https://a@kcp", "https://kcp/x", "https://kcp?x", "https://"]
        {
            assert_eq!(bad.parse::<Endpoint>(), Err(ParseEndpointError), "{bad}");
        }
    }
}
