//! Watch of one object by its name.

use serde::de::DeserializeOwned;

use super::{Named, Sink, Target};
use crate::kubernetes::{ApiClient, ApiError};

/// Consumer of one object: of its `data`, as ConfigMaps and Secrets have it.
pub(crate) trait SingleObject {
    /// The part of `data` that this watch deserializes.
    type Data: DeserializeOwned;
    /// Name of the object.
    const NAME: &str;

    /// Collection that contains the object.
    fn collection(&self) -> Target;
    /// Consumes the object, which exists.
    fn present(&mut self, object: Named<Self::Data>);
    /// Reports that the object does not exist.
    fn missing(&mut self);
    /// Reports that the list or the watch failed; it will be retried.
    fn failed(&mut self, error: &ApiError);
    /// Reports that the watch is open, so that what was read is current.
    fn opened(&mut self) {}
}

/// Sink that selects one object.
pub(crate) struct Single<S> {
    pub(crate) consumer: S,
    /// The list in progress contains the object.
    listed: bool,
}

impl<S: SingleObject> Single<S> {
    /// Creates the sink of a consumer.
    pub(crate) const fn new(consumer: S) -> Self {
        Self { consumer, listed: false }
    }
}

impl<S: SingleObject> Sink for Single<S> {
    type Item = Named<S::Data>;

    async fn target(&mut self, _client: &ApiClient) -> Result<Target, ApiError> {
        Ok(self.consumer.collection().select("", &format!("metadata.name={}", S::NAME)).full_objects())
    }

    fn begin(&mut self) {
        self.listed = false;
    }

    fn complete(&mut self, _version: &str) {
        if !self.listed {
            self.consumer.missing();
        }
    }

    fn present(&mut self, item: Self::Item) {
        if item.metadata.name == S::NAME {
            self.listed = true;
            self.consumer.present(item);
        }
    }

    fn gone(&mut self, item: Self::Item) {
        if item.metadata.name == S::NAME {
            self.consumer.missing();
        }
    }

    fn failed(&mut self, error: &ApiError) {
        self.consumer.failed(error);
    }

    fn opened(&mut self) {
        self.consumer.opened();
    }
}
