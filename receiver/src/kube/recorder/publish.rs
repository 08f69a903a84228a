//! Writes Events, one after the other. One that fails is not tried again: the status says it too.

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
use tidewatch_shared::names::{GROUP, VERSION};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::{
    Record,
    board::Write,
    news::{About, CONFIG_MAP, News},
};

/// Between two Events: a landslide of news must not be one of writes.
const PACE: Duration = Duration::from_millis(50);
/// A write takes no longer.
const DEADLINE: Duration = Duration::from_secs(5);
/// Bytes of a note, as API servers take them.
const NOTE: usize = 1_024;
/// Bytes of an object's name in the name of its Event: with the number, it must not exceed 253.
const NAME: usize = 200;
/// Who tells, as operators know it.
const CONTROLLER: &str = "lifecycle-manager";
const INSTANCE: &str = "tidewatch-receiver";

pub(super) async fn run(record: &Record, client: &Client) -> &'static str {
    let mut pace = interval(PACE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Names of Events differ from those of an earlier process.
    let begun = Timestamp::now().as_microsecond();
    loop {
        let Some(write) = record.next() else {
            record.0.stirred.notified().await;
            continue;
        };
        pace.tick().await;
        let done = timeout(DEADLINE, send(client, &write, begun)).await;
        let written = matches!(done, Ok(Ok(_)));
        record.0.metrics.ended(written);
        let mut known = record.lock();
        match done {
            Ok(Ok(Some(name))) => known.board.told(&write.news, name, Instant::now()),
            Ok(Ok(None)) => {}
            Ok(Err(error)) => {
                known.board.forget(&write.news);
                drop(known);
                tracing::debug!(error = &error as &dyn std::error::Error, "Event could not be written");
            }
            Err(_) => known.board.forget(&write.news),
        }
    }
}

/// The name of the Event if it is a new one.
async fn send(client: &Client, write: &Write, begun: i64) -> kube::Result<Option<String>> {
    let now = MicroTime(Timestamp::now());
    let api: Api<Event> = Api::namespaced(client.clone(), &write.news.about.namespace);
    if let Some((name, count)) = &write.again {
        let series = json!({"series": {"count": count, "lastObservedTime": now}});
        match api.patch(name, &PatchParams::default(), &Patch::Merge(&series)).await {
            Ok(_) => return Ok(None),
            // It has lived its hour.
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    let event = event(&write.news, begun.wrapping_add_unsigned(write.number), now);
    api.create(&PostParams::default(), &event).await?;
    Ok(event.metadata.name)
}

fn event(news: &News, number: i64, now: MicroTime) -> Event {
    let News { about: About { kind, namespace, name, uid }, warning, reason, note } = news;
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{}.{number:016x}", cut(name, NAME).trim_end_matches(['.', '-']))),
            namespace: Some(namespace.clone()),
            ..ObjectMeta::default()
        },
        event_time: Some(now),
        reporting_controller: Some(CONTROLLER.to_owned()),
        reporting_instance: Some(INSTANCE.to_owned()),
        action: Some("Reconcile".to_owned()),
        reason: Some((*reason).to_owned()),
        type_: Some(if *warning { "Warning" } else { "Normal" }.to_owned()),
        note: Some(cut(note, NOTE).to_owned()),
        regarding: Some(ObjectReference {
            api_version: Some(if *kind == CONFIG_MAP { "v1".to_owned() } else { format!("{GROUP}/{VERSION}") }),
            kind: Some((*kind).to_owned()),
            namespace: Some(namespace.clone()),
            name: Some(name.clone()),
            uid: Some(uid.clone()),
            ..ObjectReference::default()
        }),
        ..Event::default()
    }
}

/// The first bytes of a text, without half a character.
fn cut(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}
