#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| csi::fuzzing::csi_messages(data));
