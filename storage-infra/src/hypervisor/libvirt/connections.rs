//! Connections to a libvirt daemon, and whose turn it is.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Once, PoisonError};

use tokio::sync::OwnedMutexGuard;
use uuid::Uuid;
use virt::connect::Connect;
use virt::error::Error;

use super::Session;
use super::xml::host_uuid;
use crate::hypervisor::{HypervisorError, Result};

/// How many connections are kept open while nobody uses them.
const KEPT: usize = 8;

/// Connections to a daemon. Each call has one to itself: libvirt takes only a few requests at once of each, so one that
/// hangs would keep the others waiting.
pub(super) struct Connections {
    uri: String,
    /// Those that nobody uses now.
    idle: Arc<Mutex<Vec<Open>>>,
}

/// An open connection, and the host that it is to.
struct Open {
    connection: Connect,
    host: Option<Uuid>,
}

impl Connections {
    pub(super) fn new(uri: &str) -> Self {
        Self { uri: uri.to_owned(), idle: Arc::default() }
    }

    /// Runs blocking calls with a connection that lives, opening one where needed.
    pub(super) async fn run<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Session) -> Result<T> + Send + 'static,
    {
        let (uri, idle) = (self.uri.clone(), self.idle.clone());
        let task = tokio::task::spawn_blocking(move || {
            let Open { connection, host } = connect(&uri, &idle)?;
            let session = Session { connection, uri, host };
            let result = work(&session);
            let mut idle = idle.lock().unwrap_or_else(PoisonError::into_inner);
            // One that is lost is not used again.
            if idle.len() < KEPT && !matches!(result, Err(HypervisorError::Unreachable(_))) {
                idle.push(Open { connection: session.connection, host });
            }
            result
        });
        task.await
            .unwrap_or_else(|e| Err(HypervisorError::Uncertain(format!("a libvirt call broke off: {e}"))))
    }

    #[cfg(test)]
    pub(super) fn idle(&self) -> usize {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// A connection that lives: one that is idle, or a new one.
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
    // Some drivers have no keep-alive; their connections are local and break by themselves.
    if let Err(error) = fresh.set_keep_alive(5, 3) {
        tracing::debug!(%error, %uri, "no keep-alive");
    }
    let capabilities = fresh.capabilities().map_err(unreachable)?;
    let host = host_uuid(&capabilities);
    tracing::info!(%uri, ?host, "connected to libvirt");
    Ok(Open { connection: fresh, host })
}

/// Whose turn it is with a machine.
#[derive(Default)]
pub(super) struct Turns(Mutex<HashMap<Uuid, Arc<tokio::sync::Mutex<()>>>>);

impl Turns {
    /// Waits for it.
    pub(super) async fn wait(&self, node: Uuid) -> OwnedMutexGuard<()> {
        let turns = self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(node).or_default().clone();
        turns.lock_owned().await
    }
}

static EVENTS: Once = Once::new();

/// Runs libvirt's event loop, which sends the keep-alives that tell a dead connection from a slow one.
fn start_event_loop() {
    EVENTS.call_once(|| {
        // Errors are told by whoever gets them; libvirt would print each to the process's own output besides.
        virt::error::clear_error_callback();
        if let Err(error) = virt::event::event_register_default_impl() {
            tracing::warn!(%error, "libvirt has no event loop: dead connections are noticed late");
            return;
        }
        let run = || {
            loop {
                if let Err(error) = virt::event::event_run_default_impl() {
                    tracing::warn!(%error, "libvirt's event loop");
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("libvirt-events".into()).spawn(run) {
            tracing::warn!(%error, "libvirt's event loop cannot be started");
        }
    });
}
