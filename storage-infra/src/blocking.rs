//! Blocking work on threads of its own.

use tokio::task::JoinError;

/// Runs blocking work. It runs to its end even if the caller does not wait. In a simulation, it runs on its one thread.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    #[cfg(test)]
    if let Some(sim) = crate::simulation::current() {
        return tokio::spawn(async move {
            sim.delay().await;
            work()
        })
        .await;
    }
    tokio::task::spawn_blocking(work).await
}
