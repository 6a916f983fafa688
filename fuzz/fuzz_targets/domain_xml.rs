#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| storage_infra::fuzzing::domain_xml(data));
