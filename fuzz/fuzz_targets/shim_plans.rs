#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vm_operator_shim::fuzzing::shim_plans(data));
