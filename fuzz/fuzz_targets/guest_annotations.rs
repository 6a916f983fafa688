#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gc_csi::fuzzing::guest_annotations(data));
