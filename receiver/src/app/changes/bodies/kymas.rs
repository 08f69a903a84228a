//! Cache of the Kymas, whose reduced forms share the parts that many have in common. A Kyma is in the shard that its own label
//! or uid determines, and its watch event chooses its form: one that comes into another shard gets the form that is due there.

use std::{collections::BTreeSet, future, sync::Arc};

use kube::runtime::reflector::Store;
use parking_lot::Mutex;
use tidewatch_api::{
    Kyma,
    key::{KymaKey, OfKyma},
    names::label,
    shard::ShardId,
};
use tidewatch_fleet::{
    CommonKymaParts,
    stores::{
        kymas::{self, CachedKyma},
        unread::drop_unread,
    },
};
use tidewatch_kit::metrics::KindLabel;

use super::{CachedObject, ObjectCache, selectors::by_label, shards::KymaShards};
use crate::app::changes::fingerprint::ObjectFingerprint;

/// See the module documentation.
pub(in crate::app::changes) struct KymaCache {
    kymas: Store<CachedKyma>,
    parts: Mutex<CommonKymaParts>,
}

impl From<Store<CachedKyma>> for KymaCache {
    fn from(kymas: Store<CachedKyma>) -> Self {
        Self { kymas, parts: Mutex::default() }
    }
}

impl ObjectCache for KymaCache {
    const KIND: KindLabel = KindLabel { kind: "kymas" };
    type Listed = Kyma;
    type Cached = CachedKyma;

    fn find(&self, key: &KymaKey) -> Option<CachedKyma> {
        let found = kymas::find(&self.kymas, key)?;
        Some((*found).clone())
    }

    fn of_kyma(&self, kyma: &KymaKey) -> Vec<CachedKyma> {
        self.find(kyma).into_iter().collect()
    }

    fn all(&self, reduced: bool) -> Vec<Arc<CachedKyma>> {
        self.kymas.state_filter(|kyma| kyma.is_reduced() == reduced)
    }

    async fn missed(&self) {
        // The Kymas of a shard are whole before it is acquired, and its watch events keep them so.
        future::pending().await
    }

    fn whole(&self, mut listed: Kyma) -> CachedKyma {
        drop_unread(&mut listed);
        listed.into()
    }

    fn reduce(&self, whole: &CachedKyma) -> Option<CachedKyma> {
        let kyma = whole.whole()?;
        let mut parts = self.parts.lock();
        let reduced = parts.reduce(kyma, ObjectFingerprint::rest_of(kyma.as_ref()));
        Some(CachedKyma::Reduced(Arc::new(reduced)))
    }

    fn shard_of(&self, kyma: &CachedKyma, shards: &KymaShards) -> Option<ShardId> {
        Some(shards.of(kyma.facts()))
    }

    /// Kymas have no label with their own name: those of runtimes are selected by the runtime id, the few others all together.
    fn selectors(&self, kymas: &[&KymaKey]) -> Vec<String> {
        let runtime = |kyma: CachedKyma| kyma.facts().labels().get(label::RUNTIME_ID).cloned().unwrap_or_default();
        let mut runtimes: BTreeSet<_> = kymas.iter().filter_map(|key| self.find(key).map(runtime)).collect();
        let has_others = runtimes.remove("");
        let mut selectors = by_label(label::RUNTIME_ID, runtimes.iter().map(String::as_str));
        if has_others {
            selectors.extend([format!("!{}", label::RUNTIME_ID), format!("{}=", label::RUNTIME_ID)]);
        }
        selectors
    }
}

impl CachedObject for CachedKyma {
    type Of = OfKyma;

    fn key(&self) -> KymaKey {
        self.key()
    }

    fn kyma(&self) -> Option<KymaKey> {
        Some(self.key())
    }

    fn is_reduced(&self) -> bool {
        self.is_reduced()
    }

    fn object_version(&self) -> Option<&str> {
        self.facts().object_version()
    }
}
