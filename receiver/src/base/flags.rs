//! Value parsers of flags.

use std::{ops::RangeInclusive, time::Duration};

use clap::builder::TypedValueParser;

/// Parses whole seconds within a range.
pub(crate) fn seconds(range: RangeInclusive<i64>) -> impl TypedValueParser<Value = Duration> {
    clap::value_parser!(u32).range(range).map(|seconds| Duration::from_secs(seconds.into()))
}
