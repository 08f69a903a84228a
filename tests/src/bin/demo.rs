//! `cargo demo`: the main job on real control planes.

fn main() -> std::process::ExitCode {
    tidewatch_tests::demo::main()
}
