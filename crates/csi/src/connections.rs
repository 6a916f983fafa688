//! Connection management of a driver's socket: closes unused connections.
//!
//! A sidecar keeps one connection for its lifetime, may be idle for hours, and exits when it loses the connection
//! (csi-lib-utils: no idle timeout, `ExitOnConnectionLoss`). Connections with calls are therefore not closed for being idle,
//! nor because others open many. The driver closes connections that never sent a byte or never made a call and, if there
//! are more connections with calls than sidecars could have, the newest idle ones. It never closes one with a running call.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

/// Limits on connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// How long a connection may be open without sending anything.
    pub(crate) silent: Duration,
    /// Maximum number of connections with calls, idle ones included.
    pub(crate) max: usize,
    /// Time since its last call after which a connection is idle.
    pub(crate) idle: Duration,
    /// Interval of the check.
    pub(crate) interval: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { silent: seconds(10), max: 64, idle: seconds(60), interval: seconds(5) }
    }
}

/// Open connections.
#[derive(Debug, Clone, Default)]
pub(crate) struct Connections(Arc<Mutex<Vec<Weak<Peer>>>>);

/// Connection of a call, as an extension of the request.
#[derive(Debug, Clone)]
pub(crate) struct Caller(Arc<Peer>);

#[derive(Debug)]
pub(crate) struct Peer {
    state: Mutex<State>,
    close: CancellationToken,
}

/// State of a connection.
#[derive(Debug, Clone, Copy)]
struct State {
    /// Whether data was received.
    received_data: bool,
    /// Whether a call was made.
    called: bool,
    /// Number of running calls.
    calls: usize,
    /// When the connection was opened.
    opened: Instant,
    /// When its last call ended, or when it was opened.
    last: Instant,
}

/// A connection that the driver can close.
pub(crate) struct Connection {
    stream: UnixStream,
    peer: Arc<Peer>,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
}

/// A running call; ends on drop.
pub(crate) struct RunningCall(Arc<Peer>);

impl Connections {
    /// Registers a connection.
    pub(crate) fn open(&self, stream: UnixStream) -> Connection {
        let now = Instant::now();
        let state = State { received_data: false, called: false, calls: 0, opened: now, last: now };
        let close = CancellationToken::new();
        let closed = Box::pin(close.clone().cancelled_owned());
        let peer = Arc::new(Peer { state: Mutex::new(state), close });
        lock(&self.0).push(Arc::downgrade(&peer));
        Connection { stream, peer, closed }
    }

    /// Closes surplus connections while it is polled.
    pub(crate) async fn close_surplus(&self, limits: Limits) -> std::convert::Infallible {
        loop {
            tokio::time::sleep(limits.interval).await;
            let peers = self.peers();
            let seen: Vec<State> = peers.iter().map(|peer| *lock(&peer.state)).collect();
            let surplus = surplus(&seen, limits, Instant::now());
            if !surplus.is_empty() {
                tracing::info!(open = peers.len(), closed = surplus.len(), "closed idle connections");
            }
            surplus.into_iter().for_each(|at| peers[at].close.cancel());
        }
    }

    /// Open connections.
    pub(crate) fn peers(&self) -> Vec<Arc<Peer>> {
        let mut all = lock(&self.0);
        all.retain(|peer| peer.strong_count() > 0);
        all.iter().filter_map(Weak::upgrade).filter(|peer| !peer.close.is_cancelled()).collect()
    }
}

/// Indices of the connections to close.
fn surplus(seen: &[State], limits: Limits, now: Instant) -> Vec<usize> {
    let for_long = |one: &State, time| one.calls == 0 && now.duration_since(one.last) >= time;
    let is_useless = |one: &State| match (one.received_data, one.called) {
        (_, true) => false,
        (true, false) => for_long(one, limits.idle),
        (false, false) => for_long(one, limits.silent),
    };
    let callers = seen.iter().filter(|one| one.called).count();
    let mut idle: Vec<usize> =
        (0..seen.len()).filter(|at| seen[*at].called && for_long(&seen[*at], limits.idle)).collect();
    idle.sort_by_key(|at| std::cmp::Reverse(seen[*at].opened));
    idle.truncate(callers.saturating_sub(limits.max));
    (0..seen.len()).filter(|at| is_useless(&seen[*at])).chain(idle).collect()
}

impl Caller {
    /// Registers the start of a call.
    pub(crate) fn begin(&self) -> RunningCall {
        let mut state = lock(&self.0.state);
        state.called = true;
        state.calls += 1;
        RunningCall(self.0.clone())
    }
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.calls -= 1;
        state.last = Instant::now();
    }
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        Caller(self.peer.clone())
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Report end of file, as if the peer had closed the connection.
        if self.closed.as_mut().poll(context).is_ready() {
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            lock(&self.peer.state).received_data = true;
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        silent: Duration::from_secs(10),
        max: 2,
        idle: Duration::from_secs(60),
        interval: Duration::from_secs(5),
    };

    #[test]
    fn connections_with_calls_are_kept_and_the_newest_idle_ones_above_the_limit_are_closed() {
        let now = Instant::now() + Duration::from_secs(1000);
        let ago = |seconds| now.checked_sub(Duration::from_secs(seconds)).unwrap();
        let caller = |opened, calls, last| State {
            received_data: true,
            called: true,
            calls,
            opened: ago(opened),
            last: ago(last),
        };
        let other = |received_data, opened| State {
            received_data,
            called: false,
            calls: 0,
            ..caller(opened, 0, opened)
        };
        let sidecars = [caller(900, 0, 900), caller(900, 0, 800)];
        assert!(surplus(&sidecars, LIMITS, now).is_empty());
        // 500 connections without calls, before and after their time limit.
        for (received_data, late) in [(false, 10), (true, 60)] {
            let mut many = sidecars.to_vec();
            many.extend([other(received_data, late - 1); 500]);
            assert!(surplus(&many, LIMITS, now).is_empty());
            many[2..].fill(other(received_data, late));
            assert_eq!(surplus(&many, LIMITS, now), (2..502).collect::<Vec<_>>());
        }
        // Too many connections with calls: the oldest and the active ones are kept.
        let mut many = sidecars.to_vec();
        many.extend([caller(500, 0, 100), caller(400, 1, 400), caller(300, 0, 70), caller(200, 0, 59)]);
        assert_eq!(surplus(&many, Limits { max: 4, ..LIMITS }, now), [4, 2]);
    }
}
