//! Cache of the access Secrets, from which the access to the runtimes is built.

use std::sync::Arc;

use tidewatch_api::key::{KymaKey, OfKyma};
use tidewatch_cluster::runtime_access::{AccessSecret, ListedSecret, RuntimeAccess};
use tidewatch_kit::metrics::KindLabel;

use super::{CachedObject, ObjectCache};
use crate::app::changes::owners::SecretOwners;

/// See the module documentation.
pub(in crate::app::changes) struct SecretCache {
    pub(super) owners: Arc<SecretOwners>,
    pub(super) access: RuntimeAccess,
    pub(super) refresh: Box<dyn Fn(&KymaKey) + Send + Sync>,
}

impl SecretCache {
    /// `refresh` updates the access to the runtime of a Kyma from the cache.
    pub(in crate::app::changes) fn new(
        owners: Arc<SecretOwners>,
        access: RuntimeAccess,
        refresh: impl Fn(&KymaKey) + Send + Sync + 'static,
    ) -> Self {
        Self { owners, access, refresh: Box::new(refresh) }
    }
}

impl ObjectCache for SecretCache {
    const KIND: KindLabel = KindLabel { kind: "secrets" };
    type Listed = ListedSecret;
    type Cached = AccessSecret;

    fn find(&self, key: &KymaKey) -> Option<AccessSecret> {
        self.owners.find(key)
    }

    fn of_kyma(&self, kyma: &KymaKey) -> Vec<AccessSecret> {
        self.owners.read(kyma).iter().map(|secret| (**secret).clone()).collect()
    }

    fn all(&self, reduced: bool) -> Vec<Arc<AccessSecret>> {
        self.owners.all(reduced)
    }

    async fn missed(&self) {
        self.access.missed().await;
    }

    fn whole(&self, listed: ListedSecret) -> AccessSecret {
        let mut secret = listed.into();
        self.owners.share_keys(&mut secret);
        secret
    }

    fn reduce(&self, whole: &AccessSecret) -> Option<AccessSecret> {
        let mut reduced = whole.reduced();
        self.owners.share_keys(&mut reduced);
        Some(reduced)
    }

    fn replaced(&self, secret: &AccessSecret) {
        // Else the access would go on with the form before: with the credentials of another replica's runtime, or without.
        secret.kyma().into_iter().for_each(&self.refresh);
    }
}

impl CachedObject for AccessSecret {
    type Of = OfKyma;

    fn key(&self) -> KymaKey {
        self.key().clone()
    }

    fn kyma(&self) -> Option<KymaKey> {
        self.kyma().cloned()
    }

    fn is_reduced(&self) -> bool {
        self.is_reduced()
    }

    fn object_version(&self) -> Option<&str> {
        self.object_version()
    }
}
