use std::{fs, os::unix::fs::symlink, path::Path};

use serde_json::json;
use tidewatch_api::Kyma;
use tidewatch_fleet::recorder;
use tidewatch_kit::metrics::Registry;

use super::*;
use crate::windows::Metrics;

struct Fixture {
    file: PolicyFile,
    registry: Registry,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new(prepare: impl FnOnce(&Path)) -> Self {
        let mut registry = Registry::default();
        let folder = tempfile::tempdir().unwrap();
        let metrics = Metrics::register(&mut registry);
        metrics.lifecycle_manager.register_in(&mut registry);
        prepare(folder.path());
        let windows = MaintenanceWindows::new(std::time::Duration::from_secs(1_200), metrics);
        let recorder = EventRecorder::new(recorder::Metrics::default());
        let path = folder.path().join("policy.json");
        let file = PolicyFile::open(path, windows, recorder, "kcp-system");
        Self { file, registry, folder }
    }

    fn write(&self, contents: &[u8]) {
        fs::write(self.folder.path().join("policy.json"), contents).unwrap();
    }

    /// Reads the file again. Returns whether it was taken into use, the window at a fixed time, and the values of the gauges:
    /// read successfully, and good.
    fn reload(&mut self) -> (bool, String, [u8; 2]) {
        let taken = self.file.reload();
        (taken, self.state(), self.gauges())
    }

    fn state(&self) -> String {
        let kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "metadata": {"name": "k"},
            "spec": {"channel": "regular"}});
        let now = "2026-11-28T19:00:00Z".parse().unwrap();
        self.file.windows.state(&serde_json::from_value::<Kyma>(kyma).unwrap(), now).to_string()
    }

    fn gauges(&self) -> [u8; 2] {
        let text = self.registry.encode().unwrap();
        ["lifecycle_mgr_maintenance_window_config_read_success", "maintenance_window_policy_good"].map(|name| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            value.unwrap().parse().unwrap()
        })
    }

    /// Notes of the Events that wait to be written.
    fn events(&self) -> Vec<String> {
        self.file.recorder.pending_notes()
    }
}

fn policy(begin: &str) -> Vec<u8> {
    json!({"default": {"days": ["Sat"], "begin": begin, "end": "23:00:00Z"}}).to_string().into_bytes()
}

const NO_POLICY: &str = "no maintenance window policy configured";

#[test]
fn file_may_come_later_and_an_invalid_one_keeps_the_last_good_policy() {
    let mut fixture = Fixture::new(|_| ());
    assert_eq!((fixture.state(), fixture.gauges()), (NO_POLICY.to_owned(), [0, 1]), "no file is no fault");
    let opens = |hour: &str| format!("2026-11-28T{hour}:00:00Z");
    fixture.write(&policy("20:00:00Z"));
    assert_eq!(fixture.reload(), (true, opens("20"), [1, 1]));
    assert_eq!(fixture.reload(), (false, opens("20"), [1, 1]), "unchanged");
    let too_large = vec![b' '; MAX_BYTES + 1];
    for (invalid, events) in [(&b"{"[..], 1), (br#"{"rules": 1}"#, 2), (&too_large, 3), (b"", 4)] {
        fixture.write(invalid);
        for _ in 0..2 {
            assert_eq!(fixture.reload(), (false, opens("20"), [0, 0]), "{events}");
        }
        assert_eq!(fixture.events().len(), events, "each fault is reported once");
    }
    assert!(fixture.events()[1].contains("policy.json: rules is not a list"), "{:?}", fixture.events());
    fixture.write(&policy("20:00:00Z"));
    assert_eq!(fixture.reload(), (false, opens("20"), [1, 1]), "the content in use is back");
    fs::remove_file(fixture.folder.path().join("policy.json")).unwrap();
    assert_eq!(fixture.reload(), (false, opens("20"), [0, 0]), "gone");
    fixture.write(&policy("21:00:00Z"));
    assert_eq!(fixture.reload(), (true, opens("21"), [1, 1]));
}

#[test]
fn policy_with_mistakes_is_in_use_and_reported_once() {
    let mut fixture = Fixture::new(|_| ());
    fixture.write(br#"{"rules": [{"match": {"plan": "("}}], "default": {"days": ["Sat", "day"], "begin": "20:00:00Z", "end": "23:00:00Z"}}"#);
    for taken in [true, false] {
        assert_eq!(fixture.reload(), (taken, "2026-11-28T20:00:00Z".to_owned(), [1, 1]));
        let events = fixture.events();
        let note = "policy.json is in use, with mistakes, which affect only their rule or window: rules[0].match.plan is not a \
                    usable regular expression: unclosed group; default.days[1] is \"day\", not one of";
        assert!(events.len() == 1 && events[0].contains(note), "{events:?}");
        assert!(fixture.registry.encode().unwrap().contains("maintenance_window_policy_mistakes 2\n"));
    }
    fixture.write(&policy("20:00:00Z"));
    assert!(fixture.reload().0);
    assert!(fixture.registry.encode().unwrap().contains("maintenance_window_policy_mistakes 0\n"));
}

#[test]
fn invalid_file_at_the_start_leaves_no_policy() {
    let mut fixture = Fixture::new(|folder| fs::write(folder.join("policy.json"), "[]").unwrap());
    assert_eq!((fixture.state(), fixture.gauges(), fixture.events().len()), (NO_POLICY.to_owned(), [0, 0], 1));
    fixture.write(&policy("20:00:00Z"));
    assert!(fixture.reload().0);
}

#[test]
fn unreadable_file_keeps_the_last_good_policy() {
    let mut fixture = Fixture::new(|folder| fs::write(folder.join("policy.json"), policy("20:00:00Z")).unwrap());
    let path = fixture.folder.path().join("policy.json");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    for _ in 0..2 {
        assert_eq!(fixture.reload(), (false, "2026-11-28T20:00:00Z".to_owned(), [0, 0]));
        assert_eq!(fixture.events().len(), 1, "the fault is reported once");
    }
}

/// A mounted ConfigMap is a symlink to a folder that is replaced as a whole.
#[test]
fn swapped_symlink_of_a_mounted_config_map_is_followed() {
    let volume = |folder: &Path, version: &str, begin: &str| {
        let data = folder.join(version);
        fs::create_dir(&data).unwrap();
        fs::write(data.join("policy.json"), policy(begin)).unwrap();
        symlink(version, folder.join("..next")).unwrap();
        fs::rename(folder.join("..next"), folder.join("..data")).unwrap();
    };
    let mut fixture = Fixture::new(|folder| {
        volume(folder, "..1", "20:00:00Z");
        symlink("..data/policy.json", folder.join("policy.json")).unwrap();
    });
    assert_eq!((fixture.state(), fixture.gauges()), ("2026-11-28T20:00:00Z".to_owned(), [1, 1]));
    volume(fixture.folder.path(), "..2", "21:00:00Z");
    assert_eq!(fixture.reload(), (true, "2026-11-28T21:00:00Z".to_owned(), [1, 1]));
}
