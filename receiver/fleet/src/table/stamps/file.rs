//! Writer of the stamp file.

use std::{
    fs::OpenOptions,
    io::{self, BufWriter, Write},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use tidewatch_api::identity::RuntimeId;
use tidewatch_contract::event::{Event, Payload};
use tidewatch_kit::{error_levels, variant::VariantName as _};

/// Maximum number of stamps that wait for the file.
const CAPACITY: usize = 16_384;
/// Polling interval of the writer: a wake-up would cost the stamping thread time and distort the measurement.
const PAUSE: Duration = Duration::from_millis(20);

struct Stamp {
    at: Instant,
    runtime: RuntimeId,
    events: StampedEvents,
}

/// Events of one request, to be stamped if they enqueue work.
pub(in crate::table) struct StampedEvents(Vec<StampedEvent>);

/// Fields of one event's line.
struct StampedEvent {
    watch: String,
    /// Change of the object, `watch` for a whole watch.
    change: &'static str,
    /// resourceVersion of the object, `-` for a whole watch.
    resource_version: String,
    /// Time at which the agent observed the change, by its clock; `-` if absent.
    seen: String,
}

impl StampedEvent {
    fn of(event: &Event) -> Self {
        let (change, resource_version) = match &event.payload {
            Payload::Object(object) => (object.change.as_str(), object.resource_version.clone()),
            Payload::Watch | Payload::Unnamed { .. } => ("watch", "-".to_owned()),
        };
        let seen = event.time.clone().unwrap_or_else(|| "-".to_owned());
        Self { watch: event.watch.clone(), change, resource_version, seen }
    }
}

/// Sender to the writing thread, which ends when this is dropped; without a file, nothing is stamped.
#[derive(Default)]
pub(in crate::table) struct Stamps(Option<Writer>);

struct Writer {
    sender: SyncSender<Stamp>,
    dropped: Arc<AtomicU64>,
}

impl Stamps {
    /// Opens the file for appending and starts the thread.
    pub(in crate::table) fn append(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let (sender, receiver) = sync_channel(CAPACITY);
        let dropped = Arc::<AtomicU64>::default();
        let total = dropped.clone();
        thread::Builder::new().name("stamps".to_owned()).spawn(move || {
            if let Err(error) = write(BufWriter::new(file), &receiver, &total) {
                tracing::warn!(
                    error = error_levels::own(&error),
                    cause = error_levels::cause(&error),
                    "Stamp file could not be written"
                );
            }
        })?;
        Ok(Self(Some(Writer { sender, dropped })))
    }

    /// Copies the fields to stamp, before the events are recorded.
    pub(in crate::table) fn capture<'a>(&self, events: impl Iterator<Item = &'a Event>) -> StampedEvents {
        StampedEvents(if self.0.is_some() { events.map(StampedEvent::of).collect() } else { Vec::new() })
    }

    /// Stamps events that enqueued work of their Kyma just now.
    pub(in crate::table) fn record(&self, runtime: &RuntimeId, events: StampedEvents) {
        let Some(writer) = &self.0 else { return };
        if events.0.is_empty() {
            return;
        }
        let stamp = Stamp { at: Instant::now(), runtime: runtime.clone(), events };
        if let Err(TrySendError::Full(stamp) | TrySendError::Disconnected(stamp)) = writer.sender.try_send(stamp) {
            writer.dropped.fetch_add(stamp.events.0.len() as u64, Ordering::Relaxed);
        }
    }
}

/// Writes until the sender is dropped; flushes whenever no stamp is pending, and logs stamps that were dropped
/// meanwhile.
fn write(mut file: impl Write, receiver: &Receiver<Stamp>, dropped: &AtomicU64) -> io::Result<()> {
    let mut logged = 0;
    // `Instant` has no epoch, so it is written as the distance from one known moment.
    let base = Instant::now();
    let unix = SystemTime::now();
    let unix = unix.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    loop {
        let stamp = match receiver.try_recv() {
            Ok(stamp) => stamp,
            Err(TryRecvError::Disconnected) => return file.flush(),
            Err(TryRecvError::Empty) => {
                file.flush()?;
                let total = dropped.load(Ordering::Relaxed);
                if total > logged {
                    tracing::warn!(total, "Stamps dropped");
                    logged = total;
                }
                thread::sleep(PAUSE);
                continue;
            }
        };
        let nanos = (unix + stamp.at.saturating_duration_since(base)).as_nanos();
        for StampedEvent { watch, change, resource_version, seen } in &stamp.events.0 {
            let watch = sanitize(watch);
            let version = sanitize(resource_version);
            let seen = sanitize(seen);
            writeln!(file, "{nanos} {} {watch} {change} {version} {seen}", stamp.runtime)?;
        }
    }
}

/// Replaces whitespace and control characters, so that text of an agent cannot add lines or fields.
fn sanitize(text: &str) -> String {
    text.chars().map(|c| if c.is_whitespace() || c.is_control() { '_' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamped(watch: &str) -> StampedEvent {
        StampedEvent { watch: watch.into(), change: "spec", resource_version: "42".into(), seen: "-".into() }
    }

    #[test]
    fn each_event_is_one_line_of_six_fields() {
        let (sender, receiver) = sync_channel(4);
        let stamps = Stamps(Some(Writer { sender, dropped: Arc::default() }));
        stamps.record(&"r-1".parse().unwrap(), StampedEvents(vec![stamped("kyma"), stamped("a b\n")]));
        stamps.record(&"r-1".parse().unwrap(), StampedEvents(Vec::new()));
        drop(stamps);
        let mut file = Vec::new();
        write(&mut file, &receiver, &AtomicU64::default()).unwrap();
        let text = String::from_utf8(file).unwrap();
        let lines: Vec<Vec<_>> = text.lines().map(|line| line.split(' ').collect()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0][1..], ["r-1", "kyma", "spec", "42", "-"]);
        assert_eq!(lines[1][1..], ["r-1", "a_b_", "spec", "42", "-"]);
        assert!(lines[0][0].parse::<u128>().unwrap() > 1_000_000_000_000_000_000);
    }

    #[test]
    fn stamps_beyond_the_capacity_are_counted() {
        let (sender, _receiver) = sync_channel(1);
        let dropped = Arc::<AtomicU64>::default();
        let stamps = Stamps(Some(Writer { sender, dropped: dropped.clone() }));
        for _ in 0..3 {
            stamps.record(&"r-1".parse().unwrap(), StampedEvents(vec![stamped("kyma")]));
        }
        assert_eq!(dropped.load(Ordering::Relaxed), 2);
    }
}
