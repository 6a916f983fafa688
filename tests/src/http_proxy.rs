//! HTTP proxy that supports CONNECT and records the target servers.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// A proxy on this host.
pub struct HttpProxy {
    /// Its address.
    pub url: String,
    servers: Arc<Mutex<Vec<String>>>,
    serving: tokio::task::JoinHandle<()>,
}

impl HttpProxy {
    /// Starts the proxy.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let servers = Arc::<Mutex<Vec<String>>>::default();
        let recorded = servers.clone();
        let serving = tokio::spawn(async move {
            while let Ok((caller, _)) = listener.accept().await {
                // The client handles a broken tunnel.
                tokio::spawn(tunnel(caller, recorded.clone()));
            }
        });
        Ok(Self { url, servers, serving })
    }

    /// The servers that clients requested tunnels to.
    pub fn servers(&self) -> Vec<String> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for HttpProxy {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn tunnel(caller: TcpStream, servers: Arc<Mutex<Vec<String>>>) -> Result<()> {
    let mut caller = BufReader::new(caller);
    let mut line = String::new();
    caller.read_line(&mut line).await?;
    let server = line.strip_prefix("CONNECT ").and_then(|rest| rest.split(' ').next());
    let server = server.with_context(|| format!("not a CONNECT: {line:?}"))?.to_owned();
    while line.trim() != "" {
        line.clear();
        caller.read_line(&mut line).await?;
    }
    servers.lock().unwrap_or_else(PoisonError::into_inner).push(server.clone());
    let mut other = TcpStream::connect(server).await?;
    caller.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
    tokio::io::copy_bidirectional(&mut caller, &mut other).await?;
    Ok(())
}
