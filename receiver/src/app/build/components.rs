//! Components that changes of KCP reach.

use std::{sync::Arc, time::Duration};

use tidewatch_select::catalog::visibility::restricted_modules;

#[cfg(feature = "stamps")]
use anyhow::Context as _;
use anyhow::Result;
use tidewatch_api::{Watcher, key::KymaKey};
use tidewatch_cluster::{
    WriteBudgets,
    kinds::KindCache,
    leader::WriteFence,
    limits::REQUEST_DEADLINE,
    runtime_access::{self, RuntimeAccess},
};
use tidewatch_fleet::{
    manifest_queue::{self, ManifestQueue},
    pause::Pause,
    plans::Plans,
    recorder::EventRecorder,
    stores::Stores,
    table::{self, RuntimeTable},
    takeover::Takeover,
};
use tidewatch_gateway::{enrolment::Revocations, ports::v2};
use tidewatch_installer::watcher;
use tidewatch_kit::system_roots::SystemRoots;
use tidewatch_modules::{
    catalog,
    mandatory::MandatoryModules,
    manifest::{self, module_watches},
};

use crate::app::{Process, changes, counters::Counters};

/// Creates the components that changes of KCP reach. With `installs`, the plan also has the watches that the agents'
/// installation needs.
pub(super) fn components(
    process: &Process,
    stores: Stores,
    installs: bool,
    counters: &Counters,
) -> Result<changes::Components> {
    let Process { config, replica, tls_state, role, .. } = process;
    let backdate = tls_state.authority.as_ref().map_or(Duration::ZERO, tidewatch_trust::Authority::backdate);
    let settings = table::Settings {
        heartbeat: config.heartbeat,
        max_heartbeats_per_second: config.path.max_heartbeats_per_second,
        away_after: config.path.away_after,
        request_deadline: REQUEST_DEADLINE,
        slots: usize::from(config.concurrency),
        ..table::Settings::default()
    };
    let fleet = RuntimeTable::new(replica.shards, settings, counters.fleet.clone());
    let settings = manifest_queue::Settings { slots: settings.slots, ..manifest_queue::Settings::default() };
    let manifest_queue = ManifestQueue::new(settings, counters.manifests.clone(), fleet.tenures());
    #[cfg(feature = "stamps")]
    if let Some(path) = &config.stamp_file {
        fleet.set_stamps(path).with_context(|| format!("open the stamp file {}", path.display()))?;
    }
    let access = runtime_access::Settings {
        allow: config.allow_runtime_addresses.clone(),
        deny: config.deny_runtime_addresses.clone(),
        system_roots: SystemRoots::load(),
        fence: WriteFence::closed(),
        ..Default::default()
    };
    let restricted_modules = restricted_modules(&config.restricted_default_modules);
    let catalog = catalog::Settings { restricted_modules, flags: config.catalog.clone() };
    let installed = if installs { tidewatch_installer::watches() } else { Vec::new() };
    let (plan, ..) = watcher::plan::<Arc<Watcher>>(installed.clone(), &[]);
    let manifests = stores.manifests.clone();
    let manifest_memories = manifest::Memories::default();
    let memories = manifest_memories.clone();
    let additional = move |key: &KymaKey| {
        let of_kyma = manifests.find_of_kyma(key, None);
        module_watches(of_kyma.iter().map(|manifest| (manifest.key(), manifest.facts())), &memories)
    };
    let plans = Plans::new(plan, Box::new(additional), watcher::extend);
    let recorder = EventRecorder::new(counters.recorder.clone());
    Ok(changes::Components {
        stores,
        fleet,
        access: RuntimeAccess::new(access, counters.access.clone()),
        catalog: catalog::Catalog::new(
            catalog,
            counters.catalog.clone(),
            WriteBudgets::new(counters.writes.clone()),
            role.clone(),
        ),
        plans,
        installed: installed.into(),
        pause: Pause::new(config.pause),
        takeover: Takeover::new(&config.kyma_selector, config.takeover_quiet),
        v2_allowed: v2::V2AllowList::default(),
        revocations: Revocations::new(counters.enrolment.clone(), backdate),
        manifest_queue,
        manifest_memories,
        kinds: KindCache::default(),
        mandatory: MandatoryModules::new(&config.namespace, recorder.clone()),
        recorder,
        role: role.clone(),
    })
}
