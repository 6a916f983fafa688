#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gc_csi::fuzzing::virtual_machines(data));
