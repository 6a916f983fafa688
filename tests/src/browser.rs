//! Headless Chromium, over the DevTools protocol on a pair of pipes: messages are JSON, each ended by a zero byte.

use std::collections::HashMap;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail};
use k8s_openapi::ByteString;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::oneshot;

use crate::{PATIENCE, eventually};

/// Folder for pictures of pages.
const PICTURES: &str = "NESTOR_PICTURES";

/// Chromium reads messages from its file 3, and writes them to its file 4.
const START: &str = r#"exec chromium "$@" 3<&0 4>&1 0</dev/null 1>/dev/null 2>&1"#;

const FLAGS: [&str; 12] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "about:blank",
];

/// Domains whose events a page records.
const DOMAINS: [&str; 4] = ["Page", "Runtime", "Log", "Audits"];

/// A browser with one page. It ends when it is dropped.
pub struct Browser {
    _child: Child,
    _profile: TempDir,
    input: tokio::sync::Mutex<ChildStdin>,
    shared: Arc<Mutex<Shared>>,
    session: String,
}

#[derive(Default)]
struct Shared {
    last: u64,
    waiting: HashMap<u64, oneshot::Sender<Value>>,
    /// What the page reported.
    events: Vec<Value>,
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Browser {
    /// Starts Chromium with an empty profile.
    pub async fn start() -> Result<Self> {
        let profile = tempfile::tempdir()?;
        let mut command = Command::new("sh");
        command.args(["-c", START, "sh"]).args(FLAGS);
        command.arg(format!("--user-data-dir={}", profile.path().display()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
        let mut child = command.spawn().context("cannot start chromium")?;
        let input = child.stdin.take().context("no pipe")?;
        let output = child.stdout.take().context("no pipe")?;
        let shared = Arc::new(Mutex::new(Shared::default()));
        tokio::spawn(receive(output, shared.clone()));
        let input = tokio::sync::Mutex::new(input);
        let mut browser = Self { _child: child, _profile: profile, input, shared, session: String::new() };
        browser.attach().await?;
        Ok(browser)
    }

    /// Opens a page, and records what it reports.
    async fn attach(&mut self) -> Result<()> {
        let target = self.call("Target.createTarget", json!({"url": "about:blank"})).await?;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = self.call("Target.attachToTarget", attach).await?;
        self.session = attached["sessionId"].as_str().context("no session")?.to_owned();
        for domain in DOMAINS {
            self.call(&format!("{domain}.enable"), json!({})).await?;
        }
        Ok(())
    }

    /// Calls a method of the protocol.
    pub async fn call(&self, method: &str, params: Value) -> Result<Value> {
        let (sender, answer) = oneshot::channel();
        let id = {
            let mut shared = lock(&self.shared);
            shared.last += 1;
            let id = shared.last;
            shared.waiting.insert(id, sender);
            id
        };
        let mut message = json!({"id": id, "method": method, "params": params});
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        self.input.lock().await.write_all(&bytes).await.context("chromium has ended")?;
        let answer =
            tokio::time::timeout(PATIENCE, answer).await.with_context(|| format!("no answer to {method}"))?;
        let mut answer = answer.with_context(|| format!("chromium ended during {method}"))?;
        match answer.get("error") {
            Some(error) => bail!("{method}: {error}"),
            None => Ok(answer["result"].take()),
        }
    }

    /// Opens an address, and waits until its page is complete.
    pub async fn open(&self, url: &str) -> Result<()> {
        let opened = self.call("Page.navigate", json!({"url": url})).await?;
        anyhow::ensure!(opened.get("errorText").is_none(), "{url}: {opened}");
        self.waits_for(&format!("document.readyState === 'complete' && location.href === {}", json!(url)))
            .await
    }

    /// The value of an expression.
    pub async fn evaluate(&self, expression: &str) -> Result<Value> {
        let call = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut answer = self.call("Runtime.evaluate", call).await?;
        anyhow::ensure!(answer.get("exceptionDetails").is_none(), "{expression}: {answer}");
        Ok(answer["result"]["value"].take())
    }

    /// Waits until an expression is true.
    pub async fn waits_for(&self, expression: &str) -> Result<()> {
        eventually(expression, PATIENCE, || async {
            Ok(match self.evaluate(expression).await {
                Ok(Value::Bool(true)) => Ok(()),
                other => Err(format!("{other:?}")),
            })
        })
        .await
    }

    /// Presses and releases a key.
    pub async fn press(&self, key: &str, code: u32) -> Result<()> {
        for kind in ["keyDown", "keyUp"] {
            let text = if key == "Enter" && kind == "keyDown" { "\r" } else { "" };
            let event = json!({
                "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text,
            });
            self.call("Input.dispatchKeyEvent", event).await?;
        }
        Ok(())
    }

    /// Sets the size of the page, and the colours that its user prefers: `light` or `dark`.
    pub async fn appearance(&self, width: u32, height: u32, scheme: &str) -> Result<()> {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size).await?;
        let scheme = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", scheme).await.map(drop)
    }

    /// Takes a picture of the page (PNG), and keeps it for the documentation if `NESTOR_PICTURES` names a folder.
    pub async fn picture(&self, name: &str) -> Result<()> {
        let bytes = self.screenshot().await?;
        anyhow::ensure!(bytes.starts_with(b"\x89PNG"), "{name}: not a PNG");
        match std::env::var_os(PICTURES) {
            Some(folder) => Ok(std::fs::write(Path::new(&folder).join(name).with_extension("png"), bytes)?),
            None => Ok(()),
        }
    }

    async fn screenshot(&self) -> Result<Vec<u8>> {
        let mut answer = self.call("Page.captureScreenshot", json!({"format": "png"})).await?;
        // The type of the data fields of Kubernetes, which decodes Base64.
        let bytes: ByteString = serde_json::from_value(answer["data"].take())?;
        Ok(bytes.0)
    }

    /// What the page reported as an error or a warning: of scripts, requests, and its security policy.
    pub fn problems(&self) -> Vec<Value> {
        let is_problem = |event: &&Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown" | "Audits.issueAdded") => true,
            Some("Runtime.consoleAPICalled") => true,
            Some("Log.entryAdded") => event["params"]["entry"]["level"] != "verbose",
            _ => false,
        };
        lock(&self.shared).events.iter().filter(is_problem).cloned().collect()
    }
}

/// Reads messages until Chromium ends.
async fn receive(output: ChildStdout, shared: Arc<Mutex<Shared>>) {
    let mut output = BufReader::new(output);
    let mut message = Vec::new();
    while matches!(output.read_until(0, &mut message).await, Ok(1..)) {
        let value = serde_json::from_slice::<Value>(message.strip_suffix(&[0]).unwrap_or(&message));
        message.clear();
        let Ok(value) = value else { continue };
        let mut shared = lock(&shared);
        match value["id"].as_u64().and_then(|id| shared.waiting.remove(&id)) {
            // Fails if the caller gave up.
            Some(waiting) => drop(waiting.send(value)),
            None => shared.events.push(value),
        }
    }
    // Callers that still wait see that Chromium has ended.
    lock(&shared).waiting.clear();
}
