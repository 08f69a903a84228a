//! State kept of one object: 56 bytes, beside its key.

use std::{fmt, num::NonZeroI64};

use tidewatch_contract::event::Change;
use tidewatch_kit::hex;

use crate::memory::allocation;

/// Last observed state of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectState {
    /// `metadata.uid`.
    pub uid: Uid,
    /// `metadata.resourceVersion`.
    pub version: Version,
    /// `metadata.generation`; `None` for kinds that omit it or set it to 0.
    pub generation: Option<NonZeroI64>,
    /// Hash of labels, annotations, finalizers, deletion timestamp and owner references.
    pub metadata: u64,
}

impl ObjectState {
    /// Heap memory beside the 56 bytes, in bytes.
    pub(crate) fn heap(&self) -> usize {
        let uid = if let Uid::Text(text) = &self.uid { text.len() } else { 0 };
        let version = if let Version::Text(text) = &self.version { text.len() } else { 0 };
        allocation(uid) + allocation(version)
    }

    /// Classifies the change to `new`; `None` for the same state. A different uid is a different object of the same
    /// name.
    pub(crate) fn compare(&self, new: &Self) -> Option<Change> {
        if self.uid != new.uid {
            Some(Change::Created)
        } else if self.generation != new.generation {
            Some(Change::Spec)
        } else if self.metadata != new.metadata {
            Some(Change::Metadata)
        } else {
            (self.version != new.version).then_some(Change::Status)
        }
    }
}

/// Compact uid: nearly all are UUIDs, stored in 16 bytes instead of 36 and an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uid {
    /// UUID in canonical lowercase form.
    Uuid([u8; 16]),
    /// Any other text.
    Text(Box<str>),
}

impl From<&str> for Uid {
    fn from(text: &str) -> Self {
        uuid(text).map_or_else(|| Self::Text(text.into()), Self::Uuid)
    }
}

fn uuid(text: &str) -> Option<[u8; 16]> {
    let dashed = [8, 13, 18, 23].iter().all(|at| text.as_bytes().get(*at) == Some(&b'-'));
    if !dashed || text.len() != 36 {
        return None;
    }
    hex::decode_u128(&text.replace('-', "")).map(u128::to_be_bytes)
}

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Uuid(bytes) => {
                let [a, b, c, d, e] =
                    [&bytes[..4], &bytes[4..6], &bytes[6..8], &bytes[8..10], &bytes[10..]].map(hex::encode);
                write!(f, "{a}-{b}-{c}-{d}-{e}")
            }
        }
    }
}

/// Compact resourceVersion: opaque to clients, but nearly all are decimal numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Version {
    /// Decimal number without leading zeros.
    Number(u64),
    /// Any other text.
    Text(Box<str>),
}

impl From<&str> for Version {
    fn from(text: &str) -> Self {
        let canonical = !text.starts_with(['0', '+']);
        let number = canonical.then(|| text.parse().ok()).flatten();
        number.map_or_else(|| Self::Text(text.into()), Self::Number)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Text(text) => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compact_forms_round_trip() {
        for uid in ["0a1b2c3d-0000-4000-8000-00000000000f", "0A1B2C3D-0000-4000-8000-00000000000F", "u", "", "a-b"] {
            assert_eq!(Uid::from(uid).to_string(), uid);
        }
        assert!(matches!(Uid::from("0a1b2c3d-0000-4000-8000-00000000000f"), Uid::Uuid(_)));
        for version in ["1", "18446744073709551615", "18446744073709551616", "0", "01", "+1", "", "abc"] {
            assert_eq!(Version::from(version).to_string(), version);
        }
        assert!(matches!(Version::from("42"), Version::Number(42)));
    }

    #[test]
    fn object_state_takes_at_most_56_bytes() {
        assert!(size_of::<ObjectState>() <= 56, "{}", size_of::<ObjectState>());
    }
}
