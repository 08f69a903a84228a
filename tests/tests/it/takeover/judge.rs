//! Says from the audit logs of both API servers who acted on one Kyma, and when: with the times of requests, so that acts that overlap
//! are seen even between two clusters.

use anyhow::{Result, ensure};
use jiff::Timestamp;
use tidewatch_tests::{
    control_plane::{
        Person,
        audit::{Mark, Timed},
    },
    landscape::{Landscape, Runtime},
};

/// Who acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Actor {
    Incumbent,
    Us,
}

/// One write that was not refused.
#[derive(Debug)]
struct Act {
    actor: Actor,
    begun: Timestamp,
    ended: Timestamp,
    what: String,
}

/// Sees the acts on one Kyma from now on.
pub(super) struct Judge<'a> {
    landscape: &'a Landscape,
    runtime: &'a Runtime,
    marks: (Mark, Mark),
    /// Whether the agent is one of ours, installed by the receiver.
    agent: bool,
}

impl<'a> Judge<'a> {
    pub(super) fn begin(landscape: &'a Landscape, runtime: &'a Runtime) -> Result<Self> {
        let marks = (landscape.kcp().audit_mark()?, runtime.cluster().audit_mark()?);
        Ok(Self { landscape, runtime, marks, agent: true })
    }

    /// The same without the agent's writes, where the test itself keeps one running.
    pub(super) fn without_agent(self) -> Self {
        Self { agent: false, ..self }
    }

    /// The eras so far: who acted after whom. Fails if a write of one began before the last of another had ended.
    pub(super) fn eras(&self) -> Result<Vec<Actor>> {
        let mut acts = self.acts()?;
        acts.sort_by_key(|act| act.begun);
        let mut eras: Vec<(Actor, Timestamp, String)> = Vec::new();
        for act in acts {
            match eras.last_mut() {
                Some((actor, ended, what)) if *actor == act.actor => {
                    if act.ended > *ended {
                        (*ended, *what) = (act.ended, act.what);
                    }
                }
                last => {
                    let at_once = last.filter(|(_, ended, _)| *ended > act.begun);
                    ensure!(at_once.is_none(), "both act: {at_once:?} and {act:?}");
                    eras.push((act.actor, act.ended, act.what));
                }
            }
        }
        Ok(eras.into_iter().map(|(actor, ..)| actor).collect())
    }

    fn acts(&self) -> Result<Vec<Act>> {
        let Self { landscape, runtime, marks, agent } = self;
        let (namespace, name) = (landscape.namespace(), runtime.name());
        let receiver = format!("system:serviceaccount:{namespace}:tidewatch-receiver");
        let is_its = |timed: &Timed| {
            let write = &timed.write;
            let of_kyma = write.resource.starts_with("kymas") && write.name == name;
            // A Manifest bears the name of its Kyma in front.
            let of_module = write.resource.starts_with("manifests") && write.name.starts_with(&format!("{name}-"));
            write.namespace == namespace && (of_kyma || of_module)
        };
        let in_kcp = landscape.kcp().timed_writes_since(marks.0)?.into_iter().filter(is_its);
        let in_runtime = runtime.cluster().timed_writes_since(marks.1)?.into_iter();
        let is_ours = |user: &str| {
            user == receiver
                || user == "system:serviceaccount:kube-system:tidewatch-control-plane"
                || (*agent && user == "system:serviceaccount:kyma-system:tidewatch-agent")
        };
        let act = |Timed { write, begun, ended }: Timed| {
            let actor = match write.user.as_str() {
                user if user == Person::Other.name() => Actor::Incumbent,
                user if is_ours(user) => Actor::Us,
                _ => return None,
            };
            let what = format!("{} {} {}/{}", write.user, write.verb, write.resource, write.name);
            (write.code < 400).then_some(Act { actor, begun, ended, what })
        };
        Ok(in_kcp.chain(in_runtime).filter_map(act).collect())
    }
}
