//! Flags of the replicas.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use clap::Args;
use thiserror::Error;
use tidewatch_api::{replica::ReplicaName, shard::ShardCount};
use tidewatch_trust::ReplicaFiles;

/// Flags of the replicas.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Replicas")]
pub struct Flags {
    /// Listen address for the other replicas. With it, all replicas are active: they share the runtimes, and relay requests to
    /// each other over mTLS. Without it, one replica is active and the others stand by
    #[arg(long, env = "TIDEWATCH_RELAY_ADDRESS", value_name = "IP:PORT")]
    pub relay_address: Option<SocketAddr>,

    /// IP address at which the other replicas reach this one, such as the pod's; defaults to that of --relay-address
    #[arg(long, env = "TIDEWATCH_RELAY_ADVERTISE", value_name = "IP")]
    pub relay_advertise: Option<IpAddr>,

    /// Name of this replica, such as the pod's, unique among the replicas; required with --relay-address, else the host name by
    /// default
    #[arg(long, env = "TIDEWATCH_REPLICA_NAME", value_name = "NAME")]
    pub replica_name: Option<ReplicaName>,

    /// Number of shards into which the runtimes are divided, from 1 to 256 and the same for all replicas; a replica with another
    /// number than the live ones takes no shard. Defaults to 24 with --relay-address; without it, 1 is the only one
    #[arg(long, env = "TIDEWATCH_SHARDS", value_name = "NUMBER")]
    pub shards: Option<ShardCount>,

    /// PEM file with this replica's certificate for the other replicas, if this receiver does not issue certificates; the only
    /// URI in it is spiffe://<trust domain>/replica/<replica name>
    #[arg(long, env = "TIDEWATCH_RELAY_CERT", value_name = "FILE", requires_all = ["relay_key", "relay_ca"])]
    pub relay_cert: Option<PathBuf>,

    /// PEM file with the key of --relay-cert
    #[arg(long, env = "TIDEWATCH_RELAY_KEY", value_name = "FILE", requires = "relay_cert")]
    pub relay_key: Option<PathBuf>,

    /// PEM file with the roots of the certificates of all replicas
    #[arg(long, env = "TIDEWATCH_RELAY_CA", value_name = "FILE", requires = "relay_cert")]
    pub relay_ca: Option<PathBuf>,
}

/// The flags of the replicas contradict each other.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum FlagsError {
    /// The replica has no name.
    #[error("--relay-address needs --replica-name")]
    Name,
    /// One replica holds all shards.
    #[error("--shards {0} needs --relay-address: without it there is 1 shard")]
    Shards(ShardCount),
    /// Other replicas cannot connect to an unspecified address.
    #[error("the relay address {0} is no address to connect to, which needs --relay-advertise")]
    Advertise(IpAddr),
}

/// Settings of the replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaSettings {
    /// Number of shards.
    pub shards: ShardCount,
    /// Relay to the other replicas, with which this one shares the shards; `None` if it shares them with none.
    pub relay: Option<RelaySettings>,
}

/// Settings of a replica that relays requests to others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelaySettings {
    /// Name of this replica.
    pub name: ReplicaName,
    /// Listen address for the others.
    pub address: SocketAddr,
    /// IP address at which the others reach it.
    pub advertise: IpAddr,
    /// Its certificate; `None` if the issuer of the agents' certificates issues it.
    pub files: Option<ReplicaFiles>,
}

impl Flags {
    /// Settings of this replica.
    ///
    /// # Errors
    /// [`FlagsError`].
    pub fn settings(&self) -> Result<ReplicaSettings, FlagsError> {
        let relay = self.relay()?;
        let shards = self.shards.unwrap_or(if relay.is_some() { ShardCount::default() } else { ShardCount::ONE });
        if relay.is_none() && shards != ShardCount::ONE {
            return Err(FlagsError::Shards(shards));
        }
        Ok(ReplicaSettings { shards, relay })
    }

    fn relay(&self) -> Result<Option<RelaySettings>, FlagsError> {
        let Some(address) = self.relay_address else { return Ok(None) };
        let name = self.replica_name.clone().ok_or(FlagsError::Name)?;
        let advertise = self.relay_advertise.unwrap_or(address.ip());
        if advertise.is_unspecified() {
            return Err(FlagsError::Advertise(advertise));
        }
        let files = self.relay_cert.clone().zip(self.relay_key.clone()).zip(self.relay_ca.clone());
        let files = files.map(|((certificate, key), roots)| ReplicaFiles { certificate, key, roots });
        Ok(Some(RelaySettings { name, address, advertise, files }))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        flags: Flags,
    }

    fn parse(flags: &[&str]) -> Result<ReplicaSettings, String> {
        let command =
            Command::try_parse_from([&["receiver"], flags].concat()).map_err(|error| error.kind().to_string())?;
        command.flags.settings().map_err(|error| error.to_string())
    }

    #[test]
    fn replica_has_a_name_and_an_address_to_connect_to() {
        let alone = ReplicaSettings { shards: ShardCount::ONE, relay: None };
        assert_eq!(parse(&["--replica-name", "a", "--relay-advertise", "10.0.0.1"]), Ok(alone.clone()));
        assert_eq!(parse(&["--shards", "1"]), Ok(alone));
        let many = FlagsError::Shards(ShardCount::default());
        assert_eq!(parse(&["--shards", "24"]), Err(many.to_string()));
        let relay = ["--relay-address", "[::]:8445"];
        assert_eq!(parse(&relay), Err(FlagsError::Name.to_string()));
        let named = [&relay[..], &["--replica-name", "a"]].concat();
        assert_eq!(parse(&named), Err(FlagsError::Advertise("::".parse().unwrap()).to_string()));
        let settings = parse(&[&named[..], &["--relay-advertise", "10.0.0.1"]].concat()).unwrap();
        assert_eq!(settings.shards, ShardCount::default());
        let relay = settings.relay.unwrap();
        assert_eq!((relay.advertise, relay.files), ("10.0.0.1".parse().unwrap(), None));
        let local = ["--relay-address", "127.0.0.1:0", "--replica-name", "a", "--shards", "1"];
        let settings = parse(&local).unwrap();
        let relay = settings.relay.unwrap();
        assert_eq!((relay.advertise, settings.shards), (relay.address.ip(), ShardCount::ONE));
        for bad in [&["--replica-name", "A_"][..], &["--shards", "0"], &["--shards", "257"], &["--relay-cert", "f"]] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
