//! What operators and authors of modules ask before and after a change of the catalog. No IO; no reconcile imports it.
//!
//! | Modules | Content |
//! |---|---|
//! | [`check`] | mistakes in templates and release metas, by themselves and against those in KCP |
//! | [`preview`] | effect of changed objects on the catalog of each visibility class |
//! | [`effects`] | effect of changed objects on each Kyma |
//! | [`view`] | the catalog as it is |
//! | [`rollouts`] | ring rollouts as they are, and the confirmation of a halted one |

pub mod check;
pub mod effects;
pub mod preview;
pub mod rollouts;
pub mod view;
