//! Lower-case hexadecimal of fixed width.

use data_encoding::HEXLOWER;

/// Encodes bytes as lower-case hex.
pub fn encode(bytes: &[u8]) -> String {
    HEXLOWER.encode(bytes)
}

/// Decodes lower-case digits, two for each byte.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    HEXLOWER.decode(text.as_bytes()).ok()
}

/// Decodes exactly sixteen lower-case digits; `None` for anything else, so that each value has one spelling.
pub fn decode_u64(text: &str) -> Option<u64> {
    is_lower_hex(text, 16).then(|| u64::from_str_radix(text, 16).ok())?
}

/// Decodes exactly thirty-two lower-case digits.
pub fn decode_u128(text: &str) -> Option<u128> {
    is_lower_hex(text, 32).then(|| u128::from_str_radix(text, 16).ok())?
}

/// True for exactly this number of lower-case digits.
pub(crate) fn is_lower_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_has_one_spelling() {
        assert_eq!(encode(&[0x00, 0xab, 0xff]), "00abff");
        assert_eq!(decode_u64("00000000000000ff"), Some(255));
        for bad in ["ff", "00000000000000FF", "+0000000000000ff", "00000000000000fg"] {
            assert_eq!(decode_u64(bad), None, "{bad}");
        }
        assert_eq!(decode("00abff"), Some(vec![0x00, 0xab, 0xff]));
        for bad in ["a", "0A", "0g", "é", " 0"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
        assert_eq!(decode_u128(&encode(&7u128.to_be_bytes())), Some(7));
    }
}
