//! Components of an installation: the objects and their API resources.

use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind},
};
use strum::VariantArray;
use tidewatch_api::names::{
    AGENT_DEPLOYMENT, AGENT_METRICS_SERVICE, AGENT_OBJECT, AGENT_PRIORITY_CLASS, AGENT_PULL_SECRET, IDENTITY_SECRET,
    SKR_NAMESPACE,
};

/// One object of an installation. A removal deletes them in the opposite order; an installation writes them in waves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, VariantArray, strum::IntoStaticStr)]
pub enum Component {
    /// lifecycle-manager's webhook configuration, empty, where it is requested.
    Webhooks,
    /// Copy of the image pull secret, where one is configured.
    PullSecret,
    /// ServiceAccount of the agent.
    Account,
    /// Rights to read in the whole cluster.
    ClusterRole,
    /// Binding of [`Self::ClusterRole`].
    ClusterRoleBinding,
    /// Rights in the agent's namespace.
    Role,
    /// Binding of [`Self::Role`].
    RoleBinding,
    /// Canary of the agent. The receiver creates it, since RBAC cannot limit `create` by name; the agent updates it.
    Lease,
    /// Identity of the agent. The receiver creates it, the agent updates it.
    Secret,
    /// Plan, addresses and roots for the agent.
    ConfigMap,
    /// Priority of the agent's pod.
    PriorityClass,
    /// Egress to the API server, to the receiver, and to DNS.
    ApiServerPolicy,
    /// Egress to DNS.
    DnsPolicy,
    /// Ingress to the metrics port.
    MetricsPolicy,
    /// Service of the metrics port.
    MetricsService,
    /// Deployment of the agent.
    Deployment,
}

/// API resource of a kind, in [`VERSION`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) group: &'static str,
    pub(super) kind: &'static str,
    pub(super) plural: &'static str,
    pub(super) namespaced: bool,
}

/// API version of every kind.
pub(super) const VERSION: &str = "v1";

const fn namespaced(group: &'static str, kind: &'static str, plural: &'static str) -> Kind {
    Kind { group, kind, plural, namespaced: true }
}

const fn cluster(group: &'static str, kind: &'static str, plural: &'static str) -> Kind {
    Kind { group, kind, plural, namespaced: false }
}

pub(super) const WEBHOOKS: Kind =
    cluster("admissionregistration.k8s.io", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations");
pub(super) const SERVICES: Kind = namespaced("", "Service", "services");
pub(super) const POLICIES: Kind = namespaced("networking.k8s.io", "NetworkPolicy", "networkpolicies");
pub(super) const SECRETS: Kind = namespaced("", "Secret", "secrets");
pub(super) const PODS: Kind = namespaced("", "Pod", "pods");

impl Kind {
    pub(super) fn resource(self) -> ApiResource {
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(self.group, VERSION, self.kind), self.plural)
    }

    pub(super) fn api(self, client: &Client) -> Api<DynamicObject> {
        if self.namespaced {
            Api::namespaced_with(client.clone(), SKR_NAMESPACE, &self.resource())
        } else {
            Api::all_with(client.clone(), &self.resource())
        }
    }
}

impl Component {
    /// Finds the component with this resource and name.
    pub fn of(plural: &str, name: &str) -> Option<Self> {
        Self::VARIANTS.iter().copied().find(|component| component.kind().plural == plural && component.name() == name)
    }

    /// Name of the object.
    pub const fn name(self) -> &'static str {
        self.object().1
    }

    pub(super) const fn kind(self) -> Kind {
        self.object().0
    }

    /// Kind and name of the object.
    const fn object(self) -> (Kind, &'static str) {
        const RBAC: &str = "rbac.authorization.k8s.io";
        match self {
            Self::Webhooks => (WEBHOOKS, AGENT_DEPLOYMENT),
            Self::PullSecret => (SECRETS, AGENT_PULL_SECRET),
            Self::Account => (namespaced("", "ServiceAccount", "serviceaccounts"), AGENT_OBJECT),
            Self::ClusterRole => (cluster(RBAC, "ClusterRole", "clusterroles"), AGENT_OBJECT),
            Self::ClusterRoleBinding => (cluster(RBAC, "ClusterRoleBinding", "clusterrolebindings"), AGENT_OBJECT),
            Self::Role => (namespaced(RBAC, "Role", "roles"), AGENT_OBJECT),
            Self::RoleBinding => (namespaced(RBAC, "RoleBinding", "rolebindings"), AGENT_OBJECT),
            Self::Lease => (namespaced("coordination.k8s.io", "Lease", "leases"), AGENT_OBJECT),
            Self::Secret => (SECRETS, IDENTITY_SECRET),
            Self::ConfigMap => (namespaced("", "ConfigMap", "configmaps"), AGENT_OBJECT),
            Self::PriorityClass => {
                (cluster("scheduling.k8s.io", "PriorityClass", "priorityclasses"), AGENT_PRIORITY_CLASS)
            }
            Self::ApiServerPolicy => (POLICIES, "kyma-project.io--watcher-to-apiserver"),
            Self::DnsPolicy => (POLICIES, "kyma-project.io--watcher-to-dns"),
            Self::MetricsPolicy => (POLICIES, "kyma-project.io--metrics-to-watcher"),
            Self::MetricsService => (SERVICES, AGENT_METRICS_SERVICE),
            Self::Deployment => (namespaced("apps", "Deployment", "deployments"), AGENT_DEPLOYMENT),
        }
    }

    /// Components that must not have failed before this one is reconciled. All of them are in earlier waves.
    ///
    /// * Deleting lifecycle-manager's webhook configuration comes first: the other objects disable its webhook, and users'
    ///   writes would then wait for a webhook that does not answer.
    /// * The first policy for egress denies all egress that it does not allow, so it is the one that allows all of the agent's.
    /// * A plan must not name a kind that the agent may not read yet.
    pub(super) const fn dependencies(self) -> &'static [Self] {
        match self {
            Self::Secret | Self::Deployment | Self::ApiServerPolicy | Self::MetricsPolicy => &[Self::Webhooks],
            Self::DnsPolicy => &[Self::Webhooks, Self::ApiServerPolicy],
            Self::ConfigMap => {
                &[Self::Account, Self::ClusterRole, Self::ClusterRoleBinding, Self::Role, Self::RoleBinding]
            }
            _ => &[],
        }
    }

    /// Number of waves.
    pub(super) const WAVES: usize = 4;

    /// Wave in which an installation writes the component: all of one wave at once, when the one before has ended. It comes
    /// after the waves of its [`Self::dependencies`], and the Deployment after everything that its pod needs.
    ///
    /// Waves are no dependencies: a Lease that is refused blocks no Deployment.
    pub(super) const fn wave(self) -> usize {
        match self {
            Self::Webhooks => 0,
            Self::PullSecret
            | Self::Account
            | Self::ClusterRole
            | Self::ClusterRoleBinding
            | Self::Role
            | Self::RoleBinding
            | Self::Lease
            | Self::Secret
            | Self::PriorityClass
            | Self::ApiServerPolicy
            | Self::MetricsPolicy
            | Self::MetricsService => 1,
            Self::ConfigMap | Self::DnsPolicy => 2,
            Self::Deployment => 3,
        }
    }

    /// Returns whether an agent runs and proves its event path without the object. Without the policies its pod is less
    /// isolated, and without its priority it may have to wait for room on a node.
    pub(super) const fn is_additional(self) -> bool {
        matches!(
            self,
            Self::PriorityClass | Self::ApiServerPolicy | Self::DnsPolicy | Self::MetricsPolicy | Self::MetricsService
        )
    }

    /// Returns whether only the labels are ours: the agent owns the content, which in the Secret includes a key that no
    /// other process reads.
    pub(super) const fn is_agent_managed(self) -> bool {
        matches!(self, Self::Lease | Self::Secret)
    }

    /// Returns whether the agent's plan includes the component. No plan includes Secrets or objects that the agent
    /// itself updates.
    pub(super) const fn is_watched(self) -> bool {
        !matches!(self, Self::Lease | Self::Secret | Self::PullSecret | Self::Webhooks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_are_in_order_and_each_is_one_object() {
        for (at, component) in Component::VARIANTS.iter().enumerate() {
            assert_eq!(*component as usize, at);
            assert_eq!(Component::of(component.kind().plural, component.name()), Some(*component));
        }
        assert!(Component::VARIANTS.is_sorted());
        assert_eq!(Component::of("deployments", "mine"), None);
    }

    #[test]
    fn waves_follow_the_dependencies_and_the_deployment_alone_is_last() {
        for component in Component::VARIANTS.iter().copied() {
            let is_after = |dependency: &Component| dependency.wave() < component.wave();
            assert!(component.dependencies().iter().all(is_after), "{component:?}");
            let is_last = component.wave() + 1 == Component::WAVES;
            assert_eq!(is_last, component == Component::Deployment, "{component:?}");
        }
    }
}
