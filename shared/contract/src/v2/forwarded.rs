//! `X-Forwarded-Client-Cert` as written by proxies of the Envoy family, parsed like lifecycle-manager's listener does.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use rustls_pki_types::{
    CertificateDer,
    pem::{PemObject, SectionKind},
};

use super::MAX_FORWARDED_BYTES;
use crate::{certificate, forwarded::percent_decoded};

/// Precedes the certificate.
const CERT: &str = "Cert=";
/// Characters that are escaped: all but the unreserved ones (RFC 3986, section 2.3).
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Parses the certificate in a header value: the text after `Cert=` up to `;` or `,`, URL-decoded (a plus is a space),
/// without quotes, first PEM block. The certificate is not verified. `None` for anything else, and for more than
/// [`MAX_FORWARDED_BYTES`].
pub fn parse_forwarded(value: &[u8]) -> Option<CertificateDer<'static>> {
    if value.len() > MAX_FORWARDED_BYTES {
        return None;
    }
    let (_, rest) = std::str::from_utf8(value).ok()?.split_once(CERT)?;
    if rest.contains(CERT) {
        // One of them may have been injected by a client of the proxy.
        return None;
    }
    let text = rest.split([';', ',']).next()?;
    let decoded = percent_decoded(&text.replace('+', " "))?;
    let pem = decoded.trim_ascii();
    let pem = pem.strip_prefix(b"\"").unwrap_or(pem);
    let pem = pem.strip_suffix(b"\"").unwrap_or(pem);
    match <(SectionKind, Vec<u8>)>::from_pem_slice(pem) {
        Ok((SectionKind::Certificate, der)) => Some(der.into()),
        _ => None,
    }
}

/// Writes the header value for a leaf: `Cert="<URL-encoded PEM>"`.
pub fn forwarded_header(leaf: &CertificateDer<'_>) -> String {
    let pem = certificate::to_pem(leaf);
    format!("Cert=\"{}\"", utf8_percent_encode(&pem, ESCAPED))
}
