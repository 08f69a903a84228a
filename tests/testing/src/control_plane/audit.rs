//! Writes by user: the API server's audit log and its request metrics. Proves that nothing is written when nothing
//! changed.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufRead as _, BufReader, Seek as _, SeekFrom},
    path::Path,
};

use jiff::Timestamp;
use serde::Deserialize;

pub(crate) const POLICY_FILE: &str = "audit-policy.yaml";
pub(crate) const LOG_FILE: &str = "audit.log";

/// Logs every write that reaches the store, once, when it is complete. Reviews and token requests are POSTs that store
/// nothing.
pub(crate) const POLICY: &str = r#"apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: ["RequestReceived", "ResponseStarted"]
rules:
  - level: None
    resources:
      - group: authentication.k8s.io
      - group: authorization.k8s.io
      - group: ""
        resources: ["serviceaccounts/token"]
  - level: Metadata
    verbs: ["create", "update", "patch", "delete", "deletecollection"]
  - level: None
"#;

/// One write request in the audit log.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Write {
    /// User name; `system:serviceaccount:<namespace>:<name>` for an account, see [`super::ClusterUser::name`] for the
    /// others.
    pub user: String,
    /// `create`, `update`, `patch`, `delete` or `deletecollection`.
    pub verb: String,
    /// API group, empty for core.
    pub group: String,
    /// Plural, with the subresource after a slash.
    pub resource: String,
    /// Empty for cluster-wide objects.
    pub namespace: String,
    /// Empty where the server names the object.
    pub name: String,
    /// HTTP status of the response; 400 and above for a refused write.
    pub code: u16,
}

impl Write {
    /// Returns true for writes of Kubernetes itself (the API server's own bookkeeping, controllers).
    pub fn is_kubernetes_own(&self) -> bool {
        let account = self.user.starts_with("system:serviceaccount:");
        self.user == super::ClusterUser::Workloads.name() || (self.user.starts_with("system:") && !account)
    }
}

/// A write with its duration, by the machine's clock, which all API servers share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimedWrite {
    /// The write request.
    pub write: Write,
    /// Arrival of the request.
    pub begun: Timestamp,
    /// Time of the response.
    pub ended: Timestamp,
}

/// A position in an audit log, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mark(u64);

/// The current end of the log.
pub(crate) fn mark(dir: &Path) -> io::Result<Mark> {
    match dir.join(LOG_FILE).metadata() {
        Ok(metadata) => Ok(Mark(metadata.len())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Mark::default()),
        Err(error) => Err(error),
    }
}

/// The writes since the mark, in the order of their completion.
pub(crate) fn writes_since(dir: &Path, mark: Mark) -> io::Result<Vec<Write>> {
    Ok(timed_since(dir, mark)?.into_iter().map(|timed| timed.write).collect())
}

/// The same with their times.
pub(crate) fn timed_since(dir: &Path, mark: Mark) -> io::Result<Vec<TimedWrite>> {
    let mut file = match File::open(dir.join(LOG_FILE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        file => file?,
    };
    file.seek(SeekFrom::Start(mark.0))?;
    let lines = BufReader::new(file).lines();
    // The last line may be incomplete.
    Ok(lines.collect::<io::Result<Vec<_>>>()?.iter().filter_map(|line| parse(line)).collect())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    verb: String,
    user: User,
    #[serde(default)]
    object_ref: ObjectRef,
    #[serde(default)]
    response_status: Status,
    #[serde(default)]
    request_received_timestamp: Timestamp,
    #[serde(default)]
    stage_timestamp: Timestamp,
}

#[derive(Deserialize)]
struct User {
    username: String,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct ObjectRef {
    api_group: String,
    resource: String,
    subresource: String,
    namespace: String,
    name: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Status {
    code: u16,
}

fn parse(line: &str) -> Option<TimedWrite> {
    let Entry { verb, user, object_ref, response_status, request_received_timestamp, stage_timestamp } =
        serde_json::from_str(line).ok()?;
    let ObjectRef { api_group, resource, subresource, namespace, name } = object_ref;
    let resource = if subresource.is_empty() { resource } else { format!("{resource}/{subresource}") };
    let code = response_status.code;
    let write = Write { user: user.username, verb, group: api_group, resource, namespace, name, code };
    Some(TimedWrite { write, begun: request_received_timestamp, ended: stage_timestamp })
}

/// Labels of the API server's request counter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestKind {
    /// `POST`, `PUT`, `PATCH`, `APPLY`, `DELETE`, `DELETECOLLECTION`.
    pub verb: String,
    /// API group, empty for core.
    pub group: String,
    /// Plural, with the subresource after a slash.
    pub resource: String,
}

/// Sums `apiserver_request_total` of the mutating verbs by kind of request.
pub(crate) fn write_requests(metrics: &str) -> BTreeMap<RequestKind, u64> {
    let mut sums = BTreeMap::new();
    for line in metrics.lines() {
        let Some((labels, value)) =
            line.strip_prefix("apiserver_request_total{").and_then(|rest| rest.rsplit_once("} "))
        else {
            continue;
        };
        let labels = labels_of(labels);
        let label = |name: &str| labels.get(name).copied().unwrap_or_default();
        if !["POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"].contains(&label("verb")) {
            continue;
        }
        let resource = match label("subresource") {
            "" => label("resource").to_owned(),
            subresource => format!("{}/{subresource}", label("resource")),
        };
        let kind = RequestKind { verb: label("verb").to_owned(), group: label("group").to_owned(), resource };
        *sums.entry(kind).or_default() += value.trim().parse::<u64>().unwrap_or_default();
    }
    sums
}

/// Parses `a="b",c="d"`; the label values of this metric contain neither quotes nor commas.
fn labels_of(text: &str) -> BTreeMap<&str, &str> {
    text.split(',')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name, value.trim_matches('"')))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_an_audit_line() {
        let line = r#"{"kind":"Event","stage":"ResponseComplete","verb":"patch","user":{"username":"user","groups":[]},
            "objectRef":{"resource":"kymas","namespace":"n","name":"k","apiGroup":"g","subresource":"status"},
            "responseStatus":{"metadata":{},"code":200},
            "requestReceivedTimestamp":"2026-01-01T00:00:00.250000Z","stageTimestamp":"2026-01-01T00:00:01.000000Z"}"#;
        let TimedWrite { write, begun, ended } = parse(line).expect("an entry");
        assert_eq!(ended.duration_since(begun).as_millis(), 750);
        assert_eq!((write.user.as_str(), write.resource.as_str(), write.code), ("user", "kymas/status", 200));
        assert!(!write.is_kubernetes_own());
    }

    #[test]
    fn a_half_line_is_left_out() {
        assert_eq!(parse(r#"{"kind":"Event","verb":"pat"#), None);
    }

    #[test]
    fn tells_kubernetes_from_accounts() {
        let by = |user: &str| {
            let line = format!(r#"{{"verb":"patch","user":{{"username":"{user}"}}}}"#);
            parse(&line).expect("an entry").write.is_kubernetes_own()
        };
        assert!(by("system:apiserver") && by("workloads"));
        assert!(!by("system:serviceaccount:kyma-system:tidewatch-agent"));
    }

    #[test]
    fn sums_mutating_verbs_over_codes() {
        let metrics = "# TYPE apiserver_request_total counter\n\
            apiserver_request_total{code=\"200\",group=\"g\",resource=\"r\",subresource=\"status\",verb=\"PATCH\"} 2\n\
            apiserver_request_total{code=\"409\",group=\"g\",resource=\"r\",subresource=\"status\",verb=\"PATCH\"} 1\n\
            apiserver_request_total{code=\"200\",group=\"g\",resource=\"r\",subresource=\"\",verb=\"LIST\"} 9\n";
        let sums = write_requests(metrics);
        let kind = RequestKind { verb: "PATCH".into(), group: "g".into(), resource: "r/status".into() };
        assert_eq!(sums, BTreeMap::from([(kind, 3)]));
    }
}
