//! Client certificates that a TLS-terminating proxy forwards in header fields.
//!
//! Both fields are parsed strictly: one certificate in one canonical spelling. Ambiguous values are rejected, because
//! another component on the path may have interpreted them differently. Parsing establishes trust neither in the
//! certificate nor in the proxy.

use base64::{Engine, engine::general_purpose::STANDARD};
use rustls_pki_types::{CertificateDer, pem::PemObject};
use thiserror::Error;

/// Header field of RFC 9440: a byte sequence of RFC 9651.
pub const CLIENT_CERT: &str = "client-cert";
/// Header field of RFC 9440 with the certificates between the leaf and a root: a list of byte sequences.
pub const CLIENT_CERT_CHAIN: &str = "client-cert-chain";
/// Certificates of that field at most.
pub const MAX_CHAIN: usize = 4;
/// Header field of Envoy and compatible proxies.
pub const FORWARDED_CLIENT_CERT: &str = "x-forwarded-client-cert";
/// Limit of a field's value in bytes. A P-256 leaf takes about 1 KiB.
pub const MAX_BYTES: usize = 8 << 10;

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// The error of parsing a field. Messages never quote the value.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ParseForwardedError {
    /// More than [`MAX_BYTES`].
    #[error("the forwarded certificate has more than {MAX_BYTES} bytes")]
    TooLarge,
    /// Not in the canonical spelling.
    #[error("the field is not well formed")]
    Malformed,
    /// More than one element: more than one proxy added itself, and only one is trusted.
    #[error("the field has more than one element")]
    Several,
    /// No `Cert`, or more than one.
    #[error("the element has not exactly one Cert")]
    Cert,
    /// Not exactly one PEM certificate.
    #[error("the Cert is not one certificate in PEM")]
    Pem,
}

/// Parses the value of a `Client-Cert` field: `:<base64 of the DER>:`, padded, without parameters (RFC 9440, section
/// 2.2).
///
/// # Errors
/// [`ParseForwardedError::TooLarge`] and [`ParseForwardedError::Malformed`].
pub fn parse_client_cert(value: &str) -> Result<CertificateDer<'static>, ParseForwardedError> {
    if value.len() > MAX_BYTES {
        return Err(ParseForwardedError::TooLarge);
    }
    let text = value.strip_prefix(':').and_then(|rest| rest.strip_suffix(':')).filter(|text| !text.is_empty());
    let der =
        STANDARD.decode(text.ok_or(ParseForwardedError::Malformed)?).map_err(|_| ParseForwardedError::Malformed)?;
    Ok(CertificateDer::from(der))
}

/// Parses the value of a `Client-Cert-Chain` field: one to [`MAX_CHAIN`] certificates as in `Client-Cert`, separated by commas (RFC
/// 9440, section 2.3).
///
/// # Errors
/// [`ParseForwardedError::TooLarge`], also for too many certificates, and [`ParseForwardedError::Malformed`].
pub fn parse_client_cert_chain(value: &str) -> Result<Vec<CertificateDer<'static>>, ParseForwardedError> {
    if value.len() > MAX_CHAIN * MAX_BYTES || value.matches(',').count() >= MAX_CHAIN {
        return Err(ParseForwardedError::TooLarge);
    }
    value.split(',').map(|one| parse_client_cert(one.trim_matches([' ', '\t']))).collect()
}

/// Returns the value of a `Client-Cert` field, or of a `Client-Cert-Chain` field with several certificates.
#[must_use]
pub fn client_cert(certificates: &[CertificateDer<'_>]) -> String {
    let encoded = certificates.iter().map(|certificate| format!(":{}:", STANDARD.encode(certificate)));
    encoded.collect::<Vec<_>>().join(", ")
}

/// Parses the value of an `X-Forwarded-Client-Cert` field: one element with one `Cert=`, a URL-encoded PEM certificate,
/// quoted or not. Other pairs of the element are ignored.
///
/// # Errors
/// [`ParseForwardedError`].
pub fn parse_xfcc(value: &str) -> Result<CertificateDer<'static>, ParseForwardedError> {
    if value.len() > MAX_BYTES {
        return Err(ParseForwardedError::TooLarge);
    }
    let mut certificates = Vec::new();
    for pair in pairs(value)? {
        let (key, value) = pair.split_once('=').ok_or(ParseForwardedError::Malformed)?;
        if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(ParseForwardedError::Malformed);
        }
        if key.eq_ignore_ascii_case("cert") {
            certificates.push(unquoted(value)?);
        }
    }
    match certificates[..] {
        [text] => one_pem(&url_decoded(text).ok_or(ParseForwardedError::Malformed)?),
        _ => Err(ParseForwardedError::Cert),
    }
}

/// Splits the only element at its semicolons. In quotes, a backslash escapes and separators are text.
fn pairs(value: &str) -> Result<Vec<&str>, ParseForwardedError> {
    let mut pairs = Vec::new();
    let mut start = 0;
    let mut quoted = false;
    let mut escaped = false;
    for (index, byte) in value.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b',' if !quoted => return Err(ParseForwardedError::Several),
            b';' if !quoted => {
                pairs.push(&value[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    if quoted {
        return Err(ParseForwardedError::Malformed);
    }
    pairs.push(&value[start..]);
    Ok(pairs)
}

/// Removes quotes that enclose the whole value; quotes and escapes elsewhere are malformed.
fn unquoted(value: &str) -> Result<&str, ParseForwardedError> {
    let inner = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(value);
    if inner.contains(['"', '\\']) { Err(ParseForwardedError::Malformed) } else { Ok(inner) }
}

/// Decodes percent-encoding. A `+` is rejected: some proxies write it for a space, others leave it as a base64 digit.
fn url_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'%' => bytes.push(digit(rest.next()?)? << 4 | digit(rest.next()?)?),
            b'+' => return None,
            byte if byte.is_ascii_graphic() || byte == b' ' => bytes.push(byte),
            _ => return None,
        }
    }
    String::from_utf8(bytes).ok()
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16)?.try_into().ok()
}

/// Parses exactly one PEM certificate, without any text before or after it.
fn one_pem(text: &str) -> Result<CertificateDer<'static>, ParseForwardedError> {
    let text = text.trim();
    let is_one = text.starts_with(BEGIN) && text.ends_with(END) && text.matches("-----BEGIN").count() == 1;
    if !is_one {
        return Err(ParseForwardedError::Pem);
    }
    CertificateDer::from_pem_slice(text.as_bytes()).map_err(|_| ParseForwardedError::Pem)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    fn certificate() -> (CertificateDer<'static>, String) {
        let certificate = CertificateParams::default().self_signed(&KeyPair::generate().unwrap()).unwrap();
        (certificate.der().clone(), certificate.pem())
    }

    fn encoded(pem: &str) -> String {
        pem.bytes()
            .map(|b| if b.is_ascii_alphanumeric() { char::from(b).to_string() } else { format!("%{b:02X}") })
            .collect()
    }

    #[test]
    fn client_cert_is_one_byte_sequence() {
        let (der, _) = certificate();
        let text = STANDARD.encode(&der);
        assert_eq!(parse_client_cert(&format!(":{text}:")), Ok(der));
        for bad in
            [text.clone(), format!(":{text}"), format!(":{text}:;a=1"), format!(":{text}:, :{text}:"), "::".into()]
        {
            assert_eq!(parse_client_cert(&bad), Err(ParseForwardedError::Malformed), "{bad}");
        }
        assert_eq!(parse_client_cert(&format!(":{}:", "A".repeat(MAX_BYTES))), Err(ParseForwardedError::TooLarge));
    }

    #[test]
    fn client_cert_chain_is_a_short_list_of_byte_sequences() {
        let certificates: Vec<_> = (0..=MAX_CHAIN).map(|_| certificate().0).collect();
        for length in 1..=MAX_CHAIN {
            let chain = &certificates[..length];
            assert_eq!(parse_client_cert_chain(&client_cert(chain)).as_deref(), Ok(chain));
            assert_eq!(parse_client_cert_chain(&client_cert(chain).replace(", ", ",\t ")).as_deref(), Ok(chain));
        }
        assert_eq!(parse_client_cert_chain(&client_cert(&certificates)), Err(ParseForwardedError::TooLarge));
        assert_eq!(parse_client_cert(&client_cert(&certificates[..1])).as_ref(), Ok(&certificates[0]));
        let one = client_cert(&certificates[..1]);
        for bad in ["", ",", "x", &format!("{one},"), &format!("{one}, ::"), &format!("{one};a=1, {one}")] {
            assert_eq!(parse_client_cert_chain(bad), Err(ParseForwardedError::Malformed), "{bad}");
        }
        let large = format!("{one}, :{}:", "A".repeat(MAX_BYTES));
        assert_eq!(parse_client_cert_chain(&large), Err(ParseForwardedError::TooLarge));
    }

    #[test]
    fn xfcc_is_one_element_with_one_cert() {
        let (der, pem) = certificate();
        let text = encoded(&pem);
        for good in [
            format!("Cert={text}"),
            format!("Cert=\"{text}\""),
            format!("By=spiffe://a;Hash=00;cert=\"{text}\";Subject=\"CN=a\\\",b;c\";URI=spiffe://b"),
            format!("Cert={}", text.replace("%2D", "%2d").replace("%0A", "\n").replace('\n', "%0a")),
        ] {
            assert_eq!(parse_xfcc(&good).as_ref(), Ok(&der), "{good}");
        }
    }

    #[test]
    fn ambiguous_fields_are_rejected() {
        use ParseForwardedError as P;
        let (_, pem) = certificate();
        let text = encoded(&pem);
        for (bad, expected) in [
            (format!("Cert={text},Cert={text}"), P::Several),
            (format!("Hash=1,Cert={text}"), P::Several),
            (format!("Cert={text};Cert={text}"), P::Cert),
            (format!("Cert={text};CERT={text}"), P::Cert),
            ("Hash=00".into(), P::Cert),
            (format!("Cert=\"{text}"), P::Malformed),
            (format!("Cert={text}\"\""), P::Malformed),
            (format!("Cert={text};"), P::Malformed),
            (format!("Cert ={text}"), P::Malformed),
            (format!("Cert={text}%2"), P::Malformed),
            (format!("Cert={text}+"), P::Malformed),
            (format!("Cert={text}%FF"), P::Malformed),
            (format!("Cert={text}{text}"), P::Pem),
            (format!("Cert=x{text}"), P::Pem),
            (format!("Cert={}", encoded("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----")), P::Pem),
            ("Cert=".into(), P::Pem),
            (String::new(), P::Malformed),
            (format!("Cert={}", "A".repeat(MAX_BYTES)), P::TooLarge),
        ] {
            assert_eq!(parse_xfcc(&bad), Err(expected), "{bad}");
        }
    }
}
