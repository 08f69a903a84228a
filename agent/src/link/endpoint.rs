//! Where the receiver is.

use std::str::FromStr;

use http::{Uri, uri::Authority};
use thiserror::Error;

/// Why a text is no endpoint.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("the receiver's address is not of the form https://host:port")]
pub struct ParseEndpoint;

/// Host and port of the receiver, lower case; the port is left out where it is the default, as in `:authority`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(Authority);

impl Endpoint {
    /// As it stands in requests and signatures.
    #[must_use]
    pub fn authority(&self) -> &str {
        self.0.as_str()
    }

    /// The address of a route.
    ///
    /// # Errors
    /// The path is none.
    pub(super) fn uri(&self, path: &str) -> Result<Uri, http::Error> {
        Uri::builder().scheme("https").authority(self.0.clone()).path_and_query(path).build()
    }
}

impl FromStr for Endpoint {
    type Err = ParseEndpoint;

    fn from_str(text: &str) -> Result<Self, ParseEndpoint> {
        let uri: Uri = text.to_ascii_lowercase().parse().map_err(|_| ParseEndpoint)?;
        let authority = uri.authority().ok_or(ParseEndpoint)?;
        let plain = uri.scheme_str() == Some("https")
            && matches!(uri.path(), "" | "/")
            && uri.query().is_none()
            && !authority.as_str().contains('@')
            && !authority.host().is_empty();
        let text = authority.as_str();
        let text = if authority.port_u16() == Some(443) { text.trim_end_matches(":443") } else { text };
        plain.then(|| text.parse().ok()).flatten().map(Self).ok_or(ParseEndpoint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_plain_https_address_is_one() {
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
            assert_eq!(bad.parse::<Endpoint>(), Err(ParseEndpoint), "{bad}");
        }
    }
}
