//! Authorities of this receiver (`--authority`).

use std::str::FromStr;

use http::{HeaderMap, Uri, header, uri::Authority};
use thiserror::Error;

use super::refusal::Refusal;

/// Error of parsing an [`OwnAuthority`].
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("an authority is <host> or <host>:<port>, without user or scheme")]
pub struct ParseAuthorityError;

/// `Host` or `:authority` as signatures cover it: lower case, without port 443 (RFC 9421, section 2.2.3).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OwnAuthority(String);

impl OwnAuthority {
    /// Returns the form of a signature base.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the host without the port: a name, or an address without brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        let port = self.0.rfind(':').filter(|at| !self.0[*at..].contains(']'));
        self.0[..port.unwrap_or(self.0.len())].trim_start_matches('[').trim_end_matches(']')
    }

    /// Replaces port 0 by the bound port.
    pub(super) fn at(&self, port: u16) -> Self {
        self.0.strip_suffix(":0").map_or_else(|| self.clone(), |host| Self(normalize(&format!("{host}:{port}"))))
    }
}

impl FromStr for OwnAuthority {
    type Err = ParseAuthorityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let authority: Authority = text.parse().map_err(|_| ParseAuthorityError)?;
        let has_user = authority.as_str().contains('@');
        // An empty or non-numeric port is certainly a mistake.
        let has_bad_port = authority.port_u16().is_none() && authority.host().len() != authority.as_str().len();
        if has_user || has_bad_port || authority.host().is_empty() {
            return Err(ParseAuthorityError);
        }
        Ok(Self(normalize(authority.as_str())))
    }
}

fn normalize(text: &str) -> String {
    let lower = text.to_ascii_lowercase();
    lower.strip_suffix(":443").map_or(lower.clone(), str::to_owned)
}

/// Finds the authority of a request among the own ones. `Host` may be absent only if `:authority` is present.
pub(super) fn find<'a>(own: &'a [OwnAuthority], uri: &Uri, headers: &HeaderMap) -> Result<&'a OwnAuthority, Refusal> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next().map(|host| host.to_str().map_err(|_| Refusal::Host)).transpose()?;
    if hosts.next().is_some() {
        return Err(Refusal::Host);
    }
    let authority = match (uri.authority().map(Authority::as_str), host) {
        (Some(authority), Some(host)) if normalize(authority) != normalize(host) => return Err(Refusal::Host),
        (Some(authority), _) => authority,
        (None, Some(host)) => host,
        (None, None) => return Err(Refusal::Host),
    };
    let authority = normalize(authority);
    own.iter().find(|own| own.0 == authority).ok_or(Refusal::Authority)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authorities_are_normalized() {
        for (text, expected) in
            [("KCP.test:8443", "kcp.test:8443"), ("kcp.test:443", "kcp.test"), ("[::1]:1", "[::1]:1")]
        {
            assert_eq!(text.parse::<OwnAuthority>().unwrap().as_str(), expected);
        }
        let any: OwnAuthority = "kcp.test:0".parse().unwrap();
        assert_eq!((any.at(8443).as_str(), any.at(443).as_str()), ("kcp.test:8443", "kcp.test"));
        for bad in ["", "https://kcp.test", "user@kcp.test", "kcp.test:", "kcp.test:99999", "a b", ":80"] {
            assert_eq!(bad.parse::<OwnAuthority>(), Err(ParseAuthorityError), "{bad}");
        }
    }

    #[test]
    fn request_needs_exactly_one_own_authority() {
        let own = ["kcp.test:8443".parse().unwrap(), "127.0.0.1:8443".parse().unwrap()];
        let check = |uri: &str, hosts: &[&str]| {
            let mut headers = HeaderMap::new();
            for host in hosts {
                headers.append(header::HOST, host.parse().unwrap());
            }
            find(&own, &uri.parse().unwrap(), &headers).map(OwnAuthority::as_str)
        };
        assert_eq!(check("/x", &["KCP.test:8443"]), Ok("kcp.test:8443"));
        assert_eq!(check("https://127.0.0.1:8443/x", &[]), Ok("127.0.0.1:8443"));
        assert_eq!(check("https://kcp.test:8443/x", &["kcp.test:8443"]), Ok("kcp.test:8443"));
        assert_eq!(check("https://kcp.test:8443/x", &["127.0.0.1:8443"]), Err(Refusal::Host));
        assert_eq!(check("/x", &[]), Err(Refusal::Host));
        assert_eq!(check("/x", &["kcp.test:8443", "kcp.test:8443"]), Err(Refusal::Host));
        assert_eq!(check("/x", &["kcp.test"]), Err(Refusal::Authority));
    }
}
