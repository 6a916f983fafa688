//! Connection pool for a libvirt daemon.

use std::sync::{Arc, Mutex, Once, PoisonError};

use uuid::Uuid;
use virt::connect::Connect;
use virt::error::Error;

use super::Session;
use super::xml::host_uuid;
use crate::hypervisor::{HypervisorError, Result};
use crate::lease::Lease;

/// Maximum number of idle connections kept open.
const MAX_IDLE: usize = 8;

/// Connection pool of a daemon. Each call has its own connection: libvirt limits the concurrent requests of a
/// connection, so a hanging call would block the others.
pub(super) struct Connections {
    uri: String,
    /// Of the server that makes the calls.
    lease: Lease,
    /// Idle connections.
    idle: Arc<Mutex<Vec<Open>>>,
}

/// An open connection, with the UUID of its host.
struct Open {
    connection: Connect,
    host: Option<Uuid>,
}

impl Connections {
    pub(super) fn new(uri: &str, lease: Lease) -> Self {
        Self { uri: uri.to_owned(), lease, idle: Arc::default() }
    }

    pub(super) fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Runs blocking calls on a live connection; opens one if necessary.
    pub(super) async fn run<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Session) -> Result<T> + Send + 'static,
    {
        let (uri, lease, idle) = (self.uri.clone(), self.lease.clone(), self.idle.clone());
        let task = tokio::task::spawn_blocking(move || {
            let Open { connection, host } = connect(&uri, &idle)?;
            let session = Session { connection, uri, host, lease };
            let result = work(&session);
            let mut idle = idle.lock().unwrap_or_else(PoisonError::into_inner);
            // A lost connection is not reused.
            if idle.len() < MAX_IDLE && !matches!(result, Err(HypervisorError::Unreachable(_))) {
                idle.push(Open { connection: session.connection, host });
            }
            result
        });
        task.await.unwrap_or_else(|e| {
            Err(HypervisorError::Uncertain(format!("a libvirt call panicked or was cancelled: {e}")))
        })
    }

    #[cfg(test)]
    pub(super) fn idle(&self) -> usize {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// A live connection: an idle one or a new one.
fn connect(uri: &str, idle: &Mutex<Vec<Open>>) -> Result<Open> {
    start_event_loop();
    let take = || idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
    while let Some(open) = take() {
        if open.connection.is_alive().unwrap_or(false) {
            return Ok(open);
        }
    }
    let unreachable = |e: Error| HypervisorError::Unreachable(format!("libvirt at {uri}: {}", e.message()));
    let fresh = Connect::open(Some(uri)).map_err(unreachable)?;
    // Some drivers have no keep-alive; their connections are local and fail on their own.
    if let Err(error) = fresh.set_keep_alive(5, 3) {
        tracing::debug!(%error, %uri, "the libvirt connection has no keep-alive");
    }
    let capabilities = fresh.capabilities().map_err(unreachable)?;
    let host = host_uuid(&capabilities);
    tracing::info!(%uri, ?host, "connected to libvirt");
    Ok(Open { connection: fresh, host })
}

static EVENTS: Once = Once::new();

/// Starts libvirt's event loop, which sends the keep-alives that distinguish a dead connection from a slow one.
fn start_event_loop() {
    EVENTS.call_once(|| {
        // Callers report their errors; by default libvirt also prints each to stderr.
        virt::error::clear_error_callback();
        if let Err(error) = virt::event::event_register_default_impl() {
            tracing::warn!(%error, "cannot register libvirt's event loop: dead connections are detected late");
            return;
        }
        let run = || {
            loop {
                if let Err(error) = virt::event::event_run_default_impl() {
                    tracing::warn!(%error, "libvirt's event loop failed");
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("libvirt-events".into()).spawn(run) {
            tracing::warn!(%error, "cannot start libvirt's event loop");
        }
    });
}
