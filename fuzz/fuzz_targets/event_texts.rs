#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kube_kit::fuzzing::event_texts(data));
