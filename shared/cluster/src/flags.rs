//! Value parsers of flags.

use std::{ops::RangeInclusive, time::Duration};

use clap::builder::TypedValueParser;
use tidewatch_api::labels::is_dns_subdomain;

/// Parses the name of an object, an RFC 1123 subdomain.
pub fn object_name(text: &str) -> Result<String, &'static str> {
    is_dns_subdomain(text).then(|| text.to_owned()).ok_or("not the name of an object")
}

/// Parses whole seconds within a range.
pub fn seconds(range: RangeInclusive<i64>) -> impl TypedValueParser<Value = Duration> {
    clap::value_parser!(u32).range(range).map(|seconds| Duration::from_secs(seconds.into()))
}

/// Parser of a maximum number of connections.
pub fn connections() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=1_000_000)
}
