//! `cargo measure`: figures of the whole system, one line of JSON each on stdout; progress on stderr.

/// The allocator of the receiver: plain servers, whose memory is a floor of the receiver's, run in this program as well.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> std::process::ExitCode {
    tidewatch_bench::measure::main()
}
