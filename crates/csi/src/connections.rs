//! The connections of a driver's socket, and which of them are closed by the driver.
//!
//! A sidecar holds one connection for as long as it lives, may say nothing on it for hours, and ends itself when it loses
//! it (csi-lib-utils: no idle timeout, `ExitOnConnectionLoss`). So one on which anything was called is not closed only
//! because it is idle, nor because others open many. Closed are those on which nobody ever spoke, and those on which
//! nothing was ever called; and, of more callers than any set of sidecars is, the idle ones that came last. One with a call
//! under way never is.

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

/// What is put up with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// For how long a connection may be open without a word.
    pub(crate) silent: Duration,
    /// How many connections of callers are left open however idle they are.
    pub(crate) most: usize,
    /// For how long one has no call before it is idle.
    pub(crate) idle: Duration,
    /// How often is looked.
    pub(crate) look: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { silent: seconds(10), most: 64, idle: seconds(60), look: seconds(5) }
    }
}

/// The open connections.
#[derive(Debug, Clone, Default)]
pub(crate) struct Connections(Arc<Mutex<Vec<Weak<Peer>>>>);

/// The other end of a connection, as a request's extension.
#[derive(Debug, Clone)]
pub(crate) struct Caller(Arc<Peer>);

#[derive(Debug)]
pub(crate) struct Peer {
    seen: Mutex<Seen>,
    close: CancellationToken,
}

/// What was seen of a connection.
#[derive(Debug, Clone, Copy)]
struct Seen {
    /// Whether anything came.
    spoke: bool,
    /// Whether anything was called.
    called: bool,
    /// How many calls are under way.
    calls: usize,
    /// When it was opened.
    opened: Instant,
    /// When it was opened, or its last call ended.
    last: Instant,
}

/// A connection that can be closed from outside.
pub(crate) struct Connection {
    stream: UnixStream,
    peer: Arc<Peer>,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
}

/// A call under way, until it is dropped.
pub(crate) struct UnderWay(Arc<Peer>);

impl Connections {
    /// Takes note of a connection.
    pub(crate) fn open(&self, stream: UnixStream) -> Connection {
        let now = Instant::now();
        let seen = Seen { spoke: false, called: false, calls: 0, opened: now, last: now };
        let close = CancellationToken::new();
        let closed = Box::pin(close.clone().cancelled_owned());
        let peer = Arc::new(Peer { seen: Mutex::new(seen), close });
        lock(&self.0).push(Arc::downgrade(&peer));
        Connection { stream, peer, closed }
    }

    /// Closes connections as long as it is polled.
    pub(crate) async fn close_surplus(&self, limits: Limits) -> std::convert::Infallible {
        loop {
            tokio::time::sleep(limits.look).await;
            let peers = self.peers();
            let seen: Vec<Seen> = peers.iter().map(|peer| *lock(&peer.seen)).collect();
            let surplus = surplus(&seen, limits, Instant::now());
            if !surplus.is_empty() {
                tracing::info!(open = peers.len(), closed = surplus.len(), "idle connections closed");
            }
            surplus.into_iter().for_each(|at| peers[at].close.cancel());
        }
    }

    /// Those that are open.
    pub(crate) fn peers(&self) -> Vec<Arc<Peer>> {
        let mut all = lock(&self.0);
        all.retain(|peer| peer.strong_count() > 0);
        all.iter().filter_map(Weak::upgrade).filter(|peer| !peer.close.is_cancelled()).collect()
    }
}

/// Which connections are closed.
fn surplus(seen: &[Seen], limits: Limits, now: Instant) -> Vec<usize> {
    let for_long = |one: &Seen, time| one.calls == 0 && now.duration_since(one.last) >= time;
    let is_useless = |one: &Seen| match (one.spoke, one.called) {
        (_, true) => false,
        (true, false) => for_long(one, limits.idle),
        (false, false) => for_long(one, limits.silent),
    };
    let callers = seen.iter().filter(|one| one.called).count();
    let mut idle: Vec<usize> =
        (0..seen.len()).filter(|at| seen[*at].called && for_long(&seen[*at], limits.idle)).collect();
    idle.sort_by_key(|at| std::cmp::Reverse(seen[*at].opened));
    idle.truncate(callers.saturating_sub(limits.most));
    (0..seen.len()).filter(|at| is_useless(&seen[*at])).chain(idle).collect()
}

impl Caller {
    /// A call begins.
    pub(crate) fn begin(&self) -> UnderWay {
        let mut seen = lock(&self.0.seen);
        seen.called = true;
        seen.calls += 1;
        UnderWay(self.0.clone())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut seen = lock(&self.0.seen);
        seen.calls -= 1;
        seen.last = Instant::now();
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
        // As if the other end had closed it.
        if self.closed.as_mut().poll(context).is_ready() {
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            lock(&self.peer.seen).spoke = true;
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
        most: 2,
        idle: Duration::from_secs(60),
        look: Duration::from_secs(5),
    };

    #[test]
    fn callers_are_kept_whatever_others_open_and_the_last_of_too_many_are_closed() {
        let now = Instant::now() + Duration::from_secs(1000);
        let ago = |seconds| now.checked_sub(Duration::from_secs(seconds)).unwrap();
        let caller = |opened, calls, last| Seen {
            spoke: true,
            called: true,
            calls,
            opened: ago(opened),
            last: ago(last),
        };
        let other = |spoke, opened| Seen { spoke, called: false, calls: 0, ..caller(opened, 0, opened) };
        let sidecars = [caller(900, 0, 900), caller(900, 0, 800)];
        assert!(surplus(&sidecars, LIMITS, now).is_empty());
        // Five hundred that come and never call, while they may and when they are closed.
        for (spoke, late) in [(false, 10), (true, 60)] {
            let mut many = sidecars.to_vec();
            many.extend([other(spoke, late - 1); 500]);
            assert!(surplus(&many, LIMITS, now).is_empty());
            many[2..].fill(other(spoke, late));
            assert_eq!(surplus(&many, LIMITS, now), (2..502).collect::<Vec<_>>());
        }
        // Too many that did call: not the first, not those that are not idle.
        let mut many = sidecars.to_vec();
        many.extend([caller(500, 0, 100), caller(400, 1, 400), caller(300, 0, 70), caller(200, 0, 59)]);
        assert_eq!(surplus(&many, Limits { most: 4, ..LIMITS }, now), [4, 2]);
    }
}
