#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| process_kit::fuzzing::texts(data));
