//! Fields of a module's objects that another writer changes back again and again, more slowly than the write budget
//! notices. Such a field is left to that writer for a while, ever longer, and again once the module has another version.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tidewatch_api::key::ManifestKey;
use tidewatch_cluster::object::Disputed;
use tidewatch_kit::foreign_text::line;
use tokio::time::Instant;

use super::inventory::ObjectKey;

/// Window in which reverts of one field are counted, and their number from which on it is left to its writer.
const WINDOW: Duration = Duration::from_secs(600);
const MAX_REVERTS: u32 = 20;
/// First time for which a field is left to its writer, and the longest one; it doubles.
const FIRST_YIELD: Duration = Duration::from_secs(3_600);
const MAX_YIELD: Duration = Duration::from_secs(24 * 3_600);
/// Fields of one Manifest that are followed.
const MAX_FIELDS: usize = 64;
/// Longest name of a field manager, and of a path in a text.
const MAX_NAME_CHARS: usize = 128;

/// Disputed fields by Manifest. Clones share one state.
#[derive(Clone, Debug, Default)]
pub(super) struct Yields(Arc<Mutex<HashMap<ManifestKey, BTreeMap<FieldKey, Field>>>>);

/// A field of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FieldKey {
    object: ObjectKey,
    path: String,
}

#[derive(Clone, Debug)]
struct Field {
    /// Hash of the desired object.
    form: u64,
    pointer: String,
    writer: Option<String>,
    is_guarded: bool,
    /// Begin of the window, and the reverts in it.
    since: Instant,
    reverts: u32,
    /// Last revert.
    last: Instant,
    /// End of the time for which it is left to its writer, or of the warning if it is guarded.
    until: Option<Instant>,
    /// Number of such times.
    times: u32,
}

impl Field {
    fn new(disputed: Disputed, form: u64, now: Instant) -> Self {
        let Disputed { pointer, writer, is_guarded, .. } = disputed;
        Self { form, pointer, writer, is_guarded, since: now, reverts: 0, last: now, until: None, times: 0 }
    }

    /// Counts a revert. Returns true if the field is left to its writer from now on.
    fn revert(&mut self, writer: Option<String>, now: Instant) -> bool {
        if now >= self.since + WINDOW {
            self.since = now;
            self.reverts = 0;
        }
        if now >= self.last + MAX_YIELD {
            self.times = 0;
        }
        self.last = now;
        self.writer = writer.or(self.writer.take());
        self.reverts = self.reverts.saturating_add(1);
        if self.reverts < MAX_REVERTS {
            return false;
        }
        if self.is_guarded {
            self.until = Some(now + WINDOW);
            return false;
        }
        let length = FIRST_YIELD.saturating_mul(2u32.saturating_pow(self.times)).min(MAX_YIELD);
        self.until = Some(now + length);
        self.times = self.times.saturating_add(1);
        self.reverts = 0;
        true
    }

    fn is_current(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }
}

impl Yields {
    /// JSON pointers to the fields of a desired object, given with its hash, that are left to other writers.
    pub(super) fn yielded(&self, manifest: &ManifestKey, object: &ObjectKey, form: u64) -> Vec<String> {
        let now = Instant::now();
        let mut all = self.0.lock();
        let Some(fields) = all.get_mut(manifest) else { return Vec::new() };
        // Another version of the module asserts its fields again.
        fields.retain(|key, field| key.object != *object || field.form == form);
        let of_object = fields.iter().filter(|(key, field)| key.object == *object && !field.is_guarded);
        of_object.filter(|(_, field)| field.is_current(now)).map(|(_, field)| field.pointer.clone()).collect()
    }

    /// Counts the fields that a write has just reverted. Returns the number of those that are left to their writers from
    /// now on.
    pub(super) fn reverted(
        &self,
        manifest: &ManifestKey,
        object: &ObjectKey,
        form: u64,
        disputed: Vec<Disputed>,
    ) -> usize {
        let now = Instant::now();
        let mut all = self.0.lock();
        let fields = all.entry(manifest.clone()).or_default();
        let is_over = |field: &Field| now >= field.last + MAX_YIELD && !field.is_current(now);
        fields.retain(|_, field| !is_over(field));
        let mut yielded = 0;
        for disputed in disputed {
            let key = FieldKey { object: object.clone(), path: disputed.path.clone() };
            if fields.len() >= MAX_FIELDS && !fields.contains_key(&key) {
                continue;
            }
            let writer = disputed.writer.clone();
            let field = fields.entry(key).or_insert_with(|| Field::new(disputed, form, now));
            yielded += usize::from(field.revert(writer, now));
        }
        yielded
    }

    /// One sentence for each field that is left to another writer, or that is guarded and set back all the time.
    pub(super) fn warnings(&self, manifest: &ManifestKey) -> Vec<String> {
        let now = Instant::now();
        let all = self.0.lock();
        let fields = all.get(manifest).into_iter().flatten().filter(|(_, field)| field.is_current(now));
        fields.map(|(key, field)| warning(key, field)).collect()
    }

    /// Time until the first field that is left to another writer is asserted again, or its warning ends.
    pub(super) fn next(&self, manifest: &ManifestKey) -> Option<Duration> {
        let now = Instant::now();
        let all = self.0.lock();
        let ends = all.get(manifest)?.values().filter(|field| field.is_current(now)).filter_map(|field| field.until);
        ends.min().map(|end| end.saturating_duration_since(now))
    }

    /// Takes the objects with a field whose time has ended: they are to be compared.
    pub(super) fn take_ended(&self, manifest: &ManifestKey) -> Vec<ObjectKey> {
        let now = Instant::now();
        let mut all = self.0.lock();
        let mut ended = Vec::new();
        for (key, field) in all.get_mut(manifest).into_iter().flatten() {
            if field.until.is_some_and(|until| now >= until) {
                field.until = None;
                ended.push(key.object.clone());
            }
        }
        ended
    }

    pub(super) fn forget(&self, manifest: &ManifestKey) {
        self.0.lock().remove(manifest);
    }
}

fn warning(key: &FieldKey, field: &Field) -> String {
    let FieldKey { object, path } = key;
    let writer =
        field.writer.as_deref().map_or_else(|| "another writer".to_owned(), |writer| line(writer, MAX_NAME_CHARS));
    let end = if field.is_guarded { "it is set back each time" } else { "it is left as it is for now" };
    format!("{writer} changes {} of {object} again and again; {end}", line(path, MAX_NAME_CHARS))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::time::advance;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3_600);

    fn manifest() -> ManifestKey {
        ManifestKey::new("ns", "m")
    }

    fn object() -> ObjectKey {
        ObjectKey::of(
            &json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d", "namespace": "ns"}}),
        )
    }

    fn disputed(path: &str, is_guarded: bool) -> Vec<Disputed> {
        let pointer = format!("/{}", path.replace('.', "/"));
        vec![Disputed { pointer, path: path.to_owned(), writer: Some("rival".to_owned()), is_guarded }]
    }

    /// Reverts a field each half minute until it is left to its writer. Returns the number of reverts, at most 100.
    async fn fight(yields: &Yields, form: u64) -> usize {
        for reverts in 1..=100 {
            assert_eq!(yields.yielded(&manifest(), &object(), form), Vec::<String>::new());
            if yields.reverted(&manifest(), &object(), form, disputed("spec.paused", false)) == 1 {
                return reverts;
            }
            advance(Duration::from_secs(30)).await;
        }
        100
    }

    #[tokio::test(start_paused = true)]
    async fn field_is_left_to_its_writer_ever_longer() {
        let yields = Yields::default();
        let mut lengths = Vec::new();
        for _ in 0..6 {
            assert_eq!(fight(&yields, 1).await, 20);
            assert_eq!(yields.yielded(&manifest(), &object(), 1), ["/spec/paused"]);
            let said = "rival changes spec.paused of Deployment ns/d again and again; it is left as it is for now";
            assert_eq!(yields.warnings(&manifest()), [said]);
            let length = yields.next(&manifest()).unwrap();
            assert_eq!(yields.take_ended(&manifest()), []);
            advance(length).await;
            assert_eq!(yields.take_ended(&manifest()), [object()]);
            assert_eq!((yields.take_ended(&manifest()), yields.next(&manifest())), (vec![], None));
            lengths.push(length.as_secs() / HOUR.as_secs());
        }
        assert_eq!(lengths, [1, 2, 4, 8, 16, 24]);
        advance(MAX_YIELD).await;
        fight(&yields, 1).await;
        assert_eq!(yields.next(&manifest()), Some(HOUR), "a calm day ends it");
    }

    #[tokio::test(start_paused = true)]
    async fn another_version_asserts_its_fields_and_other_fields_are_counted_apart() {
        let yields = Yields::default();
        fight(&yields, 1).await;
        assert_eq!(yields.yielded(&manifest(), &object(), 2), Vec::<String>::new());
        assert_eq!(yields.warnings(&manifest()), Vec::<String>::new());
        for n in 0..200 {
            assert_eq!(yields.reverted(&manifest(), &object(), 2, disputed(&format!("spec.f{n}"), false)), 0);
        }
        assert_eq!(yields.0.lock()[&manifest()].len(), MAX_FIELDS, "bounded");
        yields.forget(&manifest());
        assert!(yields.0.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn rare_reverts_are_no_fight() {
        let yields = Yields::default();
        for _ in 0..200 {
            assert_eq!(yields.reverted(&manifest(), &object(), 1, disputed("spec.paused", false)), 0);
            advance(Duration::from_secs(40)).await;
        }
        assert_eq!(yields.warnings(&manifest()), Vec::<String>::new());
    }

    #[tokio::test(start_paused = true)]
    async fn guarded_field_is_only_warned_of() {
        let yields = Yields::default();
        for _ in 0..60 {
            assert_eq!(yields.reverted(&manifest(), &object(), 1, disputed("spec.image", true)), 0);
            advance(Duration::from_secs(20)).await;
        }
        assert_eq!(yields.yielded(&manifest(), &object(), 1), Vec::<String>::new());
        let said = "rival changes spec.image of Deployment ns/d again and again; it is set back each time";
        assert_eq!(yields.warnings(&manifest()), [said]);
        advance(WINDOW).await;
        assert_eq!(yields.warnings(&manifest()), Vec::<String>::new());
        assert_eq!(yields.take_ended(&manifest()), [object()]);
    }
}
