//! Identifiers of contents, equal in every process and version.

use aws_lc_rs::digest::{SHA256, digest};

use crate::hex;

/// First bytes of the SHA-256 of a content in hex; at most 32.
pub fn short_digest(content: &[u8], bytes: usize) -> String {
    hex::encode(&digest(&SHA256, content).as_ref()[..bytes])
}
