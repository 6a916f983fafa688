//! Compiles the protocol definitions without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let definitions = protox::compile(["proto/csi.proto", "proto/registration.proto"], ["proto"])?;
    // Methods that a driver does not implement return UNIMPLEMENTED.
    tonic_prost_build::configure().generate_default_stubs(true).compile_fds(definitions)?;
    Ok(())
}
