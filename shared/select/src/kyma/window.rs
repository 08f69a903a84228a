//! Upgrades that require a downtime of their module wait for a maintenance window: pure.
//!
//! A first installation never waits, and neither do mandatory modules, unmanaged ones, and a Kyma that skips maintenance
//! windows. A module that waits keeps its installed version and channel, whatever led to the other version: a moved channel,
//! or the user's selection.

use kube::ResourceExt as _;
use tidewatch_api::{Kyma, Manifest};

use super::{
    build,
    lookup::{self, Installed, Resolved, Sources, Waiting},
    validate::{Follow, WantedModule},
};
use crate::windows::{NoWindowError, WindowState};

/// Result of a lookup of a module with a maintenance window.
#[derive(Debug)]
pub(super) enum Gate {
    /// The version is installed now.
    Now(Resolved),
    /// The installed version stays until the window opens; `None` if it is no longer available, so that its Manifest stays as
    /// it is.
    Waits(Option<Resolved>, Waiting),
    /// The Manifest stays as it is, because no window can be determined.
    Unknown(NoWindowError),
}

/// Decides whether a resolved version waits. `manifest` is the Manifest of the module.
pub(super) fn gate(
    kyma: &Kyma,
    sources: &Sources<'_>,
    module: &WantedModule,
    manifest: Option<(&Manifest, &Installed)>,
    found: Resolved,
) -> Gate {
    let is_exempt =
        !found.template.spec.requires_downtime() || !module.managed || module.follows == Ok(Follow::Mandatory);
    let Some((manifest, installed)) =
        manifest.filter(|(_, installed)| !is_exempt && installed.version != found.version)
    else {
        return Gate::Now(found);
    };
    let opens = match (sources.window)() {
        WindowState::Open => return Gate::Now(found),
        WindowState::Opens(opens) => opens,
        WindowState::Unknown(cause) => return Gate::Unknown(cause),
    };
    let kept = lookup::installed(sources, module, installed);
    // A Manifest of another component is left to its successor, which comes with the new version.
    let kept = kept.filter(|kept| build::name_of(kyma, module, kept) == manifest.name_any());
    Gate::Waits(kept, Waiting { version: found.version, opens })
}
