//! Process setup for `main`: crypto provider, logs, runtime, signals and exit code.

use std::fmt::Display;
use std::future::Future;
use std::io;
use std::process::ExitCode;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::supervise;
use crate::telemetry::{self, LogArgs, SpanExport};

/// Time for a program to stop after a failure, and for blocking calls to return.
const GRACE: Duration = Duration::from_secs(5);

/// Runs `app` on `threads` worker threads until it returns. SIGTERM and SIGINT cancel its token. An error of `app`, or the
/// failure of a [supervised task](supervise), is printed in one line and results in exit code 1.
pub fn run<App, Running, Error>(logs: &LogArgs, threads: usize, app: App) -> ExitCode
where
    App: FnOnce(CancellationToken) -> Running,
    Running: Future<Output = Result<(), Error>>,
    Error: Display,
{
    run_traced(logs, || Ok(None), threads, app)
}

/// Like [`run`], with an exporter of spans. `spans` is called within the runtime; its error is one of the command line.
pub fn run_traced<App, Running, Error>(
    logs: &LogArgs,
    spans: impl FnOnce() -> Result<Option<SpanExport>, String>,
    threads: usize,
    app: App,
) -> ExitCode
where
    App: FnOnce(CancellationToken) -> Running,
    Running: Future<Output = Result<(), Error>>,
    Error: Display,
{
    // Fails only if a provider is already installed.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime =
        match tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return fail(format!("failed to start the async runtime: {error}"), 1),
        };
    let flush = match runtime.block_on(async { start_telemetry(logs, spans()?) }) {
        Ok(flush) => flush,
        Err(problem) => return fail(problem, 2),
    };
    let outcome = runtime.block_on(async {
        let outcome = run_until_failure(app).await;
        flush.await;
        outcome
    });
    match outcome {
        // Dropping the runtime waits for blocking calls that are in progress.
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // After a failure, a hung call must not prevent the restart, which completes what was left.
            runtime.shutdown_timeout(GRACE);
            fail(error, 1)
        }
    }
}

/// Starts the logs, and returns what exports the last spans.
fn start_telemetry(logs: &LogArgs, spans: Option<SpanExport>) -> Result<BoxFuture<'static, ()>, String> {
    let (layer, flush) = spans.map(|spans| (spans.layer, spans.flush)).unzip();
    telemetry::init(logs, layer)?;
    Ok(flush.unwrap_or_else(|| Box::pin(std::future::ready(()))))
}

/// Runs `app` until it returns, or until a supervised task fails.
async fn run_until_failure<App, Running, Error>(app: App) -> Result<(), String>
where
    App: FnOnce(CancellationToken) -> Running,
    Running: Future<Output = Result<(), Error>>,
    Error: Display,
{
    let stop = CancellationToken::new();
    let signals = tokio::spawn(cancel_on_signal(stop.clone()));
    let mut app = std::pin::pin!(app(stop.clone()));
    let outcome = tokio::select! {
        outcome = &mut app => outcome.map_err(|error| format!("{error:#}")),
        failure = supervise::failure() => {
            stop.cancel();
            let _ = tokio::time::timeout(GRACE, app).await;
            Err(failure)
        }
    };
    signals.abort();
    outcome
}

fn fail(problem: impl Display, code: u8) -> ExitCode {
    // Some errors have several lines.
    let problem = problem.to_string();
    let lines: Vec<&str> = problem.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    eprintln!("error: {}", lines.join(" "));
    ExitCode::from(code)
}

/// Waits for SIGTERM or SIGINT, and returns its name.
pub async fn stop_signal() -> io::Result<&'static str> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    })
}

async fn cancel_on_signal(stop: CancellationToken) {
    let Ok(signal) = stop_signal().await else {
        tracing::error!(
            "failed to install signal handlers: SIGTERM will not shut the process down gracefully"
        );
        return;
    };
    tracing::info!(signal, "stopping");
    stop.cancel();
}
