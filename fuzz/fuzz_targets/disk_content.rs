#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| node_kit::fuzzing::disk_content(data));
