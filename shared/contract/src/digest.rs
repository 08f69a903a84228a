//! The set digest of a watch: the sum modulo 2^128 of one keyed hash per object.
//!
//! Addition commutes, so two sides with the same objects have the same digest regardless of the order of events, and
//! one change costs one subtraction and one addition.

use std::{fmt, ops};

use aws_lc_rs::hmac;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use tidewatch_api::identity::RuntimeId;
use tidewatch_kit::hex;

/// A sum of object hashes, or a difference of two sums. 128 bits, wrapping; 32 hex digits on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct Digest(u128);

impl Digest {
    /// The digest of the empty set.
    pub const ZERO: Self = Self(0);

    /// Creates a digest from its value.
    pub const fn new(value: u128) -> Self {
        Self(value)
    }
}

impl ops::Add for Digest {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.wrapping_add(other.0))
    }
}

impl ops::Sub for Digest {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0.wrapping_sub(other.0))
    }
}

impl ops::AddAssign for Digest {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl ops::SubAssign for Digest {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        hex::decode_u128(&text).map(Self).ok_or_else(|| de::Error::custom("a digest is 32 lower-case hex digits"))
    }
}

/// Hashes objects under a key that depends on the runtime alone, so that no runtime's digest equals another's.
pub struct ObjectHasher(hmac::Key);

impl ObjectHasher {
    /// Derives the key from the runtime id.
    pub fn new(runtime: &RuntimeId) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, format!("tidewatch digest v1 {runtime}").as_bytes()))
    }

    /// Hashes the fields of one object. Each field is prefixed with its length, so that lists that are split
    /// differently do not collide.
    pub fn hash(&self, fields: &[&[u8]]) -> Digest {
        let mut context = hmac::Context::with_key(&self.0);
        for field in fields {
            context.update(&(field.len() as u64).to_be_bytes());
            context.update(field);
        }
        let tag = context.sign();
        let mut half = [0; 16];
        half.copy_from_slice(&tag.as_ref()[..16]);
        Digest(u128::from_be_bytes(half))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_independent_of_order_and_field_boundaries_count() {
        let hasher = ObjectHasher::new(&"runtime-1".parse().unwrap());
        let a = hasher.hash(&[b"ab", b"c"]);
        let b = hasher.hash(&[b"a", b"bc"]);
        assert_ne!(a, b);
        assert_eq!(Digest::ZERO + a + b - a, b);
        assert_eq!(a + b, b + a);
        assert_ne!(a, ObjectHasher::new(&"runtime-2".parse().unwrap()).hash(&[b"ab", b"c"]));
    }

    #[test]
    fn the_wire_form_is_fixed_width() {
        let text = serde_json::to_string(&Digest::new(10)).unwrap();
        assert_eq!(text, "\"0000000000000000000000000000000a\"");
        assert_eq!(serde_json::from_str::<Digest>(&text).unwrap(), Digest::new(10));
        assert!(serde_json::from_str::<Digest>("\"a\"").is_err());
    }
}
