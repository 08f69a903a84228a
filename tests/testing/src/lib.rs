//! Real control planes on one machine, with everything that the tests, the demo and the measurements need around them.
//!
//! * [`control_plane`]: finds or builds the binaries; starts etcd, API servers and optionally workloads.
//! * [`bed`]: one test bed of a KCP and any number of runtimes.
//! * [`landscape`]: receiver, runtimes and agents as processes on the test bed.
//! * [`artefacts`]: the fake registry, with every version of every component.
//! * [`product`]: builds and starts the product's own binaries.
//! * [`kubelet`]: runs the pods of the product's images as processes of the local binaries.
//! * [`fake`]: a light fake API server for thousands of runtimes.
//! * [`load`]: simulated agents by the thousand, with real keys, TLS and signatures.
//! * [`foreign_writer`]: users and programs that write the objects of modules, too.
//! * `collector`, with the feature `otlp`: receives the traces that the programs export.
//! * [`limits`]: raises the limit of open files.
//! * [`contract_client`]: a client of the wire contract, for valid and invalid requests.
//! * [`modules`]: the sample modules, whose operator the kubelet runs.
//! * [`registry`]: a real OCI registry with TLS and authentication.
//! * [`stamps`]: the receiver's stamps of the events that enqueued a Kyma.
//! * [`proxy`]: a TCP proxy on loopback that injects network faults.
//!
//! Every process started here ends with its owner, however that one ends; see [`process`].
//!
//! # Example
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let kcp = tidewatch_testing::bed::shared().await?.kcp().await?;
//! let client = kcp.client().await?;
//! # Ok(())
//! # }
//! ```

pub mod artefacts;
pub mod balancer;
pub mod bed;
#[cfg(feature = "otlp")]
pub mod collector;
pub mod contract_client;
pub mod control_plane;
pub mod fake;
pub mod foreign_writer;
pub mod http;
pub mod kubelet;
pub mod landscape;
pub mod limits;
pub mod load;
pub mod modules;
pub mod paths;
pub mod ports;
pub mod process;
pub mod product;
pub mod progress;
pub mod proxy;
pub mod registry;
pub mod stamps;

/// Installs the crypto provider for libraries that use the process's default. Later calls change nothing.
pub fn install_crypto() {
    // An error only means that one is installed already.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}
