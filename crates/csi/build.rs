//! Compiles the protocol definitions without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let definitions = protox::compile(["proto/csi.proto", "proto/registration.proto"], ["proto"])?;
    tonic_prost_build::configure()
        // Methods that a driver does not implement return UNIMPLEMENTED.
        .generate_default_stubs(true)
        .codec_path("crate::codec::CsiCodec")
        .compile_fds(definitions)?;
    Ok(())
}
