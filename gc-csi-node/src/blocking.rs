//! System calls that can block run on their own threads, so that a slow disk never stops the others.

/// Runs `work` on a thread that may block.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        // Blocking work is never cancelled, so what is left is its panic: passed on.
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
