//! An OpenTelemetry collector, and programs of the lab that export their spans to it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use lab::cache;
use lab::pki::Authority;
use lab::state::State;
use lab::ui::Ui;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::program::Running;
use crate::{PATIENCE, Scenario, eventually};

/// Environment variables of `--otlp-endpoint`, `--otlp-ca` and `--otlp-ratio`.
const ENDPOINT: &str = "NESTOR_OTLP_ENDPOINT";
const CA: &str = "NESTOR_OTLP_CA";
const RATIO: &str = "NESTOR_OTLP_RATIO";
/// Files of a collector with TLS.
const CERTIFICATE: &str = "collector.crt";
const KEY: &str = "collector.key";
const AUTHORITY: &str = "ca.crt";
const OTHER_AUTHORITY: &str = "other-ca.crt";
/// The programs on the way of a volume. The storage infra comes first, because mgmt-csi is not ready without it.
const PROGRAMS: [&str; 4] = ["storage-infra", "mgmt-csi", "vm-operator-shim", "g1-gc-csi"];

/// A span that the collector received.
#[derive(Debug, Clone)]
pub struct Span {
    /// The program.
    pub service: String,
    /// Its name.
    pub name: String,
    /// Id of its trace.
    pub trace: String,
    /// Its id.
    pub id: String,
    /// Id of its parent; empty without one.
    pub parent: String,
    /// Its attributes that are text.
    pub attributes: BTreeMap<String, String>,
    /// Whether its status is an error.
    pub has_failed: bool,
}

/// Where programs export their spans to.
#[derive(Debug, Clone)]
pub struct Target {
    /// The endpoint.
    pub endpoint: String,
    /// File with the CA certificate of an https endpoint.
    pub ca: Option<PathBuf>,
    /// Fraction of the operations that are traced; all of them without one.
    pub ratio: Option<f64>,
}

/// A collector.
pub struct Collector {
    process: Running,
    tls: Option<Tls>,
}

/// Certificates of a collector, and an authority that did not sign them.
struct Tls {
    folder: TempDir,
}

impl Tls {
    fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let authority = Authority::new("collector")?;
        let pair = authority.server("collector", &["127.0.0.1"])?;
        let other = Authority::new("another collector")?.cert();
        for (name, text) in [
            (CERTIFICATE, &pair.cert),
            (KEY, &pair.key),
            (AUTHORITY, &authority.cert()),
            (OTHER_AUTHORITY, &other),
        ] {
            std::fs::write(folder.path().join(name), text)?;
        }
        Ok(Self { folder })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Collector {
    /// Starts a collector on a free port. Builds it if it is not in the cache.
    pub async fn start() -> Result<Self> {
        Self::start_with(None).await
    }

    /// Starts a collector with TLS.
    pub async fn start_with_tls() -> Result<Self> {
        Self::start_with(Some(Tls::new()?)).await
    }

    async fn start_with(tls: Option<Tls>) -> Result<Self> {
        let grpc = tls.as_ref().map_or(
            json!({}),
            |tls| json!({"tls": {"cert_file": tls.file(CERTIFICATE), "key_file": tls.file(KEY)}}),
        );
        let config = json!({
            "receivers": {"otlp": {"protocols": {"grpc": grpc}}},
            "exporters": {"lines": {}},
            "service": {"pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["lines"]}}},
        });
        let program = cache::otelcol(&Ui::default()).await?;
        let config = format!("--config=yaml:{config}");
        let listen = "--set=receivers.otlp.protocols.grpc.endpoint";
        let process = Running::listening(&program, &[&config], listen, None).await?;
        eventually("the collector listens", PATIENCE, || async {
            let connected = TcpStream::connect(("127.0.0.1", process.port())).await;
            Ok(connected.map(drop).map_err(|error| format!("{error}; log: {}", process.log())))
        })
        .await?;
        Ok(Self { process, tls })
    }

    /// Its OTLP endpoint.
    pub fn target(&self) -> Target {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        Target {
            endpoint: format!("{scheme}://127.0.0.1:{}", self.process.port()),
            ca: self.tls.as_ref().map(|tls| tls.file(AUTHORITY)),
            ratio: None,
        }
    }

    /// Its OTLP endpoint with a CA certificate that is not that of its authority.
    pub fn target_with_wrong_ca(&self) -> Target {
        Target { ca: self.tls.as_ref().map(|tls| tls.file(OTHER_AUTHORITY)), ..self.target() }
    }

    /// The spans that it has received.
    pub fn spans(&self) -> Result<Vec<Span>> {
        let log = self.process.log();
        let mut spans = Vec::new();
        for line in log.lines().filter(|line| line.starts_with("{\"resourceSpans\"")) {
            let received: Value = serde_json::from_str(line).context("not a line of spans")?;
            spans.extend(list(&received["resourceSpans"]).flat_map(of_resource));
        }
        Ok(spans)
    }

    /// Waits until a trace contains these spans, by program and name, each the child of the one before. Returns the first.
    pub async fn has_chain(&self, trace: &str, chain: &[(&str, &str)]) -> Result<Span> {
        eventually(&format!("trace {trace} contains {chain:?}"), PATIENCE, || async {
            let mut spans = self.spans()?;
            spans.retain(|span| span.trace == trace);
            let first = spans.iter().find(|span| span.parent.is_empty() && begins(&spans, span, chain));
            Ok(first.cloned().ok_or_else(|| format!("{spans:#?}")))
        })
        .await
    }

    /// Waits for a span of a program with this name and attribute; returns its trace.
    pub async fn trace_of(
        &self,
        (service, name): (&str, &str),
        (key, value): (&str, &str),
    ) -> Result<String> {
        eventually(&format!("a span {name} of {service} with {key} {value}"), PATIENCE, || async {
            let spans = self.spans()?;
            let found = spans.iter().find(|span| {
                (&*span.service, &*span.name) == (service, name)
                    && span.attributes.get(key).is_some_and(|has| has == value)
            });
            Ok(found.map(|span| span.trace.clone()).ok_or_else(|| format!("{} spans", spans.len())))
        })
        .await
    }

    /// Stops it.
    pub async fn stop(self) -> Result<()> {
        self.process.stop().await.map(drop)
    }
}

/// Whether a chain begins with this span.
fn begins(spans: &[Span], span: &Span, chain: &[(&str, &str)]) -> bool {
    let [first, rest @ ..] = chain else { return true };
    let is_first = (span.service.as_str(), span.name.as_str()) == *first;
    let mut children = spans.iter().filter(|child| child.parent == span.id);
    is_first && (rest.is_empty() || children.any(|child| begins(spans, child, rest)))
}

fn list(values: &Value) -> impl Iterator<Item = &Value> {
    values.as_array().into_iter().flatten()
}

fn of_resource(resource: &Value) -> Vec<Span> {
    let about = attributes(&resource["resource"]);
    let service = about.get("service.name").cloned().unwrap_or_default();
    let spans = list(&resource["scopeSpans"]).flat_map(|scope| list(&scope["spans"]));
    spans.map(|span| read(&service, span)).collect()
}

fn read(service: &str, span: &Value) -> Span {
    let text = |field: &str| span[field].as_str().unwrap_or_default().to_owned();
    Span {
        service: service.to_owned(),
        name: text("name"),
        trace: text("traceId"),
        id: text("spanId"),
        parent: text("parentSpanId"),
        attributes: attributes(span),
        has_failed: span["status"]["code"] == 2,
    }
}

fn attributes(of: &Value) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    list(&of["attributes"]).map(|one| (text(&one["key"]), text(&one["value"]["stringValue"]))).collect()
}

/// Restarts the lab's programs, runs `work` while they export their spans to `target` (or none without one), and then turns that
/// off, whether `work` succeeded or not.
pub async fn with_traces<T, Work, Working>(
    s: &Arc<Scenario>,
    target: Option<&Target>,
    work: Work,
) -> Result<T>
where
    T: Send + 'static,
    Work: FnOnce(Arc<Scenario>) -> Working,
    Working: Future<Output = Result<T>> + Send + 'static,
{
    export_to(s, target).await?;
    // In its own task, so that a failed assertion does not skip the end.
    let outcome = tokio::spawn(work(s.clone())).await;
    export_to(s, None).await?;
    outcome.unwrap_or_else(|panic| Err(anyhow!("{panic}")))
}

/// Restarts the programs with or without a target.
async fn export_to(s: &Scenario, target: Option<&Target>) -> Result<()> {
    for program in PROGRAMS {
        s.stop_component(program).await?;
        s.lab.run().update(|state| {
            set(state, program, ENDPOINT, target.map(|target| target.endpoint.clone()));
            let ca = target.and_then(|target| target.ca.as_ref());
            set(state, program, CA, ca.map(|file| file.display().to_string()));
            let ratio = target.and_then(|target| target.ratio);
            set(state, program, RATIO, ratio.map(|ratio| ratio.to_string()));
        })?;
        s.start_component(program).await?;
    }
    Ok(())
}

fn set(state: &mut State, program: &str, variable: &str, value: Option<String>) {
    let Some(component) = state.components.get_mut(program) else { return };
    match value {
        Some(value) => component.env.insert(variable.to_owned(), value),
        None => component.env.remove(variable),
    };
}
