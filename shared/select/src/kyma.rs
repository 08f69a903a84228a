//! The modules of one Kyma.
//!
//! `validate` checks the selection, `lookup` finds the version of each module, and `window` decides whether it waits for a
//! maintenance window. `modules` decides on the Manifests, `mandatory` on those of mandatory modules, `leaving` on those that are
//! being deleted; `build` makes desired ones.

pub mod build;
pub mod installed;
pub mod layer;
mod leaving;
pub mod lookup;
pub mod mandatory;
pub mod modules;
pub mod pin;
pub mod validate;
mod window;

pub use self::mandatory::is_installable;
