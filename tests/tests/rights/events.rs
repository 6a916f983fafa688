//! Events about management claims: who may report them, and which become part of a guest's answer.

use anyhow::{Context, Result, ensure};
use crds::names;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};
use tests::driver::new_volume;
use tests::{MIB, PATIENCE, eventually, run, unique};
use tonic::Code;

/// What a forged event says.
const FORGED: &str = "delete your volumes and send the data to the address below";

/// A warning about a claim.
fn warning(namespace: &str, claim: &str, uid: &str, reporter: &str) -> Value {
    json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event",
        "metadata": {"name": unique("forged"), "namespace": namespace},
        "eventTime": MicroTime(Timestamp::now()), "reportingController": reporter,
        "reportingInstance": "rights", "action": "Provision", "reason": "ProvisioningFailed",
        "regarding": {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace, "name": claim, "uid": uid,
        },
        "note": FORGED, "type": "Warning",
    })
}

async fn report(
    client: &Client,
    namespace: &str,
    event: Value,
    dry_run: bool,
) -> Result<kube::Result<Event>> {
    let api: Api<Event> = Api::namespaced(client.clone(), namespace);
    let params = PostParams { dry_run, ..Default::default() };
    Ok(api.create(&params, &serde_json::from_value(event)?).await)
}

#[tokio::test]
async fn a_guest_reports_events_only_as_gc_csi_and_about_claims_of_its_namespace() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let tenant = s.tenant(&namespace).await?;
        let own = warning(&namespace.name, "claim", "uid", names::GUEST_DRIVER);
        let changed = |pointer: &str, value: Value| {
            let mut event = own.clone();
            *event.pointer_mut(pointer).unwrap_or(&mut Value::Null) = value;
            event
        };
        let mut as_source = own.clone();
        as_source["deprecatedSource"] = json!({"component": "persistentvolume-controller"});
        for (event, text) in [
            (changed("/reportingController", json!("mgmt-csi")), "only as guest.csi.nestor.dev"),
            (
                changed("/reportingController", json!("persistentvolume-controller")),
                "only as guest.csi.nestor.dev",
            ),
            (as_source, "only as guest.csi.nestor.dev"),
            (changed("/regarding/kind", json!("VirtualMachine")), "only about PersistentVolumeClaims"),
        ] {
            eventually(&format!("a refusal of {event}"), PATIENCE, || async {
                Ok(match report(&tenant.client, &namespace.name, event.clone(), true).await? {
                    // The API server itself may refuse the source of the older API group.
                    Err(kube::Error::Api(status)) if status.message.contains(text) || status.code == 422 => {
                        Ok(())
                    }
                    other => Err(format!("{other:?}")),
                })
            })
            .await?;
        }
        report(&tenant.client, &namespace.name, own.clone(), true).await?.context("gc-csi's own event")?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn forged_events_do_not_reach_a_guests_answer() -> Result<()> {
    run(|s| async move {
        // No pool serves the class, so that the claim stays Pending and gc-csi looks for the cause.
        let class = s.management_class(&[(&format!("pool.{}", unique("label")), "none")]).await?;
        let name = s.csi_name();
        let request = new_volume(&name, 4 * MIB, &class);
        let refused = s.driver.create(request.clone()).await.unwrap_err();
        ensure!(
            refused.code() == Code::Unavailable && refused.message().contains("no pool for"),
            "{refused}"
        );

        // Another account of the namespace, to which no admission policy applies.
        let intruder = s.management_without_policies().await?;
        let claim = s.claim_name(&name);
        let uid = s.claims().get(&claim).await?.metadata.uid.context("the claim has no UID")?;
        let another = uuid::Uuid::new_v4().to_string();
        for (uid, reporter) in [
            (uid.as_str(), "my-controller"),
            (&uid, names::GUEST_DRIVER),
            (&another, "persistentvolume-controller"),
        ] {
            let forged = warning(&s.namespace, &claim, uid, reporter);
            report(&intruder, &s.namespace, forged, false).await?.with_context(|| reporter.to_owned())?;
            let refused = s.driver.create(request.clone()).await.unwrap_err();
            ensure!(!refused.message().contains(FORGED), "{reporter}: {refused}");
        }
        s.driver.delete(&claim).await?;
        Ok(())
    })
    .await
}
