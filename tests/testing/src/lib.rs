//! Real control planes on one machine, with everything that the tests, the demo and the measurements need around them.
//!
//! * [`control_plane`]: finds or builds the binaries; starts etcd, API servers and optionally workloads.
//! * [`bed`]: one test bed of a KCP and any number of runtimes.
//! * [`landscape`]: receiver, runtimes and agents as processes on the test bed.
//! * [`artefacts`]: a read-only registry with every version of every component.
//! * [`demo`] and [`measure`]: implementation of `cargo demo` and `cargo measure`.
//! * [`product`]: builds and starts the product's own binaries.
//! * [`kubelet`]: runs the pods of the product's images as processes of the local binaries.
//! * [`fake`]: a light fake API server for thousands of runtimes.
//! * [`load`]: simulated agents by the thousand, with real keys, TLS and signatures.
//! * [`foreign_writer`]: users and programs that write the objects of modules, too.
//! * [`fuzz`]: invariants of every parser of untrusted bytes.
//! * `collector`, with the feature `otlp`: receives the traces that the programs export.
//! * [`limits`]: raises the limit of open files.
//! * [`contracts`]: contracts with tools and neighbours, as data.
//! * [`contract_client`]: a client of the wire contract, for valid and invalid requests.
//! * [`modules`]: the sample modules, whose operator the kubelet runs.
//! * [`registry`]: a real OCI registry with TLS and authentication, and a client of it.
//! * [`proxy`]: a TCP proxy on loopback that injects network faults.
//!
//! Every process started here ends with its owner, however that one ends; see [`process`].
//!
//! # Example
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let kcp = tidewatch_tests::bed::shared().await?.kcp().await?;
//! let client = kcp.client().await?;
//! # Ok(())
//! # }
//! ```

use std::process::ExitCode;

use anyhow::Context as _;

pub mod artefacts;
pub mod balancer;
pub mod bed;
#[cfg(feature = "otlp")]
pub mod collector;
pub mod contract_client;
pub mod contracts;
pub mod control_plane;
pub mod demo;
pub mod fake;
pub mod foreign_writer;
pub mod fuzz;
pub mod http;
pub mod kubelet;
pub mod landscape;
pub mod limits;
pub mod load;
pub mod measure;
pub mod modules;
pub mod paths;
pub mod ports;
pub mod process;
pub mod product;
pub mod progress;
pub mod proxy;
pub mod registry;

/// Installs the crypto provider for libraries that use the process's default. Later calls change nothing.
pub fn install_crypto() {
    // An error only means that one is installed already.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}

/// Runs a command to its end; prints its error on stderr and returns the exit code. Not async, so that the code of its
/// futures is generated once, in this library.
pub fn run_command(command: impl Future<Output = anyhow::Result<()>>) -> ExitCode {
    install_crypto();
    let ended =
        tokio::runtime::Runtime::new().context("build the runtime").and_then(|runtime| runtime.block_on(command));
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            progress::print_line(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}
