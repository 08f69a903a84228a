//! Label sets of one label that metrics of several modules have.

use prometheus_client::encoding::EncodeLabelSet;

macro_rules! label_sets {
    ($($(#[$doc:meta])* $name:ident { $label:ident })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
        pub struct $name {
            /// Value from a closed set.
            pub $label: &'static str,
        }
    )*};
}

label_sets! {
    /// Kind of an object or of a failure.
    KindLabel { kind }
    /// Outcome of a reconcile, write or issuance.
    OutcomeLabel { outcome }
    /// Position in a queue.
    PlaceLabel { r#where }
    /// Priority of queued work.
    PriorityLabel { priority }
    /// Reason of a failure, refusal, action or end.
    ReasonLabel { reason }
    /// Result of a write, reconcile, event or request.
    ResultLabel { result }
    /// Route of a request.
    RouteLabel { route }
    /// State of an event path.
    StateLabel { state }
    /// Version of a build.
    VersionLabel { version }
}
