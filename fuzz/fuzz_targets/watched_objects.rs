#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kube_kit::fuzzing::watched_objects(data));
