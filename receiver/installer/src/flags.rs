//! Flags of the installation of agents.

use std::{fmt, str::FromStr};

use clap::Args;
use thiserror::Error;
use tidewatch_api::{
    identity::TrustDomain,
    names::{AGENT_MEMORY_MIB, AGENT_PULL_SECRET},
};
use tidewatch_cluster::flags::object_name;

use super::{PublicUrl, upgrade};

/// Flags for the installation of agents.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Agents")]
pub struct Flags {
    /// Image of the agent to install in every runtime; without it no agents are installed, and a changed image is
    /// rolled out in stages
    #[arg(long, env = "TIDEWATCH_AGENT_IMAGE", value_parser = image, requires_all = ["receiver_url", "enrolment_url"])]
    pub agent_image: Option<String>,

    /// URL at which agents reach the event port: https://host:port
    #[arg(long, env = "TIDEWATCH_RECEIVER_URL", value_name = "URL")]
    pub receiver_url: Option<PublicUrl>,

    /// URL at which agents reach the enrolment port: https://host:port
    #[arg(long, env = "TIDEWATCH_ENROLMENT_URL", value_name = "URL")]
    pub enrolment_url: Option<PublicUrl>,

    /// Memory limit of an agent's container, in Mi or Gi; at least 64Mi
    #[arg(long, env = "TIDEWATCH_AGENT_MEMORY_LIMIT", default_value = "64Mi")]
    pub agent_memory_limit: MemoryLimit,

    /// Name of the agents' image pull secret in the receiver's namespace, which is copied to every runtime; defaults to
    /// --skr-image-pull-secret
    #[arg(long, env = "TIDEWATCH_AGENT_IMAGE_PULL_SECRET", value_parser = object_name)]
    pub agent_image_pull_secret: Option<String>,

    /// Ports of the runtimes' API servers, for the agents' NetworkPolicy
    #[arg(long, env = "TIDEWATCH_AGENT_API_SERVER_PORTS", value_delimiter = ',', default_value = "443,6443", value_parser = clap::value_parser!(u16).range(1..))]
    pub agent_api_server_ports: Vec<u16>,

    /// Keep an empty ValidatingWebhookConfiguration `skr-webhook` in each runtime, for tools that depend on it
    #[arg(long, env = "TIDEWATCH_COMPAT_WEBHOOK_CONFIGURATION", requires = "agent_image")]
    pub compat_webhook_configuration: bool,

    /// Stages of an upgrade.
    #[command(flatten)]
    pub upgrade: upgrade::Flags,
}

/// Settings of the installation, from [`Flags`].
#[derive(Clone, Debug)]
pub struct Settings {
    /// Image of the agent.
    pub image: String,
    /// Event port for agents.
    pub receiver: PublicUrl,
    /// Enrolment port for agents.
    pub enrolment: PublicUrl,
    /// Memory limit of the agent's container.
    pub memory: MemoryLimit,
    /// Image pull secret of the agent's Deployment.
    pub pull_secret: Option<AgentPullSecret>,
    /// Ports of the runtimes' API servers.
    pub api_server_ports: Vec<u16>,
    /// Keeps lifecycle-manager's webhook configuration, empty.
    pub compat_webhooks: bool,
    /// Trust domain of the certificates.
    pub trust_domain: TrustDomain,
}

/// Image pull secret of the agent's Deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentPullSecret {
    /// That of the modules, whose copy in each runtime has the name of the Secret in KCP.
    OfModules(String),
    /// One for the agent alone, with its name in KCP. Its copy in each runtime is named `tidewatch-agent-pull`.
    Own(String),
}

impl AgentPullSecret {
    /// Name of the Secret in a runtime.
    pub(super) fn name_in_runtime(&self) -> &str {
        match self {
            Self::OfModules(name) => name,
            Self::Own(_) => AGENT_PULL_SECRET,
        }
    }

    /// Name in KCP of the Secret that is copied for the agent alone.
    pub fn own(&self) -> Option<&str> {
        match self {
            Self::OfModules(_) => None,
            Self::Own(name) => Some(name),
        }
    }
}

impl Settings {
    /// Uses the image pull secret of the modules, unless the agents have another one.
    #[must_use]
    pub fn with_modules_pull_secret(mut self, of_modules: Option<&String>) -> Self {
        if let Some(of_modules) = of_modules
            && self.own_pull_secret().is_none_or(|own| own == of_modules)
        {
            self.pull_secret = Some(AgentPullSecret::OfModules(of_modules.clone()));
        }
        self
    }

    /// Name in KCP of the Secret that is copied for the agent alone.
    pub fn own_pull_secret(&self) -> Option<&str> {
        self.pull_secret.as_ref().and_then(AgentPullSecret::own)
    }
}

impl Flags {
    /// Returns the settings; `None` without an agent image, when no agents are installed.
    pub fn settings(&self, trust_domain: &TrustDomain) -> Option<Settings> {
        Some(Settings {
            image: self.agent_image.clone()?,
            receiver: self.receiver_url.clone()?,
            enrolment: self.enrolment_url.clone()?,
            memory: self.agent_memory_limit,
            pull_secret: self.agent_image_pull_secret.clone().map(AgentPullSecret::Own),
            api_server_ports: self.agent_api_server_ports.clone(),
            compat_webhooks: self.compat_webhook_configuration,
            trust_domain: trust_domain.clone(),
        })
    }
}

/// Failure to parse a [`MemoryLimit`].
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ParseMemoryLimitError {
    /// Not a whole number of Mi or Gi.
    #[error("not a whole number of Mi or Gi")]
    Quantity,
    /// Less than an agent needs.
    #[error("an agent needs {AGENT_MEMORY_MIB}Mi or more")]
    TooLittle,
}

/// Memory limit of a container in MiB, displayed as a canonical Kubernetes quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemoryLimit(u32);

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_multiple_of(1024) { write!(f, "{}Gi", self.0 / 1024) } else { write!(f, "{}Mi", self.0) }
    }
}

impl FromStr for MemoryLimit {
    type Err = ParseMemoryLimitError;

    fn from_str(text: &str) -> Result<Self, ParseMemoryLimitError> {
        let in_unit = |suffix: &str, unit: u32| text.strip_suffix(suffix)?.parse::<u32>().ok()?.checked_mul(unit);
        let mebibytes = in_unit("Mi", 1).or_else(|| in_unit("Gi", 1_024)).ok_or(ParseMemoryLimitError::Quantity)?;
        if mebibytes < AGENT_MEMORY_MIB { Err(ParseMemoryLimitError::TooLittle) } else { Ok(Self(mebibytes)) }
    }
}

/// Parses an image reference that a pod spec accepts; the registry validates the rest.
fn image(text: &str) -> Result<String, &'static str> {
    is_image(text).then(|| text.to_owned()).ok_or("not an image reference")
}

/// Returns whether a text can be an image reference: at most 512 printable ASCII characters without spaces.
pub(super) fn is_image(text: &str) -> bool {
    (1..=512).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        flags: Flags,
    }

    fn parse(line: &[&str]) -> Result<Flags, clap::Error> {
        Cli::try_parse_from(["x"].iter().chain(line)).map(|line| line.flags)
    }

    /// Also `acceptance.md` C1 32: the agents get the image pull secret of the modules.
    #[test]
    fn agent_image_requires_receiver_and_enrolment_urls() {
        let urls = ["--receiver-url", "https://a:1", "--enrolment-url", "https://a:2"];
        let domain = "kyma.local".parse().unwrap();
        assert!(parse(&[]).unwrap().settings(&domain).is_none());
        assert!(parse(&urls).unwrap().settings(&domain).is_none());
        assert!(parse(&["--agent-image", "r/agent:1"]).is_err());
        assert!(parse(&["--compat-webhook-configuration"]).is_err());
        let settings =
            parse(&[&urls[..], &["--agent-image", "r/agent:1"]].concat()).unwrap().settings(&domain).unwrap();
        assert_eq!((settings.image.as_str(), settings.enrolment.port()), ("r/agent:1", 2));
        assert_eq!((settings.memory.to_string().as_str(), settings.api_server_ports), ("64Mi", vec![443, 6443]));
        let modules = "modules".to_owned();
        let of = |name: &'static str| ["--agent-image-pull-secret", name];
        for (own, of_modules, used) in [
            (&[][..], None, None),
            (&[], Some(&modules), Some(AgentPullSecret::OfModules(modules.clone()))),
            (&of("modules"), Some(&modules), Some(AgentPullSecret::OfModules(modules.clone()))),
            (&of("own"), Some(&modules), Some(AgentPullSecret::Own("own".to_owned()))),
            (&of("own"), None, Some(AgentPullSecret::Own("own".to_owned()))),
        ] {
            let flags = parse(&[&urls[..], &["--agent-image", "r/agent:1"], own].concat()).unwrap();
            let settings = flags.settings(&domain).unwrap().with_modules_pull_secret(of_modules);
            assert_eq!(settings.pull_secret, used);
        }
        for bad in [["--agent-image", "a b"], ["--agent-image-pull-secret", "A"], ["--agent-api-server-ports", "0"]] {
            assert!(parse(&[&urls[..], &bad].concat()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn memory_limit_has_the_canonical_quantity_form() {
        for (text, written) in [("64Mi", "64Mi"), ("1024Mi", "1Gi"), ("1Gi", "1Gi"), ("1536Mi", "1536Mi")] {
            assert_eq!(text.parse::<MemoryLimit>().unwrap().to_string(), written);
        }
        assert_eq!("63Mi".parse::<MemoryLimit>(), Err(ParseMemoryLimitError::TooLittle));
        for bad in ["64", "64M", "Mi", "-1Gi", "4194304Gi"] {
            assert_eq!(bad.parse::<MemoryLimit>(), Err(ParseMemoryLimitError::Quantity), "{bad}");
        }
    }
}
