#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| storage_infra::fuzzing::records(data));
