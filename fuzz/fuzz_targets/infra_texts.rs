#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| storage_infra::fuzzing::infra_texts(data));
