//! Random numbers; decision logic takes them as arguments.

use std::time::Duration;

use aws_lc_rs::rand;

/// 64 random bits.
pub(crate) fn bits() -> u64 {
    let mut bytes = [0; 8];
    rand::fill(&mut bytes).expect("the library ends the process itself when the system has no entropy");
    u64::from_ne_bytes(bytes)
}

/// A uniform integer below `bound`; 0 for a bound of 0. The modulo bias is negligible for jitter.
pub(crate) fn below(bound: u64) -> u64 {
    bits().checked_rem(bound).unwrap_or(0)
}

/// A duration between zero and `bound`, in whole milliseconds.
pub(crate) fn up_to(bound: Duration) -> Duration {
    let millis = u64::try_from(bound.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(below(millis.saturating_add(1)))
}
