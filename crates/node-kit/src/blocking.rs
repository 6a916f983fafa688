//! Blocking system calls on tokio's blocking threads, so that one slow disk does not delay other calls.

/// Runs `work` on a blocking thread.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let span = tracing::Span::current();
    match tokio::task::spawn_blocking(move || span.in_scope(work)).await {
        Ok(done) => done,
        // Blocking tasks are not cancelled, so the only possible error is a panic.
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
