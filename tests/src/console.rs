//! A console of a test, over the lab's management cluster with the rights that the chart gives it.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Event;
use kube::Client;
use kube::api::{Api, PostParams};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::program::{Running, binary, management_cluster};
use crate::{PATIENCE, Scenario, eventually, unique};

/// A console.
pub struct Console {
    /// The process.
    pub process: Running,
    address: SocketAddr,
}

/// An answer to an HTTP request.
#[derive(Debug)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Head, in lower case.
    pub head: String,
    /// Body.
    pub body: String,
}

/// The events that a console streams.
pub struct EventStream(BufReader<TcpStream>);

impl Console {
    /// Starts a console without the storage infra.
    pub async fn start(s: &Scenario) -> Result<Self> {
        Self::start_with(s, &[]).await
    }

    /// Starts a console with the storage infra.
    pub async fn start_with_infra(s: &Scenario) -> Result<Self> {
        let infra = s.lab.state().infra.as_ref().context("the lab has no storage infra")?;
        let file = |flag: &str, name: &str| format!("--infra-{flag}={}", infra.pki.join(name).display());
        let url = format!("--infra-url={}", infra.url);
        let files = [file("ca", "ca.crt"), file("cert", "reader.crt"), file("key", "reader.key")];
        Self::start_with(s, &[&*url, &*files[0], &*files[1], &*files[2]]).await
    }

    async fn start_with(s: &Scenario, more: &[&str]) -> Result<Self> {
        let kubeconfig = management_cluster(s)?.kubeconfig_of("nestor-console");
        let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
        let address = tokio::net::TcpListener::bind("127.0.0.1:0").await?.local_addr()?;
        let listen = format!("--listen={address}");
        let words = [&[&*kubeconfig, &*listen], more].concat();
        let process = Running::start(&binary(&s.lab, "nestor-console"), &words).await?;
        let console = Self { process, address };
        console.shows("", |page| !page.contains("Not current.")).await?;
        Ok(console)
    }

    /// The address of its page.
    pub fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// Sends a request with another host name or method than usual.
    pub async fn request(&self, method: &str, path: &str, host: &str) -> Result<Answer> {
        let mut stream = TcpStream::connect(self.address).await?;
        let request = format!("{method} {path} HTTP/1.0\r\nHost: {host}\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut text = String::new();
        tokio::time::timeout(PATIENCE, stream.read_to_string(&mut text)).await??;
        let (head, body) = text.split_once("\r\n\r\n").context("not an HTTP response")?;
        let status = head.split_whitespace().nth(1).and_then(|code| code.parse().ok());
        let status = status.context("no status")?;
        Ok(Answer { status, head: head.to_lowercase(), body: body.to_owned() })
    }

    /// The page with these parameters.
    pub async fn page(&self, query: &str) -> Result<String> {
        let answer = self.request("GET", &format!("/{query}"), "localhost").await?;
        ensure!(answer.status == 200, "{answer:?}");
        Ok(answer.body)
    }

    /// Waits until the page with these parameters is accepted.
    pub async fn shows(&self, query: &str, accepts: impl Fn(&str) -> bool) -> Result<String> {
        eventually(&format!("the page {query:?} shows it"), PATIENCE, || async {
            Ok(match self.page(query).await {
                Ok(page) if accepts(&page) => Ok(page),
                Ok(page) => Err(page),
                Err(error) => Err(format!("{error:#}; log: {}", self.process.log())),
            })
        })
        .await
    }

    /// Opens the stream of events with these parameters.
    pub async fn events(&self, query: &str) -> Result<EventStream> {
        let mut stream = TcpStream::connect(self.address).await?;
        let request = format!("GET /events{query} HTTP/1.0\r\nHost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        Ok(EventStream(BufReader::new(stream)))
    }
}

impl EventStream {
    /// Waits for a line that contains this text.
    pub async fn line_with(&mut self, text: &str) -> Result<String> {
        let read = async {
            loop {
                let mut line = String::new();
                ensure!(self.0.read_line(&mut line).await? > 0, "the stream ended");
                if line.contains(text) {
                    return Ok(line);
                }
            }
        };
        tokio::time::timeout(PATIENCE, read).await.with_context(|| format!("no event with {text:?}"))?
    }
}

/// Creates a warning about a claim.
pub async fn warn(client: &Client, namespace: &str, claim: &str, reason: &str, message: &str) -> Result<()> {
    let event = json!({
        "metadata": {"name": unique("warning"), "namespace": namespace},
        "involvedObject": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace, "name": claim},
        "type": "Warning", "reason": reason, "message": message, "source": {"component": "tests"},
        "lastTimestamp": k8s_openapi::jiff::Timestamp::now().to_string(), "count": 1,
    });
    let api: Api<Event> = Api::namespaced(client.clone(), namespace);
    api.create(&PostParams::default(), &serde_json::from_value(event)?).await?;
    Ok(())
}
