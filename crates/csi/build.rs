//! Compiles the protocol definitions, without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let definitions = protox::compile(["proto/csi.proto", "proto/registration.proto"], ["proto"])?;
    // A method that a driver doesn't announce answers UNIMPLEMENTED by itself.
    tonic_prost_build::configure().generate_default_stubs(true).compile_fds(definitions)?;
    Ok(())
}
