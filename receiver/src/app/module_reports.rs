//! Carries reports of changed module objects from the runtime table to the queue of the Manifests, and their settlement
//! back.

use crate::{
    base::manifests::Manifests,
    controllers::manifest::{Memories, affected},
    fleet::{manifests::ManifestQueue, table::RuntimeTable},
};

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
                let of_kyma = manifests.of_kyma(&report.ticket.kyma, None);
                let of_kyma = of_kyma.iter().map(AsRef::as_ref);
                queue.report(affected(of_kyma, &report.drift, &memories), report.ticket);
            }
            ticket = queue.next_settled() => fleet.modules_settled(&ticket),
        }
    }
}
