//! Write budgets against competing writers: limit the repairs of an object that another controller in the runtime
//! cluster changes back.

use std::{collections::HashMap, hash::Hash, sync::Arc, time::Duration};

use parking_lot::Mutex;
use prometheus_client::metrics::{counter::Counter, family::Family};
use tidewatch_api::key::KymaKey;
use tidewatch_kit::{hash::hash, label_sets, metric_set, variant::VariantName as _};
use tokio::time::Instant;

/// Number of entries from which expired ones are dropped.
const MIN_PRUNED: usize = 1024;
/// Desired forms of one object that an entry knows, more than an object gets by upgrades within the windows of one dispute.
const MAX_FORMS: usize = 8;
/// Changes back to a known form in one window that begin a new budget, where several of ours may desire an object: two that
/// revert each other exceed it.
const MAX_RETURNS: u8 = 10;

/// Kind of the repaired objects. The name is the value of the label `component` in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Component {
    /// Our CRDs.
    Crd,
    /// Labels of the namespace, and labels and annotations of the Kyma.
    Kyma,
    /// ConfigMap with the plan, where the receiver does not install agents.
    Plan,
    /// Image pull secret of the modules.
    PullSecret,
    /// Templates and release metas.
    Catalog,
    /// Objects of modules.
    Module,
    /// Objects of the agent's installation, which share one budget per runtime cluster.
    Agent,
}

/// Rate limit of one budget: a burst per window. Each window in which a write was denied doubles the next one, up to a
/// maximum, and allows fewer writes in it. A window without denial restores the burst.
#[derive(Clone, Copy)]
struct Limit {
    /// Writes of the first window.
    burst: u16,
    /// Writes of a window after one with a denied write.
    contested: u16,
    window: Duration,
    max_window: Duration,
    /// Forms that alternate share one budget: several Manifests may desire the object, and each form is a repair against the
    /// other. The one source of any other object may change its mind as often as its causes do, as a plan follows the modules
    /// of its runtime.
    bounds_returns: bool,
}

const MINUTE: Duration = Duration::from_secs(60);

impl Component {
    const fn limit(self) -> Limit {
        let bounds_returns = matches!(self, Self::Module);
        match self {
            // Seven times a whole installation.
            Self::Agent => Limit { burst: 120, contested: 120, window: MINUTE, max_window: MINUTE, bounds_returns },
            _ => Limit { burst: 5, contested: 1, window: MINUTE, max_window: Duration::from_secs(600), bounds_returns },
        }
    }
}

label_sets! {
    struct ComponentLabel { component }
}

metric_set! {
    /// Metrics of the write budgets.
    #[derive(Debug)]
    pub struct WriteMetrics {
        /// Repairs that were put off because a competing writer in the runtime changes the object back, by component.
        contested: Family<ComponentLabel, Counter> = "object_contested",
    }
}

/// Write budgets of all runtime clusters; clones share them. An entry exists from the first write of an object until its
/// window has expired.
#[derive(Clone, Debug, Default)]
pub struct WriteBudgets {
    metrics: WriteMetrics,
    entries: Arc<Mutex<Entries>>,
}

#[derive(Debug, Default)]
struct Entries {
    by_object: HashMap<(KymaKey, Component, Box<str>), Entry>,
    /// Number of entries at which expired ones are dropped.
    prune_at: usize,
}

#[derive(Clone, Debug)]
struct Entry {
    /// Hashes of the desired forms since the last calm window.
    forms: Vec<u64>,
    /// The form of the last write.
    form: u64,
    /// Changes back to a known form that still begin a new budget.
    returns: u8,
    since: Instant,
    window: Duration,
    left: u16,
    was_denied: bool,
}

/// Budget of one object.
pub struct WriteBudget<'a> {
    budgets: &'a WriteBudgets,
    key: (KymaKey, Component, Box<str>),
    form: u64,
}

impl WriteBudgets {
    /// Creates budgets that are counted in these metrics.
    pub fn new(metrics: WriteMetrics) -> Self {
        Self { metrics, entries: Arc::default() }
    }

    /// Budget of one object in a runtime cluster. `form` identifies its desired form: a write of a new one is no repair,
    /// and begins a new budget. Forms of a module's object that alternate share one.
    pub fn of(&self, runtime: &KymaKey, component: Component, object: &str, form: impl Hash) -> WriteBudget<'_> {
        WriteBudget { budgets: self, key: (runtime.clone(), component, object.into()), form: hash(&form) }
    }
}

impl WriteBudget<'_> {
    /// Returns whether a write is allowed, and counts a denied one.
    pub fn may_write(&self) -> bool {
        let component = self.key.1;
        let now = Instant::now();
        let mut entries = self.budgets.entries.lock();
        let Some(entry) = entries.by_object.get_mut(&self.key) else { return true };
        entry.renew(self.form, now, component.limit());
        if entry.left == 0 {
            entry.was_denied = true;
            self.budgets.metrics.contested.get_or_create(&ComponentLabel { component: component.as_str() }).inc();
        }
        entry.left > 0
    }

    /// Counts a write that succeeded. A refused one changes nothing that a competing writer could change back.
    pub fn wrote(&self) {
        let limit = self.key.1.limit();
        let now = Instant::now();
        let mut entries = self.budgets.entries.lock();
        let Entries { by_object, prune_at } = &mut *entries;
        if by_object.len() >= (*prune_at).max(MIN_PRUNED) {
            by_object.retain(|_, entry| !entry.is_expired(now));
            *prune_at = by_object.len() * 2;
        }
        let entry = by_object.entry(self.key.clone()).or_insert_with(|| Entry::new(self.form, now, limit));
        entry.renew(self.form, now, limit);
        entry.left = entry.left.saturating_sub(1);
    }
}

impl Entry {
    fn new(form: u64, now: Instant, limit: Limit) -> Self {
        Self {
            forms: vec![form],
            form,
            returns: MAX_RETURNS,
            since: now,
            window: limit.window,
            left: limit.burst,
            was_denied: false,
        }
    }

    /// Begins a new window if the current one has ended, or a new budget if the desired form changed.
    fn renew(&mut self, form: u64, now: Instant, limit: Limit) {
        if now >= self.since + self.window {
            if !self.was_denied {
                *self = Self::new(form, now, limit);
                return;
            }
            self.since = now;
            self.window = (self.window * 2).min(limit.max_window);
            self.left = limit.contested;
            self.was_denied = false;
        }
        if self.form == form {
            return;
        }
        self.form = form;
        if !limit.bounds_returns {
            *self = Self::new(form, now, limit);
        } else if !self.forms.contains(&form) && self.forms.len() < MAX_FORMS {
            self.forms.push(form);
            self.since = now;
            self.window = limit.window;
            self.left = limit.burst;
            self.was_denied = false;
        } else if self.returns > 0 {
            self.returns -= 1;
            self.left = limit.burst;
        }
    }

    /// Returns whether the entry would restore the burst, or nothing was written for another window.
    fn is_expired(&self, now: Instant) -> bool {
        now >= self.since + self.window * (1 + u32::from(self.was_denied))
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn key(n: usize) -> KymaKey {
        KymaKey::new("ns", format!("k-{n}"))
    }

    /// Writes as often as allowed; returns the number of writes.
    fn writes(budget: &WriteBudget<'_>, attempts: usize) -> usize {
        (0..attempts)
            .filter(|_| {
                budget.may_write() && {
                    budget.wrote();
                    true
                }
            })
            .count()
    }

    #[tokio::test(start_paused = true)]
    async fn writes_are_limited_per_window() {
        let budgets = WriteBudgets::default();
        let budget = budgets.of(&key(0), Component::Agent, "", 0);
        assert_eq!(writes(&budget, 200), usize::from(Component::Agent.limit().burst));
        advance(MINUTE / 2).await;
        assert!(!budget.may_write());
        advance(MINUTE / 2).await;
        assert!(budget.may_write());
    }

    #[tokio::test(start_paused = true)]
    async fn fight_is_answered_ever_more_slowly_up_to_once_in_ten_minutes() {
        let budgets = WriteBudgets::default();
        let budget = budgets.of(&key(0), Component::Catalog, "a", 0);
        let mut at = Vec::new();
        for second in 0..3600_u32 {
            at.extend((writes(&budget, 1) == 1).then_some(second));
            advance(Duration::from_secs(1)).await;
        }
        assert_eq!(at, [0, 1, 2, 3, 4, 60, 180, 420, 900, 1500, 2100, 2700, 3300]);
        let denied = budgets.metrics.contested.get_or_create(&ComponentLabel { component: "catalog" }).get();
        assert_eq!(denied, 3600 - at.len() as u64);
        advance(Duration::from_secs(1200)).await;
        assert_eq!(writes(&budget, 1), 1, "the rival is gone");
        advance(Duration::from_secs(600)).await;
        assert_eq!(writes(&budget, 9), 5, "a calm window restores the burst");
    }

    #[tokio::test(start_paused = true)]
    async fn budgets_of_other_objects_runtimes_and_forms_are_independent() {
        let budgets = WriteBudgets::default();
        assert_eq!(writes(&budgets.of(&key(0), Component::Crd, "a", 0), 9), 5);
        for budget in [
            budgets.of(&key(0), Component::Crd, "b", 0),
            budgets.of(&key(0), Component::Kyma, "a", 0),
            budgets.of(&key(1), Component::Crd, "a", 0),
            budgets.of(&key(0), Component::Crd, "a", 1),
        ] {
            assert_eq!(writes(&budget, 9), 5);
        }
    }

    /// Seconds of an hour in which one of two writers of ours, which take turns, was allowed to write.
    async fn alternate(budgets: &WriteBudgets, form_of: impl Fn(u32) -> u32) -> Vec<u32> {
        let mut at = Vec::new();
        for second in 0..3600_u32 {
            let budget = budgets.of(&key(0), Component::Module, "a", form_of(second));
            at.extend((writes(&budget, 1) == 1).then_some(second));
            advance(Duration::from_secs(1)).await;
        }
        at
    }

    #[tokio::test(start_paused = true)]
    async fn forms_that_alternate_are_bounded_as_a_fight_is() {
        for forms in [2, 3, 8, 1000] {
            let budgets = WriteBudgets::default();
            let at = alternate(&budgets, |second| second % forms).await;
            let first = at.iter().filter(|second| **second < 60).count();
            assert!(first < 60 && at.len() < first + 20, "{forms}: {at:?}");
            let last: Vec<_> = at.iter().filter(|second| **second >= 1800).collect();
            assert!(last.len() <= 4, "{forms}: once in ten minutes at last: {last:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn upgrade_during_a_fight_and_a_form_that_flaps_slowly_are_not_held_up() {
        let budgets = WriteBudgets::default();
        let of = |form: u32| budgets.of(&key(0), Component::Module, "a", form);
        assert_eq!(writes(&of(0), 9), 5);
        assert_eq!(writes(&of(1), 9), 5, "another version");
        // A form that changes to and fro.
        let budgets = WriteBudgets::default();
        for step in 0..100_u32 {
            assert_eq!(writes(&budgets.of(&key(0), Component::Plan, "a", step % 2), 1), 1, "{step}");
            advance(Duration::from_secs(6)).await;
        }
    }

    /// A plan changes to and fro with the modules of its runtime, and nobody but the receiver desires another one.
    #[tokio::test(start_paused = true)]
    async fn forms_that_one_source_desires_in_turn_are_not_held_up() {
        let budgets = WriteBudgets::default();
        for step in 0..600_u32 {
            let plan = budgets.of(&key(0), Component::Plan, "a", step % 12);
            assert_eq!(writes(&plan, 1), 1, "{step}");
            advance(Duration::from_secs(1)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn expired_entries_are_dropped() {
        let budgets = WriteBudgets::default();
        for n in 0..MIN_PRUNED {
            budgets.of(&key(n), Component::Crd, "a", 0).wrote();
        }
        advance(MINUTE).await;
        budgets.of(&key(0), Component::Crd, "b", 0).wrote();
        assert_eq!(budgets.entries.lock().by_object.len(), 1);
    }
}
