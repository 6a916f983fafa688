//! TCP proxy between one of our programs and an API server or storage-infra, which injects network faults.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch::{Receiver, Sender};
use tokio::task::{JoinHandle, JoinSet};

use crate::program::Controller;
use crate::scenario::GUEST;
use crate::{PATIENCE, Scenario, eventually};

/// Minimum size of a read that counts as a response or watch event; smaller reads are keep-alives and acknowledgements.
const RESPONSE: usize = 300;
/// Minimum size of a read from a client that counts as a request.
const REQUEST: usize = 50;
/// A connection without responses for this long is idle.
const QUIET: Duration = Duration::from_millis(300);
/// Size of the read buffers.
const CHUNK: usize = 16 << 10;

/// State of the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Cut,
    Stalled,
    Slow(Duration),
    Resetting,
    LosingWatches,
}

/// Observations of the traffic.
#[derive(Debug)]
struct Traffic {
    /// Time of the server's last response or event.
    last_response: Mutex<Instant>,
    /// Number of connections lost in [`State::LosingWatches`].
    lost: AtomicUsize,
}

/// A proxy to a server. It starts open; when this is dropped, it stops listening.
pub struct TcpProxy {
    address: SocketAddr,
    state: Arc<Sender<State>>,
    traffic: Arc<Traffic>,
    serving: JoinHandle<()>,
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl TcpProxy {
    /// Starts a proxy to a server with this URL, `https://127.0.0.1:PORT`.
    pub async fn to(server: &str) -> Result<Self> {
        let target = server.trim_start_matches("https://").parse();
        let target: SocketAddr = target.with_context(|| format!("{server} is not https://ADDRESS:PORT"))?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let state = Arc::new(Sender::new(State::Open));
        let traffic =
            Arc::new(Traffic { last_response: Mutex::new(Instant::now()), lost: AtomicUsize::new(0) });
        let serving = tokio::spawn(serve(listener, address, target, state.clone(), traffic.clone()));
        Ok(Self { address, state, traffic, serving })
    }

    /// The URL of the server through the proxy.
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Writes a copy of a kubeconfig that goes through the proxy.
    pub fn kubeconfig(&self, original: &Path, path: &Path) -> Result<()> {
        let text = std::fs::read(original).with_context(|| format!("cannot read {}", original.display()))?;
        let mut config: Value = serde_json::from_slice(&text).context("the lab's kubeconfigs are JSON")?;
        config["clusters"][0]["cluster"]["server"] = json!(self.url());
        std::fs::write(path, config.to_string()).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Starts a proxy to the management cluster's API server, and a second controller of the first guest behind it.
    pub async fn with_controller(s: &Scenario) -> Result<(Self, Controller)> {
        let management = s.lab.state().management.as_ref().context("the lab has no management cluster")?;
        let guest = s.lab.state().guests.get(GUEST).context("the lab has no such guest")?;
        let proxy = Self::to(&management.server).await?;
        let folder = tempfile::tempdir()?;
        let kubeconfig = folder.path().join("kubeconfig");
        proxy.kubeconfig(&management.kubeconfig_of(&guest.account()), &kubeconfig)?;
        let controller = Controller::start_in(s, &s.namespace, &kubeconfig, &s.cluster_id, &[]).await?;
        Ok((proxy, controller))
    }

    /// Resets all connections and refuses new ones.
    pub fn cut(&self) {
        self.state.send_replace(State::Cut);
    }

    /// Keeps connections half-open: they stay and new ones are accepted, but no data passes. These connections stay dead
    /// after [`Self::open`], as if a firewall on the path had dropped their state.
    pub fn stall(&self) {
        self.state.send_replace(State::Stalled);
    }

    /// Delays all data by this time, in both directions.
    pub fn slow(&self, by: Duration) {
        self.state.send_replace(State::Slow(by));
    }

    /// Breaks off the next response in the middle and resets its connection; then the proxy is open again.
    pub fn reset_next_response(&self) {
        self.state.send_replace(State::Resetting);
    }

    /// Drops connections on which the server sends data without a request, with that data: watches become stale, while
    /// requests are answered.
    pub fn lose_watches(&self) {
        self.state.send_replace(State::LosingWatches);
    }

    /// Waits until a connection was lost since [`Self::lose_watches`].
    pub async fn watches_lost(&self) -> Result<()> {
        eventually("a watch is lost", PATIENCE, || async {
            let lost = self.traffic.lost.load(Ordering::SeqCst);
            Ok(if lost > 0 { Ok(()) } else { Err("no watch is lost yet".to_owned()) })
        })
        .await
    }

    /// Waits until the server sends no more responses or events.
    pub async fn wait_until_idle(&self) -> Result<()> {
        eventually("no more data through the proxy", PATIENCE, || async {
            let since = self.traffic.last_response.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
            Ok(if since > QUIET { Ok(()) } else { Err(format!("last data {since:?} ago")) })
        })
        .await
    }

    /// Opens the proxy again.
    pub async fn open(&self) -> Result<()> {
        self.state.send_replace(State::Open);
        eventually("the proxy is open", PATIENCE, || async {
            Ok(TcpStream::connect(self.address).await.map(drop).map_err(|error| error.to_string()))
        })
        .await
    }
}

async fn serve(
    listener: TcpListener,
    address: SocketAddr,
    target: SocketAddr,
    state: Arc<Sender<State>>,
    traffic: Arc<Traffic>,
) {
    let mut listener = Some(listener);
    let mut changes = state.subscribe();
    let mut connections = JoinSet::new();
    loop {
        if *changes.borrow_and_update() == State::Cut {
            listener = None;
        } else if listener.is_none() {
            // If another process has taken the port, this is retried at each change, and `open` fails.
            listener = TcpListener::bind(address).await.ok();
        }
        tokio::select! {
            _ = changes.changed() => {}
            Some(_) = connections.join_next() => {}
            Some(client) = accept(listener.as_ref()) => {
                connections.spawn(carry(client, target, state.clone(), traffic.clone()));
            }
        }
    }
}

async fn accept(listener: Option<&TcpListener>) -> Option<TcpStream> {
    listener?.accept().await.ok().map(|(client, _)| client)
}

/// Copies both directions of a connection until an end or the proxy closes it.
async fn carry(mut client: TcpStream, target: SocketAddr, state: Arc<Sender<State>>, traffic: Arc<Traffic>) {
    let mut changes = state.subscribe();
    // Whether the client has sent a request since the last state change.
    let mut has_asked = false;
    let Ok(mut server) = TcpStream::connect(target).await else { return };
    let (mut asked, mut answered) = (vec![0; CHUNK], vec![0; CHUNK]);
    loop {
        let now = *changes.borrow_and_update();
        match now {
            State::Cut => return reset(&client, &server),
            State::Stalled => return stay_dead(client, server, changes).await,
            State::Open | State::Slow(_) | State::Resetting | State::LosingWatches => {}
        }
        let done = tokio::select! {
            // State changes take effect before more data is copied.
            biased;
            _ = changes.changed() => {
                has_asked = false;
                continue;
            }
            read = client.read(&mut asked) => match read {
                Ok(length) if length > 0 => {
                    has_asked |= length >= REQUEST;
                    pass(&changes, &mut server, &asked[..length]).await
                }
                _ => return,
            },
            read = server.read(&mut answered) => match read {
                Ok(length) if length >= RESPONSE && *changes.borrow() == State::Resetting => {
                    // The rest of the response is never sent, whether this write succeeds or not.
                    let _ = client.write_all(&answered[..length / 2]).await;
                    state.send_replace(State::Open);
                    return reset(&client, &server);
                }
                Ok(length) if length >= RESPONSE && now == State::LosingWatches && !has_asked => {
                    traffic.lost.fetch_add(1, Ordering::SeqCst);
                    return stay_dead(client, server, changes).await;
                }
                Ok(length) if length > 0 => {
                    if length >= RESPONSE {
                        *traffic.last_response.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
                    }
                    pass(&changes, &mut client, &answered[..length]).await
                }
                _ => return,
            },
        };
        if done.is_err() {
            return;
        }
    }
}

async fn pass(changes: &Receiver<State>, to: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    let state = *changes.borrow();
    if let State::Slow(by) = state {
        tokio::time::sleep(by).await;
    }
    to.write_all(bytes).await
}

/// Keeps both ends open without copying data, in every state, until the proxy is cut.
async fn stay_dead(client: TcpStream, server: TcpStream, mut changes: Receiver<State>) {
    // The sender lives as long as the proxy; without it, both ends are closed.
    let _ = changes.wait_for(|state| *state == State::Cut).await;
    reset(&client, &server);
}

/// Resets both ends, so that they see an error instead of a clean close.
fn reset(client: &TcpStream, server: &TcpStream) {
    for end in [client, server] {
        // Fails if the end is already closed.
        let _ = end.set_zero_linger();
    }
}
