//! `storage-infra`: the server, its certificates, and its client, in one binary.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use storage_infra::cli::{self, Cli};

/// What stands still keeps its thread: a pool's filesystem one for each volume that is worked on, a machine a few. The rest
/// must go on.
const BLOCKING_THREADS: usize = 4096;

fn main() -> ExitCode {
    // An error means that a provider is set already.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let cli = Cli::parse();
    let run = || -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS)
            .build()?;
        let result = runtime.block_on(cli::run(cli));
        // A hypervisor's call that never returns must not keep the process: start-up finishes what it left.
        runtime.shutdown_background();
        result
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
