//! `X-Forwarded-Client-Cert` as proxies of the Envoy family write it, read as the incumbent's listener reads it.

use rustls_pki_types::{
    CertificateDer,
    pem::{PemObject, SectionKind},
};
use thiserror::Error;

use super::MAX_FORWARDED_BYTES;
use crate::certificate;

/// Where the certificate begins.
const CERT: &str = "Cert=";

/// Why a header forwards no certificate.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ReadForwarded {
    /// Longer than [`MAX_FORWARDED_BYTES`].
    #[error("the forwarded certificate is too long")]
    TooLong,
    /// No `Cert=`, or nothing behind it.
    #[error("no certificate is forwarded")]
    Missing,
    /// More than one `Cert=`: somebody before the proxy may have written one of them.
    #[error("more than one certificate is forwarded")]
    Several,
    /// A percent sign without two hex digits.
    #[error("the forwarded certificate is not URL-encoded")]
    Escape,
    /// No PEM, or another block than a certificate first.
    #[error("the forwarded certificate is not PEM")]
    Pem,
}

/// The certificate that a header value forwards: the text after `Cert=` up to `;` or `,`, URL-decoded (a plus is a space), without
/// quotes, its first PEM block. Nothing is verified.
///
/// # Errors
/// [`ReadForwarded`].
pub fn forwarded(value: &[u8]) -> Result<CertificateDer<'static>, ReadForwarded> {
    if value.len() > MAX_FORWARDED_BYTES {
        return Err(ReadForwarded::TooLong);
    }
    let value = std::str::from_utf8(value).map_err(|_| ReadForwarded::Escape)?;
    let (_, rest) = value.split_once(CERT).ok_or(ReadForwarded::Missing)?;
    if rest.contains(CERT) {
        return Err(ReadForwarded::Several);
    }
    let text = rest.split([';', ',']).next().unwrap_or_default();
    let decoded = decode(text)?;
    let pem = decoded.trim_ascii();
    let pem = pem.strip_prefix(b"\"").unwrap_or(pem);
    let pem = pem.strip_suffix(b"\"").unwrap_or(pem);
    if pem.is_empty() {
        return Err(ReadForwarded::Missing);
    }
    match <(SectionKind, Vec<u8>)>::from_pem_slice(pem) {
        Ok((SectionKind::Certificate, der)) => Ok(der.into()),
        _ => Err(ReadForwarded::Pem),
    }
}

/// The header value that forwards a leaf: `Cert="<URL-encoded PEM>"`.
#[must_use]
pub fn forward(leaf: &CertificateDer<'_>) -> String {
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

fn decode(text: &str) -> Result<Vec<u8>, ReadForwarded> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => {
                let mut digit = || bytes.next().and_then(|digit| char::from(digit).to_digit(16));
                let (Some(high), Some(low)) = (digit(), digit()) else { return Err(ReadForwarded::Escape) };
                u8::try_from(high * 16 + low).map_err(|_| ReadForwarded::Escape)?
            }
            b'+' => b' ',
            byte => byte,
        });
    }
    Ok(decoded)
}
