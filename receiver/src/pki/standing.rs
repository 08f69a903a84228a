//! What the ports of this receiver present, whom they trust and who issues, as it stands now.

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use arc_swap::ArcSwap;
use kube::Client;
use rustls::ServerConfig;
use tidewatch_shared::{certificate::KeyId, identity::TrustDomain};
use tokio::sync::watch;

use super::{
    Authority, CertManager, Flags, Latest, Metrics, Pki, Proxy, ServerName, TlsFlags, Trust, Upkeep,
    authority::Issuer,
    sources::{Clients, Sources, Whole},
    store::{Kept, Store},
    stored::{Root, Stored},
    upkeep::Own,
};

/// Name in the certificate of a root.
const ROOT_NAME: &str = "Tidewatch CA";

/// From what it is opened.
pub struct Setup<'a> {
    /// Flags of this room.
    pub flags: &'a Flags,
    /// Files of the event port.
    pub tls: &'a TlsFlags,
    /// Names and addresses under which agents reach this receiver.
    pub names: Vec<ServerName>,
    /// Whose runtimes certificates are issued to.
    pub domain: &'a TrustDomain,
    /// Namespace of the CA's Secret.
    pub namespace: &'a str,
    /// The proxy that speaks for agents.
    pub proxy: Option<&'a super::ProxyIdentity>,
}

/// What is held of the CA's Secret.
#[derive(Clone, Debug)]
pub(crate) enum Held {
    /// There is no built-in CA.
    None,
    /// It holds what is used.
    Good(Arc<Kept>),
    /// It is gone; what it held last is still used.
    Lost,
    /// Its content is refused; what it held last is still used.
    Refused,
}

/// What the ports of this receiver present, whom they trust and who issues. Clones are the same; [`Upkeep`] keeps it up to date.
#[derive(Clone)]
pub struct Standing(Arc<Inner>);

struct Inner {
    events: Arc<ArcSwap<ServerConfig>>,
    tokens: Arc<ArcSwap<ServerConfig>>,
    enrolment: Arc<ArcSwap<ServerConfig>>,
    trust: watch::Sender<Arc<Trust>>,
    held: watch::Sender<Held>,
    authority: Option<Authority>,
    proxy: Option<Proxy>,
    metrics: Metrics,
}

impl Standing {
    /// Reads the files, and reads or makes the CA's Secret. Nothing is opened unless all of it is good. The client must be able to write
    /// before this receiver is active: of several that begin at once, one makes the Secret and all take it.
    ///
    /// # Errors
    /// Flags that do not go together, files or a Secret that cannot be used.
    pub async fn open(setup: Setup<'_>, client: Client, metrics: Metrics) -> anyhow::Result<(Self, Upkeep)> {
        let Setup { flags, tls, names, domain, namespace, proxy } = setup;
        let sources = Sources::new(flags, tls, names)?;
        let now = jiff::Timestamp::now().as_second();
        let (mut store, mut kept) = (None, None);
        if sources.need_ca() {
            let made = Store::new(client.clone(), namespace);
            let read = made.read_or_create(|| Ok(Stored::steady(make_root(flags.ca_validity(), now)?, now))).await;
            kept = Some(revived(&made, read.context("open the CA")?, flags.ca_validity(), now).await?);
            store = Some(made);
        }
        let contents = sources.read()?;
        let own = kept.as_ref().map(|kept| Own::make(&kept.stored, &sources.names, flags.server_validity(), now));
        let own = own.filter(|_| !sources.has_server_files()).transpose().context("make the receiver's certificate")?;
        let stored = kept.as_ref().map(|kept| &kept.stored);
        let whole = sources.combine(&contents, stored, own.as_ref().map(|own| &own.pem), now)?;
        let issuer = match (&sources.clients, stored) {
            (Clients::Builtin, Some(stored)) => Some(Issuer::Builtin(ArcSwap::new(stored.issuing().ca.clone()))),
            (Clients::CertManager { kind, name, .. }, _) => {
                Some(Issuer::CertManager(Box::new(CertManager::new(client, namespace, kind, name))))
            }
            _ => None,
        };
        let trust = watch::Sender::new(Arc::new(whole.trust.clone()));
        let proxy = match proxy {
            Some(identity) => Some(Proxy::new(identity.clone(), whole.trust.clients.store()?)?),
            None => None,
        };
        let authority =
            issuer.map(|issuer| Authority::new(issuer, domain.clone(), flags.runtime_validity(), trust.clone()));
        let standing = Self(Arc::new(Inner {
            events: Arc::new(ArcSwap::new(whole.identity.config())),
            tokens: Arc::new(ArcSwap::new(whole.identity.config_for_tokens())),
            enrolment: Arc::new(ArcSwap::new(whole.identity.config_for_enrolment())),
            trust,
            held: watch::Sender::new(Held::None),
            authority,
            proxy,
            metrics: metrics.clone(),
        }));
        standing.publish(&whole, kept.as_ref().map(|kept| &kept.stored))?;
        let kept = kept.map(Arc::new);
        if let Some(kept) = &kept {
            standing.hold(Held::Good(kept.clone()));
        }
        let upkeep = Upkeep {
            standing: standing.clone(),
            sources,
            files: Latest::new("Certificate files", contents),
            own,
            kept,
            store,
            server_validity: flags.server_validity(),
            refused: None,
            metrics,
        };
        Ok((standing, upkeep))
    }

    /// TLS of the event port: whoever connects must show a certificate of the roots that are accepted now.
    #[must_use]
    pub fn events(&self) -> Arc<ArcSwap<ServerConfig>> {
        self.0.events.clone()
    }

    /// TLS of ports where clients show a token.
    #[must_use]
    pub fn tokens(&self) -> Arc<ArcSwap<ServerConfig>> {
        self.0.tokens.clone()
    }

    /// TLS of the enrolment port: no client certificate, HTTP/2 and HTTP/1.1.
    #[must_use]
    pub fn enrolment(&self) -> Arc<ArcSwap<ServerConfig>> {
        self.0.enrolment.clone()
    }

    /// Who issues to runtimes; `None` when agents have their certificates from elsewhere.
    #[must_use]
    pub fn authority(&self) -> Option<&Authority> {
        self.0.authority.as_ref()
    }

    /// What is trusted, now and after every change.
    #[must_use]
    pub fn trust(&self) -> watch::Receiver<Arc<Trust>> {
        self.0.trust.subscribe()
    }

    /// The proxy that speaks for agents; it follows what is trusted.
    #[must_use]
    pub fn proxy(&self) -> Option<Proxy> {
        self.0.proxy.clone()
    }

    pub(crate) fn held(&self) -> watch::Receiver<Held> {
        self.0.held.subscribe()
    }

    pub(crate) fn hold(&self, held: Held) {
        self.0.metrics.good(matches!(held, Held::Good(_)));
        self.0.held.send_replace(held);
    }

    /// Takes a whole into use: first what the ports present and accept, then what is told of it, then who issues.
    pub(super) fn publish(
        &self,
        whole: &Whole,
        stored: Option<&Stored>,
    ) -> Result<(), tidewatch_shared::tls::TlsConfigError> {
        let Inner { events, tokens, enrolment, trust, authority, proxy, metrics, .. } = &*self.0;
        if let Some(proxy) = proxy {
            proxy.trust(whole.trust.clients.store()?)?;
        }
        events.store(whole.identity.config());
        tokens.store(whole.identity.config_for_tokens());
        enrolment.store(whole.identity.config_for_enrolment());
        metrics.serves(&whole.identity);
        trust.send_if_modified(|known| {
            let is_new = **known != whole.trust;
            if is_new {
                *known = Arc::new(whole.trust.clone());
            }
            is_new
        });
        if let Some(stored) = stored {
            metrics.root_until(stored.target().ca.not_after());
            if let Some(authority) = authority {
                authority.issue_by(stored.issuing().ca.clone());
            }
        }
        tracing::info!(
            certificate = whole.identity.fingerprint(),
            not_after = whole.identity.not_after(),
            agents_trust = whole.trust.agents.revision(),
            clients_trust = whole.trust.clients.revision(),
            issuer = whole.trust.issuer.as_ref().map(KeyId::as_str),
            phase = stored.map(|stored| stored.name().as_str()),
            "Certificates are in use"
        );
        Ok(())
    }
}

/// A new root.
pub(crate) fn make_root(validity: Duration, now: i64) -> Result<Root, Pki> {
    Root::new(super::Ca::generate(ROOT_NAME, now, validity)?).ok_or(Pki::NotCa)
}

/// A CA that ended while no receiver ran can sign nothing, not even this receiver's certificate: a new one takes its place.
async fn revived(store: &Store, mut kept: Kept, validity: Duration, now: i64) -> anyhow::Result<Kept> {
    while kept.stored.has_ended(now) {
        tracing::warn!(root = %kept.stored.target().id, "The CA has ended; a new one takes its place");
        let new = Stored::steady(make_root(validity, now)?, now);
        kept = match store.replace(&kept, &new).await? {
            Some(kept) => kept,
            None => store.read_or_create(|| Ok(new.clone())).await?,
        };
    }
    Ok(kept)
}
