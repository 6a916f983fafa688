//! Faults of leader election.

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use kube::api::{Patch, PatchParams};
use lab::cluster::{GUEST_NAMESPACE, MANAGEMENT_NAMESPACE};
use serde_json::json;
use tests::program::Running;
use tests::{PATIENCE, eventually};

use super::faults::Watch;
use crate::alerts::site::{CONTROLLERS, Site};

/// Something takes the Leases away from their holders.
pub(super) async fn change(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let leases = |namespace: &str| Api::<Lease>::namespaced(site.s.management.clone(), namespace);
    let management = leases(MANAGEMENT_NAMESPACE);
    let guest = Api::<Lease>::namespaced(site.s.guest.clone(), GUEST_NAMESPACE);
    let all = [(&management, "mgmt-csi"), (&management, "vm-operator-shim"), (&guest, "gc-csi-controller")];
    alerts
        .fire_while(|| async {
            try_join_all(all.map(|(leases, name)| release(leases, name))).await.map(drop)
        })
        .await
}

/// Removes the holder of a Lease, and waits until a replica holds it.
async fn release(leases: &Api<Lease>, name: &str) -> Result<()> {
    let none = Patch::Merge(json!({"spec": {"holderIdentity": null}}));
    leases.patch(name, &PatchParams::default(), &none).await?;
    eventually(&format!("the Lease {name} is held"), PATIENCE, || async {
        let spec = leases.get(name).await?.spec.unwrap_or_default();
        Ok(if spec.holder_identity.is_some() { Ok(()) } else { Err(format!("{spec:?}")) })
    })
    .await
}

/// One more replica of each controller has the flag --leader-elect=false.
pub(super) async fn are_several(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let state = site.s.lab.run().state()?;
    let starts = CONTROLLERS.map(|(job, [replica, _])| {
        let component = state.components.get(replica);
        let socket = format!("--endpoint=unix://{}", folder.path().join(job).display());
        async move {
            let (program, flags) =
                component.context("no such component")?.argv.split_first().context("no program")?;
            let replaced = ["--endpoint=", "--http-listen=", "--lease-namespace="];
            let is_kept = |flag: &&str| !replaced.iter().any(|start| flag.starts_with(start));
            let mut words: Vec<&str> = flags.iter().map(String::as_str).filter(is_kept).collect();
            words.push("--leader-elect=false");
            // The shim serves no calls.
            words.extend((job != "vm-operator-shim").then_some(&*socket));
            let running = Running::start(program.as_ref(), &words).await?;
            running.ready().await?;
            site.prometheus.add_target(job, &running.address(), &[])?;
            anyhow::Ok((job, running))
        }
    });
    let replicas = try_join_all(starts).await?;
    alerts.fire().await?;
    for (job, replica) in replicas {
        site.prometheus.remove_target(job, &replica.address())?;
        let status = replica.stop().await?;
        ensure!(status.success(), "{job} exited with {status}");
    }
    Ok(())
}
