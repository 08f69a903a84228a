//! Digests by which processes of every version recognize what they have reconciled.

use aws_lc_rs::digest;
use tidewatch_shared::hex;

/// First 8 bytes of the SHA-256 in hex.
pub(super) fn short_digest(text: &str) -> String {
    hex::encode(&digest::digest(&digest::SHA256, text.as_bytes()).as_ref()[..8])
}
