//! Labels of the metrics of a queue.

use prometheus_client::encoding::EncodeLabelSet;

/// Position in a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct PlaceLabel {
    pub(crate) r#where: &'static str,
}

/// Priority of queued work.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct PriorityLabel {
    pub(crate) priority: &'static str,
}
