#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nestor_console::fuzzing::console_queries(data));
