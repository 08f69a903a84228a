//! Invariants of every parser of untrusted bytes, for `cargo test` and for the fuzz targets. Tests of whole systems are in
//! `tests/tests`.

pub mod fuzz;
