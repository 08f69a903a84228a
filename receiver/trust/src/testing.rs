//! A fake control plane with the CA's Secret, a rotation that tests of other crates step through, and states of the CA.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc, clippy::must_use_candidate, reason = "test support")]

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::Client;
use rcgen::{ExtendedKeyUsagePurpose, PublicKeyData, SanType};
use rustls::ClientConfig;
use tidewatch_api::identity::TrustDomain;
use tidewatch_cluster::testing::FakeApiServer;
use tidewatch_contract::admin::rotation::PhaseName;
use tidewatch_kit::tls::Identity;
use tokio::sync::watch;

use super::{
    Authority, CA_VALIDITY, Ca, CertificateReloader, Flags, Metrics, ReplicaClient, ReplicaTls, Setup, TlsState, Trust,
    authority::Issuer,
    ca,
    ca_state::{CaState, Phase, Root},
    open,
};
use crate::{ProxyIdentity, TlsFlags};

impl Ca {
    /// Issues a certificate with any URI and usages for a key, valid for a day, as PEM chain.
    pub fn sign(&self, key: &impl PublicKeyData, uri: &str, usages: &[ExtendedKeyUsagePurpose]) -> String {
        let mut params = ca::params("test", now(), now() + 86_400).unwrap();
        params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
        params.extended_key_usages = usages.to_vec();
        self.leaf(params, key).unwrap()
    }
}

impl ReplicaTls {
    /// Configuration of a connection to a replica with the certificate of another client.
    pub fn client_as(&self, identity: &Identity, replica: &str) -> ClientConfig {
        let ReplicaClient { roots, domain, .. } = &*self.client();
        let client = ReplicaClient { identity: identity.clone(), roots: roots.clone(), domain: domain.clone() };
        client.config(&replica.parse().unwrap()).unwrap()
    }
}

impl ReplicaClient {
    /// The certificate and key.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }
}

fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

/// Certificates of a receiver behind a proxy while its CA rotates.
pub struct Rotating {
    kcp: FakeKcp,
    /// Certificates in use.
    pub tls_state: TlsState,
    reloader: CertificateReloader,
    old: Root,
    new: Root,
}

impl Rotating {
    /// Certificates of a receiver behind this proxy.
    pub async fn behind(proxy: &ProxyIdentity) -> Self {
        let kcp = FakeKcp::default();
        let flags = flags();
        let domain = "kyma.local".parse().unwrap();
        let proxy_identity = Some(proxy.clone());
        let tls = TlsFlags { tls_cert: None, tls_key: None, client_ca: None, proxy_ca: None, proxy_identity };
        let names = vec!["kcp.test".try_into().unwrap()];
        let setup = Setup { flags: &flags, tls: &tls, names, domain: &domain, namespace: "kcp-system" };
        let (tls_state, reloader) = open(setup, kcp.client(), Metrics::default()).await.unwrap();
        let old = kcp.ca_state().target().clone();
        let new = Root::generate(CA_VALIDITY, now()).unwrap();
        Self { kcp, tls_state, reloader, old, new }
    }

    /// Certificates of a receiver without proxy.
    pub async fn new() -> Self {
        Self::behind(&"spiffe://kyma.local/proxy".parse().unwrap()).await
    }

    /// The initial root, and the one that replaces it.
    pub fn roots(&self) -> [&Ca; 2] {
        [&self.old.ca, &self.new.ca]
    }

    /// Stores a phase and returns it through the watch. The last one is [`PhaseName::Steady`], with the new root alone.
    pub fn enter(&mut self, phase: PhaseName) {
        let old = self.old.clone();
        let next = self.new.clone();
        let leaves_end = now() + 86_400;
        let (root, phase) = match phase {
            PhaseName::Spread => (old, Phase::Spread { next }),
            PhaseName::Reissue => (old, Phase::Reissue { next, leaves_end }),
            PhaseName::Retire => (next, Phase::Retire { old: old.ca.trust_bundle(), leaves_end }),
            PhaseName::Steady => (next, Phase::Steady),
        };
        let ca_state = CaState { root, phase, since: now(), force_after: None };
        self.kcp.edit(|secret| secret.data = Some(ca_state.write()));
        self.reloader.apply_secret(self.kcp.secret().as_ref(), now());
    }
}

/// The flags with their defaults.
pub fn flags() -> Flags {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }
    // `--server-ca` refers to these flags of [`TlsFlags`].
    let line = <Line as clap::CommandFactory>::command()
        .arg(clap::Arg::new("tls_cert"))
        .arg(clap::Arg::new("client_ca").long("client-ca"));
    let mut matches = line.get_matches_from(["x"]);
    <Line as clap::FromArgMatches>::from_arg_matches_mut(&mut matches).unwrap().flags
}

/// A built-in CA in memory that never changes.
pub fn fixed_authority(ca: Ca, domain: TrustDomain, validity: Duration) -> Authority {
    let bundle = ca.trust_bundle();
    let trust = Trust { agents: bundle.clone(), clients: bundle, issuer: ca.key_id().cloned() };
    let trust = watch::Sender::new(Arc::new(trust));
    Authority::new(Issuer::Builtin(ArcSwap::from_pointee(ca)), domain, validity, trust)
}

/// Id of the CA's Secret.
pub const SECRET: &str = "secrets/tidewatch-ca";

/// A fake KCP that stores the CA's Secret. Clones share it.
#[derive(Clone, Default)]
pub struct FakeKcp(pub(crate) FakeApiServer);

impl FakeKcp {
    /// A client of this control plane.
    pub fn client(&self) -> Client {
        self.0.client()
    }

    /// The Secret of the CA, if there is one.
    pub fn secret(&self) -> Option<Secret> {
        Some(serde_json::from_value(self.0.object(SECRET)?).unwrap())
    }

    /// The stored state of the CA.
    pub fn ca_state(&self) -> CaState {
        CaState::read(&self.secret().unwrap().data.unwrap()).unwrap()
    }

    /// Changes the Secret like another writer.
    pub fn edit(&self, change: impl FnOnce(&mut Secret)) {
        self.0.edit(SECRET, |object| {
            let mut secret =
                if object.is_null() { Secret::default() } else { serde_json::from_value(object.take()).unwrap() };
            change(&mut secret);
            *object = serde_json::to_value(secret).unwrap();
        });
    }

    /// Sets a key of the Secret.
    pub fn set(&self, key: &str, value: &[u8]) {
        self.edit(|secret| {
            secret.data.get_or_insert_default().insert(key.to_owned(), ByteString(value.to_vec()));
        });
    }

    /// Deletes the Secret.
    pub fn remove(&self) {
        self.0.remove(SECRET).unwrap();
    }

    /// Refuses all writes of the Secret, or accepts them again.
    pub fn refuse(&self, refuses: bool) {
        self.0.refuse("WRITE secrets", refuses.then_some(403));
    }

    /// Takes the recorded requests.
    pub fn calls(&self) -> Vec<String> {
        self.0.calls()
    }
}

/// Time of [`phases`], in Unix seconds.
pub const NOW: i64 = 1_800_000_000;

/// A root of this name.
pub fn root(name: &str) -> Root {
    Root::new(Ca::generate(name, NOW, Duration::from_secs(1_000_000)).unwrap()).unwrap()
}

/// One state of each phase, of the same two roots.
pub fn phases() -> [CaState; 4] {
    let old = root("old");
    let new = root("new");
    let leaves_end = NOW + 86_400;
    [
        (old.clone(), Phase::Steady),
        (old.clone(), Phase::Spread { next: new.clone() }),
        (old.clone(), Phase::Reissue { next: new.clone(), leaves_end }),
        (new, Phase::Retire { old: old.ca.trust_bundle(), leaves_end }),
    ]
    .map(|(root, phase)| CaState { root, phase, since: NOW, force_after: Some(60) })
}
