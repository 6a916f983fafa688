//! An HTTP proxy that opens tunnels (CONNECT), and remembers for which servers.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// A proxy on this host.
pub struct HttpProxy {
    /// Its address.
    pub url: String,
    asked: Arc<Mutex<Vec<String>>>,
    serving: tokio::task::JoinHandle<()>,
}

impl HttpProxy {
    /// Starts it.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let noted = asked.clone();
        let serving = tokio::spawn(async move {
            while let Ok((caller, _)) = listener.accept().await {
                // A tunnel that breaks is its caller's to mend.
                tokio::spawn(tunnel(caller, noted.clone()));
            }
        });
        Ok(Self { url, asked, serving })
    }

    /// The servers that tunnels were asked for.
    pub fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for HttpProxy {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn tunnel(caller: TcpStream, asked: Arc<Mutex<Vec<String>>>) -> Result<()> {
    let mut caller = BufReader::new(caller);
    let mut line = String::new();
    caller.read_line(&mut line).await?;
    let server = line.strip_prefix("CONNECT ").and_then(|rest| rest.split(' ').next());
    let server = server.with_context(|| format!("not a CONNECT: {line:?}"))?.to_owned();
    while line.trim() != "" {
        line.clear();
        caller.read_line(&mut line).await?;
    }
    asked.lock().unwrap_or_else(PoisonError::into_inner).push(server.clone());
    let mut other = TcpStream::connect(server).await?;
    caller.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
    tokio::io::copy_bidirectional(&mut caller, &mut other).await?;
    Ok(())
}
