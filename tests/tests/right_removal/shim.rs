//! Rights of vm-operator-shim.

use anyhow::Result;
use crds::names;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Client;
use kube::api::{Api, DeleteParams};
use lab::LoopNode;
use serde_json::{Value, json};
use tests::accounts::{Account, Tier, Withheld};
use tests::program::{Running, binary};
use tests::{PATIENCE, Scenario, eventually, run_alone, unique};

use super::table::{How, Shim, is_silent, rights_of, steps};

const PROGRAM: &str = "vm-operator-shim";

/// Flags for a Lease that is renewed each second.
pub(super) const SHORT_LEASE: [&str; 3] =
    ["--lease-duration=6s", "--lease-renew-deadline=4s", "--lease-retry-period=1s"];

/// Whether a program leads, by its metrics, and is ready.
pub(super) async fn leads(process: &Running, metric: &str) -> Result<Result<(), String>> {
    let line = format!("{metric}_leader 1");
    let is_leader = match process.get("/metrics").await {
        Ok((200, metrics)) => metrics.lines().any(|one| one == line),
        _ => false,
    };
    let is_ready = is_ready(process).await?;
    Ok(if is_leader { is_ready } else { Err(is_ready.err().unwrap_or_else(|| "not the leader".to_owned())) })
}

/// Whether a program is ready.
pub(super) async fn is_ready(process: &Running) -> Result<Result<(), String>> {
    Ok(match process.get("/readyz").await {
        Ok((200, _)) => Ok(()),
        Ok((status, body)) => Err(format!("{status}: {body}")),
        Err(error) => Err(error.to_string()),
    })
}

/// Deletes a Lease.
pub(super) async fn delete_lease(client: &Client, namespace: &str, name: &str) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    leases.delete(name, &DeleteParams::default()).await?;
    Ok(())
}

/// An entry of `spec.volumes` for a claim.
pub(super) fn entry(claim: &str) -> Value {
    json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
}

/// Whether a VM shows the disk of a claim as attached.
pub(super) async fn is_attached(s: &Scenario, vm: &str, claim: &str) -> Result<Result<(), String>> {
    let disk = s.disk(vm, claim).await?;
    let is_attached = disk.as_ref().is_some_and(|disk| disk.attached);
    Ok(if is_attached { Ok(()) } else { Err(format!("{disk:?}")) })
}

/// Removes the entries of a VM, and waits until it has no disks.
pub(super) async fn detach_all(s: &Scenario, vm: &str) -> Result<()> {
    s.remove_entries(vm, |_| true).await?;
    eventually(&format!("{vm} has no disks"), PATIENCE, || async {
        let shown = s.vms().get(vm).await?.status.map(|status| status.volumes).unwrap_or_default();
        Ok(if shown.is_empty() { Ok(()) } else { Err(format!("{shown:?}")) })
    })
    .await
}

/// A shim in place of the lab's, with an account of its own.
struct Replacement<'a> {
    s: &'a Scenario,
    account: Account,
    leases: String,
    node: LoopNode,
    claim: String,
}

impl<'a> Replacement<'a> {
    async fn create(s: &'a Scenario) -> Result<Self> {
        let leases = s.own_namespace().await?.name;
        let roles = [("ClusterRole nestor:vm-operator-shim", ""), ("Role nestor:leader-election", &*leases)];
        let account = Account::create(s, Tier::Management, &leases, &roles).await?;
        let node = s.node().await?;
        let claim = s.management_claim(&[(names::LABEL_CLUSTER_ID, &s.cluster_id)], json!({})).await?;
        s.stop_component(PROGRAM).await?;
        Ok(Self { s, account, leases, node, claim })
    }

    async fn spawn(&self) -> Result<Running> {
        let kubeconfig = format!("--kubeconfig={}", self.account.kubeconfig.display());
        let namespace = format!("--lease-namespace={}", self.leases);
        let words = [&[&*kubeconfig, &*namespace], &SHORT_LEASE[..]].concat();
        Running::start(&binary(&self.s.lab, PROGRAM), &words).await
    }

    async fn withheld(&self, step: Shim) -> Result<Withheld<'_>> {
        println!("{step:?}");
        Withheld::take(&[&self.account], rights_of(How::Shim(step))?, is_silent).await
    }

    async fn start(&self) -> Result<Running> {
        let withheld = self.withheld(Shim::Start).await?;
        let shim = self.spawn().await?;
        withheld.until_refused(|| shim.log(), || leads(&shim, "nestor_vm_operator_shim")).await?;
        Ok(shim)
    }

    async fn run(&self, step: Shim, shim: &Running) -> Result<()> {
        let withheld = self.withheld(step).await?;
        let (s, vm) = (self.s, self.node.name.as_str());
        match step {
            Shim::Start => anyhow::bail!("it has started"),
            Shim::Renew => {}
            Shim::LoseLease => delete_lease(&s.management, &self.leases, PROGRAM).await?,
            Shim::Attach | Shim::ShowStatus => s.add_entry(vm, entry(&self.claim)).await?,
            Shim::MissingClaim => {}
            Shim::Detach => s.remove_entries(vm, |_| true).await?,
        }
        let attempt = || async {
            match step {
                Shim::Start | Shim::Renew | Shim::LoseLease => leads(shim, "nestor_vm_operator_shim").await,
                Shim::Attach | Shim::ShowStatus => is_attached(s, vm, &self.claim).await,
                Shim::MissingClaim => self.missing_claim_is_reported().await,
                Shim::Detach => {
                    let disk = s.disk(vm, &self.claim).await?;
                    Ok(disk.map_or(Ok(()), |disk| Err(format!("{disk:?}"))))
                }
            }
        };
        withheld.until_refused(|| shim.log(), attempt).await?;
        if step == Shim::Attach { detach_all(s, vm).await } else { Ok(()) }
    }

    /// A VM of its own with an entry for a claim that does not exist: there is one event for it.
    async fn missing_claim_is_reported(&self) -> Result<Result<(), String>> {
        let (vm, claim) = (self.s.node().await?.name, unique("missing"));
        self.s.add_entry(&vm, entry(&claim)).await?;
        let shown = eventually("the missing claim is in the status", PATIENCE, || async {
            let disk = self.s.disk(&vm, &claim).await?;
            Ok(if disk.is_some_and(|disk| disk.error.is_some()) {
                Ok(())
            } else {
                Err("no error".to_owned())
            })
        });
        shown.await?;
        let reported = lab::wait::eventually("the event", std::time::Duration::from_secs(2), || async {
            let events = self.s.management_events_of("VirtualMachine", &vm).await?;
            let is_there = events.iter().any(|(_, text)| text.contains(&claim));
            Ok(if is_there { Ok(()) } else { Err(format!("{events:?}")) })
        });
        let reported = reported.await.map_err(|error| error.to_string());
        detach_all(self.s, &vm).await?;
        Ok(reported)
    }
}

#[tokio::test]
async fn each_right_of_vm_operator_shim_is_needed() -> Result<()> {
    run_alone(|s| async move {
        let own = Replacement::create(&s).await?;
        let shim = own.start().await?;
        let later = steps(|how| if let How::Shim(step) = how { Some(step) } else { None });
        for step in later.into_iter().filter(|step| *step != Shim::Start) {
            own.run(step, &shim).await?;
        }
        shim.stop().await?;
        Ok(())
    })
    .await
}
