#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| mgmt_csi::fuzzing::management_requests(data));
