#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| infra_api::fuzzing::infra_bodies(data));
