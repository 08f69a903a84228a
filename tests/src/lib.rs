//! Real control planes on one machine, and what the tests, the demo and the measurements need around them.
//!
//! * [`control_plane`]: finds or builds the binaries, starts etcd, API servers and, where asked, workloads.
//! * [`bed`]: one test bed of a KCP and any number of runtimes.
//! * [`product`]: builds and starts the product's own binaries.
//! * [`proxy`]: a TCP proxy on loopback that delays, cuts and black-holes.
//!
//! Every process started here ends with the one that started it, however that one ends; see [`process`].

pub mod bed;
pub mod control_plane;
pub mod http;
pub mod paths;
pub mod ports;
pub mod process;
pub mod product;
pub mod progress;
pub mod proxy;
