//! A guest with a gc-csi that has accounts of its own in both clusters.

use std::path::PathBuf;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, DeleteParams};
use lab::LoopNode;
use lab::cluster::MANAGEMENT_NAMESPACE;
use tempfile::TempDir;
use tests::accounts::{Account, Tier, Withheld};
use tests::driver::{Driver, new_volume};
use tests::guest_token::{Projection, SECRET, TokenGuest};
use tests::own_namespace::OwnNamespace;
use tests::program::{Running, binary};
use tests::{MIB, PATIENCE, Scenario, eventually, unique};

use super::shim::SHORT_LEASE;
use super::table::{GcCsi, How, is_silent, rights_of};

/// The guest.
pub(super) struct Site<'a> {
    pub(super) s: &'a Scenario,
    /// Its namespace in the management cluster.
    pub(super) namespace: OwnNamespace,
    pub(super) token: TokenGuest,
    /// Its account in the management cluster.
    management: Account,
    /// gc-csi's account in the guest.
    guest: Account,
    /// A VM that is no Node.
    pub(super) vm: LoopNode,
    /// A VM that becomes a Node.
    pub(super) member: LoopNode,
    folder: TempDir,
    _projection: Projection,
}

impl<'a> Site<'a> {
    pub(super) async fn create(s: &'a Scenario) -> Result<Self> {
        let namespace = s.own_namespace().await?;
        let token = TokenGuest::create(s, &namespace).await?;
        let management = Account::of_tenant(s, &token.tenant, &namespace, token.kubeconfig()).await?;
        let roles = [
            ("ClusterRole nestor:gc-csi-controller", ""),
            ("Role nestor:gc-csi-controller", &*s.name),
            ("Role nestor:management-credential", &*s.name),
        ];
        let guest = Account::create(s, Tier::Guest, &s.name, &roles).await?;
        let guest = guest.named("TOKEN_SECRET", SECRET).await?;
        let id = &token.tenant.cluster_id;
        let (vm, member) = (s.node_in(&namespace, id).await?, s.node_in(&namespace, id).await?);
        let (folder, projection) = (tempfile::tempdir()?, token.project(s));
        Ok(Self { s, namespace, token, management, guest, vm, member, folder, _projection: projection })
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("csi.sock")
    }

    /// Starts gc-csi with all options that need rights.
    pub(super) async fn spawn(&self) -> Result<Running> {
        let tenant = &self.token.tenant;
        let words = [
            format!("--endpoint=unix://{}", self.socket().display()),
            format!("--guest-kubeconfig={}", self.guest.kubeconfig.display()),
            format!("--management-kubeconfig={}", self.management.kubeconfig.display()),
            format!("--management-namespace={}", self.namespace.name),
            format!("--cluster-id={}", tenant.cluster_id),
            format!("--capacity-namespace={MANAGEMENT_NAMESPACE}"),
            format!("--cluster-object={}", tenant.name),
            format!("--lease-namespace={}", self.s.name),
            self.token.flag(self.s),
        ];
        let options = ["--on-guest-deletion=Delete", "--topology", "--sync-pods", "--repair-grace=2s"];
        let words = words.iter().map(String::as_str).chain(options).chain(SHORT_LEASE);
        Running::start(&binary(&self.s.lab, "gc-csi"), &words.collect::<Vec<_>>()).await
    }

    /// Takes the rights that a step tests.
    pub(super) async fn withheld(&self, step: GcCsi) -> Result<Withheld<'_>> {
        println!("{step:?}");
        Withheld::take(&[&self.management, &self.guest], rights_of(How::GcCsi(step))?, is_silent).await
    }

    /// gc-csi's Controller service.
    pub(super) fn driver(&self) -> Result<Driver> {
        Driver::at(&self.socket())
    }

    /// Creates a volume with a CSI call; returns its handle.
    pub(super) async fn volume(&self) -> Result<String> {
        Ok(self.driver()?.create(new_volume(&unique("volume"), 4 * MIB, "nestor")).await?.volume_id)
    }

    /// Creates a snapshot with a CSI call; returns its handle.
    pub(super) async fn snapshot(&self, volume: &str) -> Result<String> {
        let (driver, name) = (self.driver()?, unique("snapshot"));
        let what = format!("a snapshot of {volume}");
        let taken = eventually(&what, PATIENCE, || async {
            Ok(driver.snapshot(&name, volume, "nestor").await.map_err(|status| status.to_string()))
        });
        Ok(taken.await.context("CreateSnapshot")?.snapshot_id)
    }

    /// The guest's Nodes.
    pub(super) fn nodes(&self) -> Api<Node> {
        Api::all(self.s.guest.clone())
    }

    /// Removes what the cleanup of the scenario does not know.
    pub(super) async fn remove(&self) -> Result<()> {
        match self.nodes().delete(&self.member.name, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            other => Ok(other.map(drop)?),
        }
    }
}
