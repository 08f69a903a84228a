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
use tidewatch_kit::{log_error, variant::VariantName as _};

/// Maximum number of stamps that wait for the file.
const CAPACITY: usize = 16_384;
/// Polling interval of the writer: a wake-up would cost the stamping thread time and distort the measurement.
const PAUSE: Duration = Duration::from_millis(20);

struct Stamp {
    at: Instant,
    runtime: RuntimeId,
    events: StampedEvents,
}

/// The lines of one request's events, each after time and runtime, to be stamped if they enqueue work.
pub(in crate::table) struct StampedEvents(Vec<String>);

/// Watch, change (`watch` for a whole watch), resourceVersion of the object, and the time at which the agent observed the change,
/// by its clock; `-` for what is absent.
fn line(event: &Event) -> String {
    let (change, resource_version) = match &event.payload {
        Payload::Object(object) => (object.change.as_str(), object.resource_version.as_str()),
        Payload::Watch | Payload::Unnamed { .. } => ("watch", "-"),
    };
    let seen = event.time.as_deref().unwrap_or("-");
    [&event.watch, change, resource_version, seen].map(sanitize).join(" ")
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
                log_error!(warn, &error, "Stamp file could not be written");
            }
        })?;
        Ok(Self(Some(Writer { sender, dropped })))
    }

    /// Makes the lines of events, before they are recorded.
    pub(in crate::table) fn capture<'a>(&self, events: impl Iterator<Item = &'a Event>) -> StampedEvents {
        StampedEvents(if self.0.is_some() { events.map(line).collect() } else { Vec::new() })
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
        for line in &stamp.events.0 {
            writeln!(file, "{nanos} {} {line}", stamp.runtime)?;
        }
    }
}

/// Replaces whitespace and control characters, so that text of an agent cannot add lines or fields.
fn sanitize(text: &str) -> String {
    text.chars().map(|c| if c.is_whitespace() || c.is_control() { '_' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use tidewatch_api::identity::Epoch;
    use tidewatch_contract::{
        digest::Digest,
        event::{Change, EventId, Object, Subject},
    };

    use super::*;

    /// Stamps events of these watches.
    fn stamp(stamps: &Stamps, watches: &[&str]) {
        let subject: Subject = "/v1/configmaps/ns/a".parse().unwrap();
        let object = Object {
            subject,
            kind: "ConfigMap".to_owned(),
            uid: String::new(),
            resource_version: "42".to_owned(),
            generation: None,
            change: Change::Spec,
        };
        let runtime: RuntimeId = "r-1".parse().unwrap();
        let event = |watch: &&str| Event {
            id: EventId { epoch: Epoch::new(1), sequence: 1 },
            source: runtime.clone(),
            watch: (*watch).to_owned(),
            payload: Payload::Object(object.clone()),
            delta: Digest::ZERO,
            time: None,
            traceparent: None,
        };
        let events: Vec<_> = watches.iter().map(event).collect();
        stamps.record(&runtime, stamps.capture(events.iter()));
    }

    #[test]
    fn each_event_is_one_line_of_six_fields() {
        let (sender, receiver) = sync_channel(4);
        let stamps = Stamps(Some(Writer { sender, dropped: Arc::default() }));
        stamp(&stamps, &["kyma", "a b\n"]);
        stamp(&stamps, &[]);
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
            stamp(&stamps, &["kyma"]);
        }
        assert_eq!(dropped.load(Ordering::Relaxed), 2);
    }
}
