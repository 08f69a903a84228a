//! Objects in a cache of which some are reduced.

use std::fmt::Debug;

use kube::runtime::reflector::Lookup;
use tidewatch_api::key::{Key, KymaKey};

/// Object in a cache, whole or reduced.
pub(in crate::app::changes) trait CachedObject:
    Lookup<DynamicType = ()> + Clone + Send + Sync + 'static
{
    /// Kind of the key.
    type Of: Clone + Ord + Debug + Send + Sync;

    /// Namespace and name of the object.
    fn key(&self) -> Key<Self::Of>;

    /// Kyma that the label names.
    fn kyma(&self) -> Option<KymaKey>;

    /// Returns true if the body is not in the cache.
    fn is_reduced(&self) -> bool;

    /// resourceVersion of the object.
    fn object_version(&self) -> Option<&str>;

    /// Returns true if an owner reference by which readers find the object has another uid than this. Most kinds have none.
    fn has_other_owner(&self, _uid: &str) -> bool {
        false
    }
}
