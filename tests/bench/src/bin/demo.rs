//! `cargo demo`: the main use case on real control planes.

fn main() -> std::process::ExitCode {
    tidewatch_bench::demo::main()
}
