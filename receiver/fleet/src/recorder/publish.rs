//! Writes Events, one after another. A failed write is not retried, since the status contains the same information.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tidewatch_kit::log_error;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::{
    EventRecorder,
    event_diff::{PendingEvent, Regarding},
    event_queue::EventWrite,
};

/// Interval between two writes: the rate limit of 20 per second bounds the load of many simultaneous changes on KCP.
const PACE: Duration = Duration::from_millis(50);
/// Deadline of a write.
const DEADLINE: Duration = Duration::from_secs(5);
/// Maximum length of a note in bytes (`note` of events.k8s.io/v1).
const MAX_NOTE: usize = 1_024;
/// Maximum length of the object's name in the Event's name, in bytes: with the number, that must not exceed 253.
const MAX_NAME: usize = 200;
/// Reporting controller; the name of lifecycle-manager, which operators know.
const CONTROLLER: &str = "lifecycle-manager";
const INSTANCE: &str = "tidewatch-receiver";

pub(super) async fn run(recorder: &EventRecorder, client: &Client) -> &'static str {
    let mut pace = interval(PACE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Distinguishes the names of Events from those of previous processes.
    let start = Timestamp::now().as_microsecond();
    loop {
        let Some(write) = recorder.next() else {
            recorder.0.posted.notified().await;
            continue;
        };
        pace.tick().await;
        let result = timeout(DEADLINE, send(client, &write, start)).await;
        let written = matches!(result, Ok(Ok(_)));
        recorder.0.metrics.ended(written);
        let mut state = recorder.lock();
        match result {
            Ok(Ok(Some(name))) => state.queue.published(&write.event, name, Instant::now()),
            Ok(Ok(None)) => {}
            Ok(Err(error)) => {
                state.queue.forget(&write.event);
                drop(state);
                log_error!(debug, &error, "Event write failed");
            }
            Err(_) => state.queue.forget(&write.event),
        }
    }
}

/// Patches the series of an existing Event, or creates one. Returns the name of a created Event.
async fn send(client: &Client, write: &EventWrite, start: i64) -> kube::Result<Option<String>> {
    let now = MicroTime(Timestamp::now());
    let api: Api<Event> = Api::namespaced(client.clone(), &write.event.regarding.namespace);
    if let Some((name, count)) = &write.series {
        let series = json!({"series": {"count": count, "lastObservedTime": now}});
        match api.patch(name, &PatchParams::default(), &Patch::Merge(&series)).await {
            Ok(_) => return Ok(None),
            // API servers delete Events after an hour by default.
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    let event = event(&write.event, start.wrapping_add_unsigned(write.number), now);
    api.create(&PostParams::default(), &event).await?;
    Ok(event.metadata.name)
}

fn event(pending: &PendingEvent, number: i64, now: MicroTime) -> Event {
    let PendingEvent { regarding: Regarding { kind, namespace, name, uid }, warning, reason, note } = pending;
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{}.{number:016x}", truncate(name, MAX_NAME).trim_end_matches(['.', '-']))),
            namespace: Some(namespace.clone()),
            ..ObjectMeta::default()
        },
        event_time: Some(now),
        reporting_controller: Some(CONTROLLER.to_owned()),
        reporting_instance: Some(INSTANCE.to_owned()),
        action: Some("Reconcile".to_owned()),
        reason: Some((*reason).to_owned()),
        type_: Some(if *warning { "Warning" } else { "Normal" }.to_owned()),
        note: Some(truncate(note, MAX_NOTE).to_owned()),
        regarding: Some(ObjectReference {
            api_version: Some(pending.regarding.api_version()),
            kind: Some((*kind).to_owned()),
            namespace: Some(namespace.clone()),
            name: Some(name.clone()),
            uid: Some(uid.clone()),
            ..ObjectReference::default()
        }),
        ..Event::default()
    }
}

/// Truncates a text to a length in bytes, at a character boundary.
fn truncate(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}
