#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kubectl_nestor::fuzzing::plugin_config(data));
