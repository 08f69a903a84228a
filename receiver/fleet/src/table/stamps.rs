//! Timestamps of events that enqueue work, for measurements: with the feature `stamps` they go to a file, without it
//! nowhere. No lock of the runtime table waits for the file.

#[cfg(feature = "stamps")]
mod file;

#[cfg(not(feature = "stamps"))]
pub(super) use disabled::Stamps;
#[cfg(feature = "stamps")]
pub(super) use file::Stamps;

/// Zero-size stand-in.
#[cfg(not(feature = "stamps"))]
mod disabled {
    use tidewatch_api::identity::RuntimeId;
    use tidewatch_contract::event::Event;

    #[derive(Default)]
    pub(in crate::table) struct Stamps(());

    pub(in crate::table) struct StampedEvents;

    impl Stamps {
        pub(in crate::table) fn capture<'a>(&self, _: impl Iterator<Item = &'a Event>) -> StampedEvents {
            StampedEvents
        }

        pub(in crate::table) fn record(&self, _: &RuntimeId, _: StampedEvents) {}
    }
}
