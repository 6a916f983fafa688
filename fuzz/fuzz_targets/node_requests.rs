#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gc_csi_node::fuzzing::node_requests(data));
