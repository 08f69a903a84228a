//! Plan in a file, for an agent of contract v2 without a receiver of Tidewatch: nothing writes its ConfigMap.

use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    time::Duration,
};

use thiserror::Error;
use tidewatch_api::plan::{ParsePlanError, Plan};
use tokio::{sync::watch, time::sleep};

use super::PlanSender;
use crate::{
    telemetry::{Metrics, Pending, error_chain},
    watch::PlanState,
};

/// Interval at which the content of the file is compared. A mounted file changes by a swap of symbolic links.
const POLL: Duration = Duration::from_secs(5);
/// Limit of the file in bytes, that of a ConfigMap.
const LIMIT: u64 = 1 << 20;

/// Reason for which the file is not followed.
#[derive(Debug, Error)]
enum PlanFileError {
    #[error("the plan file cannot be read")]
    Read(#[source] io::Error),
    #[error("the plan file exceeds {LIMIT} bytes")]
    TooLarge,
    #[error("the plan file is not valid")]
    Parse(#[source] ParsePlanError),
}

/// Polls the file and publishes each valid plan; while the content is invalid, the last valid one stays in force.
pub(crate) struct PlanFile {
    path: PathBuf,
    publish: PlanSender,
    /// Content read last, valid or not.
    seen: Option<String>,
    /// The last read failed; a failure is reported once.
    is_unreadable: bool,
    /// Readiness guard until the first valid plan.
    pending: Option<Pending>,
    metrics: Metrics,
}

impl PlanFile {
    /// A source that publishes nothing before the first valid plan.
    pub(crate) fn new(path: PathBuf, publish: watch::Sender<PlanState>, pending: Pending, metrics: Metrics) -> Self {
        let publish = PlanSender(publish);
        let pending = Some(pending);
        Self { path, publish, seen: None, is_unreadable: false, pending, metrics }
    }

    /// Polls until cancelled.
    pub(crate) async fn run(mut self) {
        loop {
            self.refresh();
            sleep(POLL).await;
        }
    }

    fn refresh(&mut self) {
        let text = match read(&self.path) {
            Ok(text) => text,
            Err(_) if self.is_unreadable => return,
            Err(error) => {
                (self.is_unreadable, self.seen) = (true, None);
                return self.refuse(&error);
            }
        };
        self.is_unreadable = false;
        if self.seen.as_ref() == Some(&text) {
            return;
        }
        match Plan::parse(&text) {
            Ok(plan) => {
                self.pending = None;
                self.publish.follow(Some(plan), None);
            }
            Err(error) => self.refuse(&PlanFileError::Parse(error)),
        }
        self.seen = Some(text);
    }

    fn refuse(&self, error: &PlanFileError) {
        let error = error_chain(error);
        tracing::error!(path = %self.path.display(), error, "Plan refused, keeping the last valid one");
        self.metrics.plans_refused.inc();
        self.publish.follow(None, Some(error));
    }
}

fn read(path: &Path) -> Result<String, PlanFileError> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(LIMIT + 1).read_to_string(&mut text));
    if read.map_err(PlanFileError::Read)? as u64 > LIMIT {
        return Err(PlanFileError::TooLarge);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use tidewatch_api::names;

    use super::*;
    use crate::telemetry::Readiness;

    #[test]
    fn valid_content_is_followed_and_other_content_is_reported_once() {
        let folder = tempfile::tempdir().unwrap();
        let readiness = Readiness::default();
        let metrics = Metrics::default();
        let (path, (publish, followed)) = (folder.path().join("plan.json"), watch::channel(PlanState::default()));
        let mut source = PlanFile::new(path.clone(), publish, readiness.pending("plan"), metrics.clone());
        let error = || followed.borrow().error.clone().unwrap_or_default();
        for _ in 0..2 {
            source.refresh();
            assert!(error().starts_with("the plan file cannot be read: "), "{}", error());
        }
        assert_eq!((metrics.plans_refused.get(), readiness.missing()), (1, vec!["plan"]));
        for (text, revision, refusal) in [
            (r#"{"revision":"1","watches":[]}"#.to_owned(), "1", ""),
            ("{".to_owned(), "1", "the plan file is not valid: "),
            (r#"{"revision":"2","watches":[]}"#.to_owned(), "2", ""),
            (" ".repeat(LIMIT as usize + 1), "2", "the plan file exceeds 1048576 bytes"),
        ] {
            std::fs::write(&path, text).unwrap();
            source.refresh();
            let refused = metrics.plans_refused.get();
            source.refresh();
            assert_eq!((metrics.plans_refused.get(), readiness.missing()), (refused, vec![]));
            assert_eq!(followed.borrow().plan.as_ref().unwrap().revision(), revision);
            assert!(error().starts_with(refusal) && error().is_empty() == refusal.is_empty(), "{}", error());
        }
    }

    #[test]
    fn example_of_the_migration_page_is_a_plan_for_lifecycle_manager() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operations/takeover.md");
        let page = std::fs::read_to_string(page).unwrap();
        let block = page.split_once("```json\n").unwrap().1.split_once("```").unwrap().0;
        let plan = Plan::parse(block).unwrap();
        let [watch] = plan.watches() else { panic!("one watch: {plan:?}") };
        assert_eq!((&*watch.group, &*watch.resource), (names::GROUP, "kymas"));
        assert_eq!(watch.label_selector, "operator.kyma-project.io/watched-by=kyma");
        assert_eq!(watch.manager, names::OWN_MANAGER);
    }
}
