//! Faults of the connections to the API servers and to storage-infra, and of the servers behind them.

use std::time::Duration;

use anyhow::{Context, Result};
use csi::proto::ControllerGetVolumeRequest;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use kube::Client;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::{Value, json};
use tests::driver::{Driver, new_volume};
use tests::{MIB, PATIENCE, eventually, unique};
use tonic::Request;

use super::faults::{SHIM, Watch};
use super::fleet::Fleet;
use crate::alerts::site::{STORAGE_INFRA, Site};

/// Deadline of calls that cannot be completed: longer than what the rules call slow in the test.
const DEADLINE: Duration = Duration::from_secs(5);
/// Delay of each direction of a slow connection.
const DELAY: Duration = Duration::from_millis(700);

/// The connections of the controllers to both API servers are cut; volumes are attached meanwhile.
pub(super) async fn api_servers_are_cut_off(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let (node, handle) = (site.s.node().await?, site.s.volume().await?);
    site.links.management.cut();
    site.links.guest.cut();
    alerts
        .fire_while(|| async {
            // It fails; the alerts show how.
            let _ = site.s.driver.publish_within(&handle, &node.name, DEADLINE).await;
            Ok(())
        })
        .await?;
    site.links.open().await
}

/// A webhook that does not answer refuses writes in both clusters; storage-infra is cut off, then it hangs.
pub(super) async fn servers_refuse_or_hang(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let s = &site.s;
    let fleet = Fleet::new(s).await?;
    let (in_management, in_guest) =
        (management_webhook(&s.management).await?, guest_webhook(&s.guest).await?);
    let refused = are_refused(site, alerts, &fleet, &in_management).await;
    in_management.remove().await?;
    in_guest.remove().await?;
    site.links.infra.open().await?;
    refused?;
    fleet.are_attached(s, true).await?;
    hangs(site, alerts, &fleet).await
}

/// Writes are refused by the webhooks; then storage-infra is cut off.
async fn are_refused(site: &Site, alerts: &Watch<'_>, fleet: &Fleet, in_management: &Webhook) -> Result<()> {
    let s = &site.s;
    refuses(site, fleet).await?;
    fleet.add_entries(s).await?;
    alerts.these_fire(|(_, job)| *job == SHIM).await?;
    site.links.infra.cut();
    in_management.remove().await?;
    let slow = ["NestorCallsSlow", "NestorAttachmentOperationsSlow"];
    let (driver, volume) = management_volume(site, fleet).await?;
    alerts
        .these_fire_while(
            |(name, _)| !slow.contains(name),
            || async {
                fleet.remove_zones(s).await?;
                get_volume(&driver, &volume).await
            },
        )
        .await
}

/// storage-infra hangs.
async fn hangs(site: &Site, alerts: &Watch<'_>, fleet: &Fleet) -> Result<()> {
    let s = &site.s;
    let (driver, volume) = management_volume(site, fleet).await?;
    let paused = s.pause_component(STORAGE_INFRA)?;
    fleet.remove_entries(s).await?;
    let request = new_volume(&s.csi_name(), 4 * MIB, "nestor");
    alerts
        .fire_while(|| async {
            let mut create = Request::new(request.clone());
            create.set_timeout(DEADLINE);
            let mut guest_driver = s.driver.calls();
            // Both fail at the deadline.
            let (_, got) = tokio::join!(guest_driver.create_volume(create), get_volume(&driver, &volume));
            got
        })
        .await?;
    drop(paused);
    fleet.are_attached(s, false).await
}

/// mgmt-csi, and a volume of it.
async fn management_volume(site: &Site, fleet: &Fleet) -> Result<(Driver, String)> {
    let driver = Driver::connect(&site.s.lab.mgmt_socket()?).await?;
    let (_, claim) = fleet.members.first().context("no VMs")?;
    Ok((driver, site.s.infra_volume(claim).await?.id.to_string()))
}

/// A call of mgmt-csi that needs storage-infra; it may fail.
async fn get_volume(driver: &Driver, volume: &str) -> Result<()> {
    let mut request = Request::new(ControllerGetVolumeRequest { volume_id: volume.to_owned() });
    request.set_timeout(DEADLINE);
    let _ = driver.calls().controller_get_volume(request).await;
    Ok(())
}

/// The connections of the controllers to both API servers are slow, while disks are attached and detached.
pub(super) async fn api_servers_are_slow(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let s = &site.s;
    let fleet = Fleet::new(s).await?;
    site.links.management.slow(DELAY);
    site.links.guest.slow(DELAY);
    alerts
        .fire_while(|| async {
            fleet.add_entries(s).await?;
            fleet.remove_zones(s).await?;
            fleet.remove_entries(s).await
        })
        .await?;
    site.links.open().await?;
    fleet.are_attached(s, false).await
}

/// A webhook of a cluster.
struct Webhook {
    api: Api<ValidatingWebhookConfiguration>,
    name: String,
}

impl Webhook {
    async fn new(client: &Client, rule: Value, conditions: Value) -> Result<Self> {
        let (api, name) = (Api::all(client.clone()), unique("unreachable"));
        let configuration = json!({
            "metadata": {"name": name},
            "webhooks": [{
                "name": "unreachable.test.nestor.dev", "rules": [rule], "matchConditions": conditions,
                "clientConfig": {"url": "https://127.0.0.1:1/"},
                "failurePolicy": "Fail", "sideEffects": "None", "timeoutSeconds": 1,
                "admissionReviewVersions": ["v1"],
            }],
        });
        api.create(&PostParams::default(), &serde_json::from_value(configuration)?).await?;
        Ok(Self { api, name })
    }

    async fn remove(&self) -> Result<()> {
        match self.api.delete(&self.name, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            removed => Ok(removed.map(drop)?),
        }
    }
}

/// Refuses VolumeAttachments.
async fn management_webhook(client: &Client) -> Result<Webhook> {
    let rule = json!({
        "apiGroups": ["nestor.dev"], "apiVersions": ["*"], "resources": ["volumeattachments"],
        "operations": ["CREATE"],
    });
    Webhook::new(client, rule, json!([])).await
}

/// Refuses zone labels.
async fn guest_webhook(client: &Client) -> Result<Webhook> {
    let rule =
        json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["nodes"], "operations": ["UPDATE"]});
    let user = "system:serviceaccount:kube-system:gc-csi-controller";
    let of_gc_csi =
        json!([{"name": "gc-csi", "expression": format!("request.userInfo.username == '{user}'")}]);
    Webhook::new(client, rule, of_gc_csi).await
}

/// Waits until the API server of the management cluster calls the webhook.
async fn refuses(site: &Site, fleet: &Fleet) -> Result<()> {
    let s = &site.s;
    let (node, claim) = fleet.members.first().context("no VMs")?;
    let attachment = serde_json::from_value(json!({
        "metadata": {"name": unique("refused")},
        "spec": {"nodeUUID": node.uuid.to_string(), "volumeName": claim, "readOnly": false},
    }))?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    eventually("the webhook refuses a VolumeAttachment", PATIENCE, || async {
        let made = s.attachments().create(&dry_run, &attachment).await;
        Ok(if let Ok(made) = made { Err(format!("{made:?}")) } else { Ok(()) })
    })
    .await
}
