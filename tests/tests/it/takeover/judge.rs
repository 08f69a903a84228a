//! Reconstructs from the audit logs of both API servers which controller acted on a Kyma at which time. It compares the
//! times of requests, so it detects overlaps even between two clusters.

use anyhow::{Result, ensure};
use jiff::Timestamp;
use tidewatch_testing::{
    control_plane::{
        ClusterUser,
        audit::{Mark, TimedWrite},
    },
    landscape::{Landscape, Runtime},
};

/// A controller that writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Actor {
    LifecycleManager,
    Us,
}

/// One write that was not refused.
#[derive(Debug)]
struct AuditedWrite {
    actor: Actor,
    begun: Timestamp,
    ended: Timestamp,
    description: String,
}

/// Judges the writes that concern one Kyma, from [`Judge::begin`] on.
pub(super) struct Judge<'a> {
    landscape: &'a Landscape,
    runtime: &'a Runtime,
    marks: (Mark, Mark),
    /// True if the receiver has installed the agent, so that its writes count as well.
    agent: bool,
}

impl<'a> Judge<'a> {
    pub(super) fn begin(landscape: &'a Landscape, runtime: &'a Runtime) -> Result<Self> {
        let marks = (landscape.kcp().audit_mark()?, runtime.cluster().audit_mark()?);
        Ok(Self { landscape, runtime, marks, agent: true })
    }

    /// Ignores the agent's writes, for tests that run the agent themselves.
    pub(super) fn without_agent(self) -> Self {
        Self { agent: false, ..self }
    }

    /// Returns the sequence of controllers so far. Fails if a write of one began before the last write of another had
    /// ended.
    pub(super) fn actors(&self) -> Result<Vec<Actor>> {
        let mut writes = self.writes()?;
        writes.sort_by_key(|act| act.begun);
        let mut actors: Vec<(Actor, Timestamp, String)> = Vec::new();
        for act in writes {
            match actors.last_mut() {
                Some((actor, ended, description)) if *actor == act.actor => {
                    if act.ended > *ended {
                        (*ended, *description) = (act.ended, act.description);
                    }
                }
                last => {
                    let overlap = last.filter(|(_, ended, _)| *ended > act.begun);
                    ensure!(overlap.is_none(), "overlapping writes: {overlap:?} and {act:?}");
                    actors.push((act.actor, act.ended, act.description));
                }
            }
        }
        Ok(actors.into_iter().map(|(actor, ..)| actor).collect())
    }

    fn writes(&self) -> Result<Vec<AuditedWrite>> {
        let Self { landscape, runtime, marks, agent } = self;
        let namespace = landscape.namespace();
        let name = runtime.name();
        let receiver = format!("system:serviceaccount:{namespace}:tidewatch-receiver");
        let concerns_kyma = |timed: &TimedWrite| {
            let write = &timed.write;
            let of_kyma = write.resource.starts_with("kymas") && write.name == name;
            // The name of a Manifest starts with that of its Kyma.
            let of_module = write.resource.starts_with("manifests") && write.name.starts_with(&format!("{name}-"));
            write.namespace == namespace && (of_kyma || of_module)
        };
        let in_kcp = landscape.kcp().timed_writes_since(marks.0)?.into_iter().filter(concerns_kyma);
        let in_runtime = runtime.cluster().timed_writes_since(marks.1)?.into_iter();
        let is_ours = |user: &str| {
            user == receiver
                || user == "system:serviceaccount:kube-system:tidewatch-control-plane"
                || (*agent && user == "system:serviceaccount:kyma-system:tidewatch-agent")
        };
        let act = |TimedWrite { write, begun, ended }: TimedWrite| {
            let actor = match write.user.as_str() {
                user if user == ClusterUser::Other.name() => Actor::LifecycleManager,
                user if is_ours(user) => Actor::Us,
                _ => return None,
            };
            let description = format!("{} {} {}/{}", write.user, write.verb, write.resource, write.name);
            (write.code < 400).then_some(AuditedWrite { actor, begun, ended, description })
        };
        Ok(in_kcp.chain(in_runtime).filter_map(act).collect())
    }
}
