#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tidewatch_tests::fuzz::layer(data));
