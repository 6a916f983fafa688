//! The `storage-infra` program: server, certificate tool and command-line client.

use std::io::Write;
use std::process::ExitCode;

use storage_infra::cli::{self, Cli};

/// Size of the blocking thread pool. A stalled filesystem blocks one thread per volume in use and a stalled domain a
/// few; the limit leaves threads for all other work.
const BLOCKING_THREADS: usize = 4096;

fn main() -> ExitCode {
    // An error means that a crypto provider is already installed.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let cli = Cli::read();
    let run = || -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS)
            .build()?;
        let result = runtime.block_on(cli::run(cli));
        // Do not wait for hypervisor calls that never return: recovery at the next start completes their work.
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
