//! Carries reports of changed module objects from the runtime table to the queue of the Manifests, and their settlement
//! back.

use tidewatch_fleet::{manifest_queue::ManifestQueue, queue::Drift, stores::manifests::Manifests, table::RuntimeTable};
use tidewatch_modules::manifest::{Memories, affected};

/// Runs for ever.
pub(super) async fn run(
    fleet: RuntimeTable,
    queue: ManifestQueue,
    manifests: Manifests,
    memories: Memories,
) -> &'static str {
    loop {
        tokio::select! {
            report = fleet.next_module_report() => {
                let affected = match manifests.of_kyma(&report.ticket.kyma, None) {
                    Ok(of_kyma) => affected(of_kyma, &report.drift, &memories, |key| queue.is_queued(key)),
                    // Their inventories are not known yet, so that each may have a changed object.
                    Err(_) => {
                        let of_kyma = manifests.find_of_kyma(&report.ticket.kyma, None);
                        of_kyma.iter().map(|manifest| (manifest.key(), Drift::All)).collect()
                    }
                };
                queue.report(affected, report.ticket);
            }
            ticket = queue.next_settled() => fleet.modules_settled(&ticket),
        }
    }
}
