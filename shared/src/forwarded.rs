//! What a proxy that ends TLS tells of its client's certificate.
//!
//! Both fields are read strictly: one certificate, one spelling. What could be read in two ways is refused, because somebody
//! in front of us may have read it in the other one. Nothing here says that the certificate is good, or that the proxy is.

use base64::{Engine, engine::general_purpose::STANDARD};
use rustls_pki_types::{CertificateDer, pem::PemObject};
use thiserror::Error;

/// Header field of RFC 9440: a byte sequence of RFC 9651.
pub const CLIENT_CERT: &str = "client-cert";
/// Header field of Envoy and those who speak like it.
pub const FORWARDED_CLIENT_CERT: &str = "x-forwarded-client-cert";
/// Bytes of one field's value, at most. A P-256 leaf takes about 1 KiB.
pub const MAX_BYTES: usize = 8 << 10;

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// Why a field tells of no certificate. The text is never quoted.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ParseForwarded {
    /// More than [`MAX_BYTES`].
    #[error("the forwarded certificate has more than {MAX_BYTES} bytes")]
    TooLarge,
    /// Not the one spelling that the field has.
    #[error("the field is not well formed")]
    Malformed,
    /// More than one element: more than one proxy has spoken, and only one is trusted.
    #[error("the field has more than one element")]
    Several,
    /// No `Cert`, or more than one.
    #[error("the element has not exactly one Cert")]
    Cert,
    /// Not one certificate in PEM and nothing else.
    #[error("the Cert is not one certificate in PEM")]
    Pem,
}

/// Reads the value of a `Client-Cert` field: `:<base64 of the DER>:`, padded, without parameters (RFC 9440, section 2.2).
///
/// # Errors
/// [`ParseForwarded::TooLarge`] and [`ParseForwarded::Malformed`].
pub fn parse_client_cert(value: &str) -> Result<CertificateDer<'static>, ParseForwarded> {
    if value.len() > MAX_BYTES {
        return Err(ParseForwarded::TooLarge);
    }
    let text = value.strip_prefix(':').and_then(|rest| rest.strip_suffix(':')).filter(|text| !text.is_empty());
    let der = STANDARD.decode(text.ok_or(ParseForwarded::Malformed)?).map_err(|_| ParseForwarded::Malformed)?;
    Ok(CertificateDer::from(der))
}

/// Reads the value of an `X-Forwarded-Client-Cert` field: one element, with one `Cert=` whose value is a URL-encoded PEM
/// certificate, quoted or not. Other pairs of the element are not looked at.
///
/// # Errors
/// [`ParseForwarded`].
pub fn parse_xfcc(value: &str) -> Result<CertificateDer<'static>, ParseForwarded> {
    if value.len() > MAX_BYTES {
        return Err(ParseForwarded::TooLarge);
    }
    let mut certificates = Vec::new();
    for pair in pairs(value)? {
        let (key, value) = pair.split_once('=').ok_or(ParseForwarded::Malformed)?;
        if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(ParseForwarded::Malformed);
        }
        if key.eq_ignore_ascii_case("cert") {
            certificates.push(unquoted(value)?);
        }
    }
    match certificates[..] {
        [text] => one_pem(&url_decoded(text).ok_or(ParseForwarded::Malformed)?),
        _ => Err(ParseForwarded::Cert),
    }
}

/// Splits the only element at its semicolons. Within quotes a backslash escapes, and separators are text.
fn pairs(value: &str) -> Result<Vec<&str>, ParseForwarded> {
    let (mut pairs, mut start) = (Vec::new(), 0);
    let (mut quoted, mut escaped) = (false, false);
    for (index, byte) in value.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b',' if !quoted => return Err(ParseForwarded::Several),
            b';' if !quoted => {
                pairs.push(&value[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    if quoted {
        return Err(ParseForwarded::Malformed);
    }
    pairs.push(&value[start..]);
    Ok(pairs)
}

/// Without its quotes, if it has them on both ends and nowhere else.
fn unquoted(value: &str) -> Result<&str, ParseForwarded> {
    let inner = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(value);
    if inner.contains(['"', '\\']) { Err(ParseForwarded::Malformed) } else { Ok(inner) }
}

/// Percent-encoding undone. A `+` is refused: some write it for a space, some leave it as the digit of base64 that it is.
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

/// One certificate and nothing before, between or behind.
fn one_pem(text: &str) -> Result<CertificateDer<'static>, ParseForwarded> {
    let text = text.trim();
    let is_one = text.starts_with(BEGIN) && text.ends_with(END) && text.matches("-----BEGIN").count() == 1;
    if !is_one {
        return Err(ParseForwarded::Pem);
    }
    CertificateDer::from_pem_slice(text.as_bytes()).map_err(|_| ParseForwarded::Pem)
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
    fn a_byte_sequence_is_a_certificate() {
        let (der, _) = certificate();
        let text = STANDARD.encode(&der);
        assert_eq!(parse_client_cert(&format!(":{text}:")), Ok(der));
        for bad in
            [text.clone(), format!(":{text}"), format!(":{text}:;a=1"), format!(":{text}:, :{text}:"), "::".into()]
        {
            assert_eq!(parse_client_cert(&bad), Err(ParseForwarded::Malformed), "{bad}");
        }
        assert_eq!(parse_client_cert(&format!(":{}:", "A".repeat(MAX_BYTES))), Err(ParseForwarded::TooLarge));
    }

    #[test]
    fn one_element_with_one_cert_is_a_certificate() {
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
    fn what_can_be_read_in_two_ways_is_refused() {
        use ParseForwarded as P;
        let (_, pem) = certificate();
        let text = encoded(&pem);
        for (bad, why) in [
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
            assert_eq!(parse_xfcc(&bad), Err(why), "{bad}");
        }
    }
}
