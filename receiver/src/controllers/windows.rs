//! Maintenance windows: the times at which upgrades of modules that require a downtime may begin.
//!
//! `parse` reads the policy of the incumbent's format, and `policy` decides by it for one runtime and one time; both are pure.

mod parse;
mod policy;
