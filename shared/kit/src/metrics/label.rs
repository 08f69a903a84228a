//! Label sets of metrics, and those of one label that metrics of several modules have.

/// Declares structs that are label sets, whose labels have values of closed sets. Labels are exposed in the order of the fields.
///
/// # Example
/// ```
/// tidewatch_kit::label_sets! {
///     /// Route of a request, and the reason of its refusal.
///     pub(crate) struct RefusalLabels { reason, route }
/// }
/// let labels = RefusalLabels { reason: "rate", route: "events" };
/// ```
#[macro_export]
macro_rules! label_sets {
    ($($(#[$doc:meta])* $visibility:vis struct $name:ident { $($label:ident),+ })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, Hash, ::prometheus_client::encoding::EncodeLabelSet)]
        $visibility struct $name {
            $(
                /// Value from a closed set.
                $visibility $label: &'static str,
            )+
        }
    )*};
}

label_sets! {
    /// Kind of an object or of a failure.
    pub struct KindLabel { kind }
    /// Outcome of a reconcile, write or issuance.
    pub struct OutcomeLabel { outcome }
    /// Position in a queue.
    pub struct PlaceLabel { r#where }
    /// Priority of queued work.
    pub struct PriorityLabel { priority }
    /// Reason of a failure, refusal, action or end.
    pub struct ReasonLabel { reason }
    /// Result of a write, reconcile, event or request.
    pub struct ResultLabel { result }
    /// Route of a request.
    pub struct RouteLabel { route }
    /// State of an event path.
    pub struct StateLabel { state }
    /// Version of a build.
    pub struct VersionLabel { version }
}
