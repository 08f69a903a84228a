//! Maintenance windows: `parse` reads a policy in lifecycle-manager's format, and `policy` decides by it for one runtime and one
//! time.

pub mod parse;
pub mod policy;

pub use self::{
    parse::{Mistakes, PolicyError},
    policy::{NoWindowError, WindowState},
};

/// First words of the message of a module whose window cannot be determined: lifecycle-manager's.
pub const UNKNOWN: &str = "failed to determine if maintenance window is active";
