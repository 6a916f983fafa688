//! Perses, a dashboard server that imports Grafana's dashboards and draws them with data of a Prometheus.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use lab::cache;
use lab::ui::Ui;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

use crate::program::Running;
use crate::prometheus::{INTERVAL, Prometheus};
use crate::{PATIENCE, eventually};

const PROJECT: &str = "nestor";
/// The key for secrets in its database; there are none.
const KEY: &str = "00000000000000000000000000000000";

/// A server with a data source.
pub struct Perses {
    process: Running,
    programs: PathBuf,
    folder: TempDir,
}

impl Perses {
    /// Starts a server that asks a Prometheus. Builds it if it is not in the cache.
    pub async fn start(prometheus: &Prometheus) -> Result<Self> {
        let programs = cache::perses(&Ui::default()).await?;
        let folder = tempfile::tempdir()?;
        let schemas = |kind: &str| programs.join("cue/schemas").join(kind);
        let config = json!({
            "security": {"readonly": false, "enable_auth": false, "encryption_key": KEY},
            // If names are not case-sensitive, Perses lists no objects in a folder whose path has capital letters.
            "database": {"file": {"folder": folder.path().join("data"), "extension": "json", "case_sensitive": true}},
            "schemas": {
                "panels_path": schemas("panels"), "queries_path": schemas("queries"),
                "datasources_path": schemas("datasources"), "variables_path": schemas("variables"),
            },
        });
        let path = folder.path().join("perses.yaml");
        std::fs::write(&path, config.to_string())?;
        let words = ["-config", path.to_str().context("a path that is not UTF-8")?];
        let program = programs.join("perses");
        let process = Running::listening(&program, &words, "-web.listen-address", None).await?;
        let perses = Self { process, programs, folder };
        perses.ready().await?;
        perses.cli(&["login", &perses.url("")]).await?;
        perses.apply(&json!({"kind": "Project", "metadata": {"name": PROJECT}, "spec": {}})).await?;
        perses.apply(&data_source(&prometheus.url())).await?;
        Ok(perses)
    }

    async fn ready(&self) -> Result<()> {
        eventually("Perses is ready", PATIENCE, || async {
            Ok(match self.process.get("/api/v1/health").await {
                Ok((200, _)) => Ok(()),
                other => Err(format!("{other:?}; log: {}", self.process.log())),
            })
        })
        .await
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.process.port())
    }

    /// Runs its command line tool.
    async fn cli(&self, words: &[&str]) -> Result<String> {
        let mut command = Command::new(self.programs.join("percli"));
        command.arg("--percliconfig").arg(self.folder.path().join("percli.json")).args(words);
        let output = command.kill_on_drop(true).output().await?;
        let [out, err] =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        ensure!(output.status.success(), "percli {words:?}: {out}{err}");
        Ok(out)
    }

    async fn apply(&self, object: &Value) -> Result<()> {
        let path = self.folder.path().join("object.json");
        std::fs::write(&path, object.to_string())?;
        self.cli(&["apply", "-f", &path.to_string_lossy()]).await.map(drop)
    }

    /// Imports a dashboard of Grafana. Returns the address of its page, with the last minutes.
    pub async fn import(&self, dashboard: &Path) -> Result<String> {
        let printed = self
            .cli(&["migrate", "--online", "-o", "json", "-f", &dashboard.to_string_lossy()])
            .await
            .with_context(|| dashboard.display().to_string())?;
        let mut imported: Value = serde_json::from_str(&printed)?;
        imported["metadata"]["project"] = json!(PROJECT);
        // The choice between several data sources is not migrated: there is one.
        imported["spec"]["variables"] = json!([]);
        self.apply(&imported).await?;
        let name = imported["metadata"]["name"].as_str().context("a dashboard without a name")?;
        Ok(self.url(&format!("/projects/{PROJECT}/dashboards/{name}?start=5m")))
    }

    /// Stops it.
    pub async fn stop(self) -> Result<()> {
        self.process.stop().await.map(drop)
    }
}

fn data_source(url: &str) -> Value {
    let proxy = json!({"kind": "HTTPProxy", "spec": {"url": url}});
    let plugin =
        json!({"kind": "PrometheusDatasource", "spec": {"scrapeInterval": INTERVAL, "proxy": proxy}});
    json!({
        "kind": "GlobalDatasource", "metadata": {"name": "prometheus"},
        "spec": {"default": true, "plugin": plugin},
    })
}
