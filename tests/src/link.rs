//! A link between a program of ours and an API server or the infra, which a test can break in every way that real ones
//! break.

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

/// What is at least as long is an answer, or what is told of an object; what is shorter only keeps a connection going.
const ANSWER: usize = 300;
/// What is at least as long, and comes from a client, is a request; what is shorter only keeps a connection going.
const REQUEST: usize = 50;
/// A link on which nothing is told for so long has told all that there is to tell.
const QUIET: Duration = Duration::from_millis(300);
/// How much is carried at once.
const CHUNK: usize = 16 << 10;

/// How a link is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Cut,
    Stalled,
    Slow(Duration),
    Resetting,
    Deaf,
}

/// What became of what a link carried.
#[derive(Debug)]
struct Carried {
    /// When the server told something.
    told: Mutex<Instant>,
    /// How many connections were lost to [`State::Deaf`].
    lost: AtomicUsize,
}

/// A link to a server. It is open at first; when this is dropped, nothing listens there any more.
pub struct Link {
    address: SocketAddr,
    state: Arc<Sender<State>>,
    carried: Arc<Carried>,
    carrying: JoinHandle<()>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.carrying.abort();
    }
}

impl Link {
    /// A link to a server with this URL, `https://127.0.0.1:PORT`.
    pub async fn to(server: &str) -> Result<Self> {
        let target = server.trim_start_matches("https://").parse();
        let target: SocketAddr = target.with_context(|| format!("{server} is not https://ADDRESS:PORT"))?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let state = Arc::new(Sender::new(State::Open));
        let carried = Arc::new(Carried { told: Mutex::new(Instant::now()), lost: AtomicUsize::new(0) });
        let carrying = tokio::spawn(serve(listener, address, target, state.clone(), carried.clone()));
        Ok(Self { address, state, carried, carrying })
    }

    /// The URL by which the server is reached over the link.
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Writes a kubeconfig that is the same as another one, but goes over the link.
    pub fn kubeconfig(&self, original: &Path, path: &Path) -> Result<()> {
        let text = std::fs::read(original).with_context(|| format!("cannot read {}", original.display()))?;
        let mut config: Value = serde_json::from_slice(&text).context("the lab's kubeconfigs are JSON")?;
        config["clusters"][0]["cluster"]["server"] = json!(self.url());
        std::fs::write(path, config.to_string()).with_context(|| format!("cannot write {}", path.display()))
    }

    /// A link to the management cluster's API server, and another controller of the first guest's driver at its end.
    pub async fn beneath_controller(s: &Scenario) -> Result<(Self, Controller)> {
        let management = s.lab.state().management.as_ref().context("the lab has no management cluster")?;
        let guest = s.lab.state().guests.get(GUEST).context("the lab has no such guest")?;
        let link = Self::to(&management.server).await?;
        let folder = tempfile::tempdir()?;
        let kubeconfig = folder.path().join("kubeconfig");
        link.kubeconfig(&management.kubeconfig_of(&guest.account()), &kubeconfig)?;
        let controller = Controller::start_in(s, &s.namespace, &kubeconfig, &s.cluster_id, &[]).await?;
        Ok((link, controller))
    }

    /// Connections are reset, and new ones refused.
    pub fn cut(&self) {
        self.state.send_replace(State::Cut);
    }

    /// Half-open: connections stay and new ones come about, but nothing gets through. Those that were there, and those
    /// that come about meanwhile, stay so when the link is open again, as they do where something on the way forgot them.
    pub fn stall(&self) {
        self.state.send_replace(State::Stalled);
    }

    /// Everything is late by this time, in both directions.
    pub fn slow(&self, by: Duration) {
        self.state.send_replace(State::Slow(by));
    }

    /// The next answer breaks off in its middle, and its connection with it; then the link is open again.
    pub fn reset_next_answer(&self) {
        self.state.send_replace(State::Resetting);
    }

    /// Loses the connections on which the server tells something unasked, and that with them: watches are behind from then
    /// on, and requests are answered.
    pub fn lose_watches(&self) {
        self.state.send_replace(State::Deaf);
    }

    /// Waits until a connection was lost since [`Self::lose_watches`] was called.
    pub async fn has_lost_watches(&self) -> Result<()> {
        eventually("a watch is behind", PATIENCE, || async {
            let lost = self.carried.lost.load(Ordering::SeqCst);
            Ok(if lost > 0 { Ok(()) } else { Err("all are told of what changes".to_owned()) })
        })
        .await
    }

    /// Waits until the server has told all that there is to tell.
    pub async fn is_quiet(&self) -> Result<()> {
        eventually("nothing more is told over the link", PATIENCE, || async {
            let since = self.carried.told.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
            Ok(if since > QUIET { Ok(()) } else { Err(format!("something was, {since:?} ago")) })
        })
        .await
    }

    /// As if nothing had been.
    pub async fn open(&self) -> Result<()> {
        self.state.send_replace(State::Open);
        eventually("the link is open", PATIENCE, || async {
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
    carried: Arc<Carried>,
) {
    let mut listener = Some(listener);
    let mut changes = state.subscribe();
    let mut connections = JoinSet::new();
    loop {
        if *changes.borrow_and_update() == State::Cut {
            listener = None;
        } else if listener.is_none() {
            // Its port is free again when nobody took it meanwhile; else this is tried at each change, and `open` tells.
            listener = TcpListener::bind(address).await.ok();
        }
        tokio::select! {
            _ = changes.changed() => {}
            Some(_) = connections.join_next() => {}
            Some(client) = accept(listener.as_ref()) => {
                connections.spawn(carry(client, target, state.clone(), carried.clone()));
            }
        }
    }
}

async fn accept(listener: Option<&TcpListener>) -> Option<TcpStream> {
    listener?.accept().await.ok().map(|(client, _)| client)
}

/// Carries both directions of a connection until one of its ends, or the link, ends it.
async fn carry(mut client: TcpStream, target: SocketAddr, state: Arc<Sender<State>>, carried: Arc<Carried>) {
    let mut changes = state.subscribe();
    // Whether the client asked for something since the link is as it is.
    let mut has_asked = false;
    let Ok(mut server) = TcpStream::connect(target).await else { return };
    let (mut asked, mut answered) = (vec![0; CHUNK], vec![0; CHUNK]);
    loop {
        let now = *changes.borrow_and_update();
        match now {
            State::Cut => return reset(&client, &server),
            State::Stalled => return stay_dead(client, server, changes).await,
            State::Open | State::Slow(_) | State::Resetting | State::Deaf => {}
        }
        let done = tokio::select! {
            // What changed is looked at before anything more is carried.
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
                Ok(length) if length >= ANSWER && *changes.borrow() == State::Resetting => {
                    // Told or not: the rest never comes.
                    let _ = client.write_all(&answered[..length / 2]).await;
                    state.send_replace(State::Open);
                    return reset(&client, &server);
                }
                Ok(length) if length >= ANSWER && now == State::Deaf && !has_asked => {
                    carried.lost.fetch_add(1, Ordering::SeqCst);
                    return stay_dead(client, server, changes).await;
                }
                Ok(length) if length > 0 => {
                    if length >= ANSWER {
                        *carried.told.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
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

/// Keeps both ends and carries nothing, whatever becomes of the link, until it is cut.
async fn stay_dead(client: TcpStream, server: TcpStream, mut changes: Receiver<State>) {
    // The sender lives as long as the link; without it, both ends go.
    let _ = changes.wait_for(|state| *state == State::Cut).await;
    reset(&client, &server);
}

/// Both ends are told that the connection is no more, not that it ended well.
fn reset(client: &TcpStream, server: &TcpStream) {
    for end in [client, server] {
        // An end that is gone needs telling nothing.
        let _ = end.set_zero_linger();
    }
}
