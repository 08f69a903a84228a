//! `X-Forwarded-Client-Cert` as written by proxies of the Envoy family, parsed like lifecycle-manager's listener does.

use rustls_pki_types::{
    CertificateDer,
    pem::{PemObject, SectionKind},
};
use thiserror::Error;

use super::MAX_FORWARDED_BYTES;
use crate::certificate;

/// Precedes the certificate.
const CERT: &str = "Cert=";

/// The error of reading a forwarded certificate.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ReadForwardedError {
    /// Longer than [`MAX_FORWARDED_BYTES`].
    #[error("the forwarded certificate is too long")]
    TooLong,
    /// No `Cert=`, or an empty one.
    #[error("no certificate is forwarded")]
    Missing,
    /// More than one `Cert=`: one of them may have been injected by a client of the proxy.
    #[error("more than one certificate is forwarded")]
    Several,
    /// A percent sign without two hex digits.
    #[error("the forwarded certificate is not URL-encoded")]
    Escape,
    /// Not PEM, or the first block is not a certificate.
    #[error("the forwarded certificate is not PEM")]
    Pem,
}

/// Parses the certificate in a header value: the text after `Cert=` up to `;` or `,`, URL-decoded (a plus is a space),
/// without quotes, first PEM block. The certificate is not verified.
///
/// # Errors
/// [`ReadForwardedError`].
pub fn parse_forwarded(value: &[u8]) -> Result<CertificateDer<'static>, ReadForwardedError> {
    if value.len() > MAX_FORWARDED_BYTES {
        return Err(ReadForwardedError::TooLong);
    }
    let value = std::str::from_utf8(value).map_err(|_| ReadForwardedError::Escape)?;
    let (_, rest) = value.split_once(CERT).ok_or(ReadForwardedError::Missing)?;
    if rest.contains(CERT) {
        return Err(ReadForwardedError::Several);
    }
    let text = rest.split([';', ',']).next().unwrap_or_default();
    let decoded = decode(text)?;
    let pem = decoded.trim_ascii();
    let pem = pem.strip_prefix(b"\"").unwrap_or(pem);
    let pem = pem.strip_suffix(b"\"").unwrap_or(pem);
    if pem.is_empty() {
        return Err(ReadForwardedError::Missing);
    }
    match <(SectionKind, Vec<u8>)>::from_pem_slice(pem) {
        Ok((SectionKind::Certificate, der)) => Ok(der.into()),
        _ => Err(ReadForwardedError::Pem),
    }
}

/// Writes the header value for a leaf: `Cert="<URL-encoded PEM>"`.
#[must_use]
pub fn forwarded_header(leaf: &CertificateDer<'_>) -> String {
    let pem = certificate::to_pem(leaf);
    let mut value = String::with_capacity(pem.len() + pem.len() / 4);
    value.push_str("Cert=\"");
    for byte in pem.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            value.push(char::from(byte));
        } else {
            value.push_str(&format!("%{byte:02X}"));
        }
    }
    value.push('"');
    value
}

fn decode(text: &str) -> Result<Vec<u8>, ReadForwardedError> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => {
                let mut digit = || bytes.next().and_then(|digit| char::from(digit).to_digit(16));
                let (Some(high), Some(low)) = (digit(), digit()) else { return Err(ReadForwardedError::Escape) };
                u8::try_from(high * 16 + low).map_err(|_| ReadForwardedError::Escape)?
            }
            b'+' => b' ',
            byte => byte,
        });
    }
    Ok(decoded)
}
