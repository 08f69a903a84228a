//! Time stamps of event-driven wants, for measurements. The lock never waits for the file.

use std::{
    fs::OpenOptions,
    io::{self, BufWriter, Write},
    path::Path,
    sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
    thread,
    time::{Duration, Instant, SystemTime},
};

use prometheus_client::metrics::counter::Counter;
use tidewatch_shared::{
    event::{Event, Payload},
    identity::RuntimeId,
};

/// Stamps that wait for the file, at most.
const CAPACITY: usize = 16_384;
/// Between two looks at what waits: to be woken would cost the thread that stamps, and so change what is measured.
const PAUSE: Duration = Duration::from_millis(20);

struct Stamp {
    at: Instant,
    runtime: RuntimeId,
    events: Vec<Told>,
}

/// What a line tells of an event.
pub(super) struct Told {
    watch: String,
    /// What happened to the object, `watch` for a whole watch.
    change: &'static str,
    /// The object's, `-` for a whole watch.
    resource_version: String,
    /// When the agent saw it, by its clock; `-` if it did not say.
    seen: String,
}

impl Told {
    pub(super) fn of(event: &Event) -> Self {
        let (change, resource_version) = match &event.payload {
            Payload::Object(object) => (object.change.as_str(), object.resource_version.clone()),
            Payload::Watch | Payload::Unnamed { .. } => ("watch", "-".to_owned()),
        };
        let seen = event.time.clone().unwrap_or_else(|| "-".to_owned());
        Self { watch: event.watch.clone(), change, resource_version, seen }
    }
}

/// Sends stamps to the thread that writes them; the thread ends when this is dropped.
pub(super) struct Stamps {
    sender: SyncSender<Stamp>,
    dropped: Counter,
}

impl Stamps {
    /// Opens the file for appending and starts its thread.
    pub(super) fn append(path: &Path, dropped: Counter) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let (sender, receiver) = sync_channel(CAPACITY);
        thread::Builder::new().name("stamps".to_owned()).spawn(move || {
            if let Err(error) = write(BufWriter::new(file), &receiver) {
                tracing::warn!(error = &error as &dyn std::error::Error, "Stamp file could not be written");
            }
        })?;
        Ok(Self { sender, dropped })
    }

    /// Says that just now the events made their Kyma wanted.
    pub(super) fn wanted(&self, runtime: &RuntimeId, events: Vec<Told>) {
        if events.is_empty() {
            return;
        }
        let stamp = Stamp { at: Instant::now(), runtime: runtime.clone(), events };
        if let Err(error) = self.sender.try_send(stamp) {
            let (std::sync::mpsc::TrySendError::Full(stamp) | std::sync::mpsc::TrySendError::Disconnected(stamp)) =
                error;
            self.dropped.inc_by(stamp.events.len() as u64);
        }
    }
}

/// Writes until the sender is gone; what was written is in the file whenever nothing waits.
fn write(mut file: impl Write, receiver: &Receiver<Stamp>) -> io::Result<()> {
    // `Instant` cannot be printed, so it is told as the distance from one known moment.
    let (base, unix) = (Instant::now(), SystemTime::now());
    let unix = unix.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    loop {
        let stamp = match receiver.try_recv() {
            Ok(stamp) => stamp,
            Err(TryRecvError::Disconnected) => return file.flush(),
            Err(TryRecvError::Empty) => {
                file.flush()?;
                thread::sleep(PAUSE);
                continue;
            }
        };
        let nanos = (unix + stamp.at.saturating_duration_since(base)).as_nanos();
        for Told { watch, change, resource_version, seen } in &stamp.events {
            let (watch, version, seen) = (word(watch), word(resource_version), word(seen));
            writeln!(file, "{nanos} {} {watch} {change} {version} {seen}", stamp.runtime)?;
        }
    }
}

/// What an agent says must not make lines or fields of its own.
fn word(text: &str) -> String {
    text.chars().map(|c| if c.is_whitespace() || c.is_control() { '_' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(watch: &str) -> Told {
        Told { watch: watch.into(), change: "spec", resource_version: "42".into(), seen: "-".into() }
    }

    #[test]
    fn each_event_is_one_line_of_six_words() {
        let (sender, receiver) = sync_channel(4);
        let stamps = Stamps { sender, dropped: Counter::default() };
        stamps.wanted(&"r-1".parse().unwrap(), vec![told("kyma"), told("a b\n")]);
        stamps.wanted(&"r-1".parse().unwrap(), Vec::new());
        drop(stamps);
        let mut file = Vec::new();
        write(&mut file, &receiver).unwrap();
        let text = String::from_utf8(file).unwrap();
        let lines: Vec<Vec<_>> = text.lines().map(|line| line.split(' ').collect()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0][1..], ["r-1", "kyma", "spec", "42", "-"]);
        assert_eq!(lines[1][1..], ["r-1", "a_b_", "spec", "42", "-"]);
        assert!(lines[0][0].parse::<u128>().unwrap() > 1_000_000_000_000_000_000);
    }

    #[test]
    fn what_the_file_cannot_take_is_counted() {
        let (sender, _receiver) = sync_channel(1);
        let stamps = Stamps { sender, dropped: Counter::default() };
        for _ in 0..3 {
            stamps.wanted(&"r-1".parse().unwrap(), vec![told("kyma")]);
        }
        assert_eq!(stamps.dropped.get(), 2);
    }
}
