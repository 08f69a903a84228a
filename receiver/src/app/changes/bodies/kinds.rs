//! Kinds whose cached objects can be reduced.

use std::{fmt::Debug, sync::Arc};

use kube::Resource;
use serde::de::DeserializeOwned;
use tidewatch_api::{
    key::{Key, KymaKey},
    names::label,
    shard::ShardId,
};
use tidewatch_kit::metrics::KindLabel;

use super::{object::CachedObject, selectors::by_label, shards::KymaShards};

/// Key of an object in a cache.
pub(super) type KeyOf<C> = Key<<<C as ObjectCache>::Cached as CachedObject>::Of>;

/// Cache of a kind whose objects concern one Kyma each, with an index by Kyma. The watch updates the cache first and the index
/// directly afterwards.
pub(in crate::app::changes) trait ObjectCache: Send + Sync + 'static {
    /// Kind of the objects, for metrics and logs.
    const KIND: KindLabel;
    /// Object as a list returns it.
    type Listed: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + Sync + 'static;
    /// Object as the cache has it.
    type Cached: CachedObject;

    /// Returns an object by its key, reduced or not.
    fn find(&self, key: &KeyOf<Self>) -> Option<Self::Cached>;

    /// Returns the objects whose label names a Kyma, reduced or not.
    fn of_kyma(&self, kyma: &KymaKey) -> Vec<Self::Cached>;

    /// Returns all objects that are reduced, or all that are not.
    fn all(&self, reduced: bool) -> Vec<Arc<Self::Cached>>;

    /// Waits until a reader needs the body of a reduced object. Supports one caller. Cancel safe.
    fn missed(&self) -> impl Future<Output = ()> + Send;

    /// Returns the whole form of an object.
    fn whole(&self, listed: Self::Listed) -> Self::Cached;

    /// Returns the reduced form of a whole object; `None` if it cannot be reduced.
    fn reduce(&self, whole: &Self::Cached) -> Option<Self::Cached>;

    /// Shard whose holder needs the body of an object; `None` if it is not known.
    fn shard_of(&self, object: &Self::Cached, shards: &KymaShards) -> Option<ShardId> {
        shards.of_object(object)
    }

    /// Returns label selectors that select together all objects of these Kymas.
    fn selectors(&self, kymas: &[&KymaKey]) -> Vec<String> {
        by_label(label::KYMA_NAME, kymas.iter().map(|kyma| kyma.name.as_str()))
    }

    /// An object got another form, not another version. Called while the cache is locked: when a scan finds that a body is
    /// there, its readers find it too.
    fn replaced(&self, _object: &Self::Cached) {}
}
