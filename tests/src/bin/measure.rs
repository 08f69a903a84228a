//! `cargo measure`: figures of the whole system, one line of JSON each on stdout; progress on stderr.

fn main() -> std::process::ExitCode {
    tidewatch_tests::measure::main()
}
