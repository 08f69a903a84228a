//! Selects what each Kyma gets: the part of the catalog that it sees, the version of each of its modules, and the Manifests for
//! them. No IO; pure, but for the board of roll-outs, which reconciles share.
//!
//! | Modules | Content |
//! |---|---|
//! | [`catalog`] | visibility, the catalog of each visibility class, removal guard, paced and staged roll-outs of moved channels |
//! | [`kyma`] | selected and mandatory modules of a Kyma, lookup of their versions, desired Manifests |
//! | [`module_rollout`] | rollout of a version by rings of runtimes: standing of the members, next step, stored state |
//! | [`windows`] | maintenance windows of upgrades that require a downtime |
//! | [`versions`] | versions of modules, as lifecycle-manager compares them |

pub mod catalog;
pub mod kyma;
pub mod module_rollout;
pub mod versions;
pub mod windows;
