//! The lab with two replicas of each controller, whose connections pass proxies, and a Prometheus that scrapes it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Context, Result};
use futures::future::BoxFuture;
use lab::state::State;
use lab::{Lab, LoopNode, NodePlugin, Setting};
use tempfile::TempDir;
use tests::prometheus::Prometheus;
use tests::tcp_proxy::TcpProxy;
use tests::{Alone, PATIENCE, Scenario, alone, eventually};

/// What a test does in the lab.
type Work = for<'a> fn(&'a Site) -> BoxFuture<'a, Result<()>>;

/// The guest whose gc-csi has two replicas.
const GUEST: &str = "g1";
/// The replicas of the controllers in the lab, by job.
pub(crate) const CONTROLLERS: [(&str, [&str; 2]); 3] = [
    ("mgmt-csi", ["mgmt-csi", "mgmt-csi-2"]),
    ("vm-operator-shim", ["vm-operator-shim", "vm-operator-shim-2"]),
    ("gc-csi-controller", ["g1-gc-csi", "g1-gc-csi-2"]),
];
pub(crate) const STORAGE_INFRA: &str = "storage-infra";
/// Short, so that backups and their absence are observed soon.
const BACKUP_INTERVAL: &str = "storage-infra:backup-interval=2s";

/// Proxies between the controllers and the servers that they use.
pub(crate) struct Links {
    /// To the API server of the management cluster.
    pub management: TcpProxy,
    /// To the API server of the guest.
    pub guest: TcpProxy,
    /// To storage-infra.
    pub infra: TcpProxy,
    kubeconfigs: TempDir,
}

impl Links {
    async fn start(lab: &Lab) -> Result<Self> {
        let state = lab.state();
        let management = state.management.as_ref().context("the lab has no management cluster")?;
        let guest = &state.guests.get(GUEST).context("the lab has no such guest")?.cluster;
        let infra = state.infra.as_ref().context("the lab has no storage infra")?;
        Ok(Self {
            management: TcpProxy::to(&management.server).await?,
            guest: TcpProxy::to(&guest.server).await?,
            infra: TcpProxy::to(&infra.url).await?,
            kubeconfigs: tempfile::tempdir()?,
        })
    }

    /// The flags with which the controllers use the proxies.
    fn settings(&self, state: &State) -> Result<Vec<Setting>> {
        let management = state.management.as_ref().context("the lab has no management cluster")?;
        let guest = state.guests.get(GUEST).context("the lab has no such guest")?;
        let through = |proxy: &TcpProxy, original: std::path::PathBuf, name: &str| -> Result<String> {
            let path = self.kubeconfigs.path().join(name);
            proxy.kubeconfig(&original, &path)?;
            Ok(path.display().to_string())
        };
        let of_management =
            |account: &str| through(&self.management, management.kubeconfig_of(account), account);
        let (mgmt_csi, shim) = (of_management("mgmt-csi")?, of_management("vm-operator-shim")?);
        let in_management = of_management(&guest.account())?;
        let in_guest = guest.cluster.kubeconfig_of("gc-csi-controller");
        let in_guest = through(&self.guest, in_guest, "gc-csi-controller")?;
        let mut all = vec![BACKUP_INTERVAL.to_owned()];
        for number in 0..2 {
            let [mgmt, shims, gc] = CONTROLLERS.map(|(_, replicas)| replicas[number]);
            all.extend([
                format!("{mgmt}:kubeconfig={mgmt_csi}"),
                format!("{mgmt}:infra-url={}", self.infra.url()),
                format!("{shims}:kubeconfig={shim}"),
                format!("{gc}:management-kubeconfig={in_management}"),
                format!("{gc}:guest-kubeconfig={in_guest}"),
            ]);
        }
        all.iter().map(|text| text.parse().map_err(anyhow::Error::msg)).collect()
    }

    /// The kubeconfig of an account with which the controllers use the proxies.
    pub(crate) fn kubeconfig(&self, account: &str) -> std::path::PathBuf {
        self.kubeconfigs.path().join(account)
    }

    /// Opens all proxies, however a fault left them.
    pub(crate) async fn open(&self) -> Result<()> {
        for proxy in [&self.management, &self.guest, &self.infra] {
            proxy.open().await?;
        }
        Ok(())
    }
}

/// Runs a test in the lab with two replicas of each controller.
pub(crate) async fn in_lab(work: Work) -> Result<()> {
    let alone = alone().await;
    let lab = Lab::from_env()?;
    lab.scale(GUEST, 2).await?;
    let outcome = with_replicas(&alone, &lab, work).await;
    outcome.and(lab.scale(GUEST, 1).await)
}

async fn with_replicas(alone: &Alone, lab: &Lab, work: Work) -> Result<()> {
    let links = Arc::new(Links::start(lab).await?);
    let settings = links.settings(lab.state())?;
    // The proxies live until the settings are restored.
    let shared = links.clone();
    let test = alone.run(|s| async move {
        let site = Site::start(s, shared).await?;
        let outcome = work(&site).await;
        outcome.and(site.stop().await)
    });
    lab.with_settings(&settings, test).await
}

/// What faults are caused in, and observed with.
pub(crate) struct Site {
    pub s: Arc<Scenario>,
    pub(crate) links: Arc<Links>,
    pub prometheus: Prometheus,
    /// A node plugin of a loop node.
    pub plugin: NodePlugin,
    pub node: LoopNode,
}

impl Site {
    /// Starts the node plugin and Prometheus, and waits until every program is scraped.
    async fn start(s: Arc<Scenario>, links: Arc<Links>) -> Result<Self> {
        let node = s.node().await?;
        let plugin = s.lab.spawn_node_plugin(&node).await?;
        let jobs = jobs(&s.lab, &plugin)?;
        let prometheus = Prometheus::start(&jobs).await?;
        every_target_is_up(&prometheus, &jobs).await?;
        Ok(Self { s, links, prometheus, plugin, node })
    }

    /// Removes what the scenario does not remove.
    async fn stop(self) -> Result<()> {
        self.links.open().await?;
        self.s.lab.remove_node_plugin(&self.plugin).await?;
        self.prometheus.stop().await
    }

    /// All programs that are scraped: job and component.
    pub(crate) fn components(&self) -> Vec<(&'static str, &str)> {
        let replicas = CONTROLLERS.iter().flat_map(|(job, all)| all.iter().map(|one| (*job, *one)));
        replicas.chain([("gc-csi-node", &*self.plugin.component), (STORAGE_INFRA, STORAGE_INFRA)]).collect()
    }
}

/// The address of a component's metrics.
fn address(lab: &Lab, component: &str) -> Result<String> {
    let url = lab.metrics_url(component)?;
    let address = url.strip_prefix("http://").and_then(|rest| rest.strip_suffix("/metrics"));
    Ok(address.with_context(|| format!("unexpected URL {url}"))?.to_owned())
}

/// The targets in the lab by job, as the guide names the jobs.
fn jobs(lab: &Lab, plugin: &NodePlugin) -> Result<BTreeMap<String, Vec<String>>> {
    let controllers = CONTROLLERS.map(|(job, replicas)| (job, replicas.to_vec()));
    let others = [("gc-csi-node", vec![&*plugin.component]), (STORAGE_INFRA, vec![STORAGE_INFRA])];
    let jobs = controllers.into_iter().chain(others).map(|(job, components)| {
        let addresses = components.into_iter().map(|component| address(lab, component));
        Ok((job.to_owned(), addresses.collect::<Result<Vec<_>>>()?))
    });
    jobs.collect()
}

async fn every_target_is_up(prometheus: &Prometheus, jobs: &BTreeMap<String, Vec<String>>) -> Result<()> {
    let expected: BTreeSet<(String, String)> = jobs
        .iter()
        .flat_map(|(job, addresses)| addresses.iter().map(|address| (job.clone(), address.clone())))
        .collect();
    eventually("every target is up", PATIENCE, || async {
        let targets = prometheus.targets().await?;
        let is_complete = targets.keys().cloned().collect::<BTreeSet<_>>() == expected;
        let all_up = targets.values().all(|health| health == "up");
        Ok(if is_complete && all_up { Ok(()) } else { Err(format!("{targets:?}")) })
    })
    .await
}
