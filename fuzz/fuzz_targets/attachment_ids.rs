#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| mgmt_csi::fuzzing::attachment_ids(data));
