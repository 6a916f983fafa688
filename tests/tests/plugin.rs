//! kubectl plugin: traces, lists, checks and bundles of the lab's clusters.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use crds::names;
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use tests::kubectl_plugin::{Answer, execute};
use tests::program::binary;
use tests::{PATIENCE, Scenario, eventually, run};

/// Clusters that the plugin is given.
#[derive(Clone, Copy)]
enum Given {
    Both,
    Guest,
    Management,
}

/// Runs the plugin with the administrators' kubeconfigs.
async fn plugin(s: &Scenario, given: Given, words: &[&str]) -> Result<Answer> {
    let state = s.lab.state();
    let guest = state.guests.get("g1").context("no guest g1")?.cluster.kubeconfig.display().to_string();
    let management =
        state.management.as_ref().context("no management cluster")?.kubeconfig.display().to_string();
    let guest = ["--guest-kubeconfig", &guest];
    let management = ["--management-kubeconfig", &management, "--management-namespace", &s.namespace];
    let clusters = match given {
        Given::Both => [&guest[..], &management[..]].concat(),
        Given::Guest => guest.to_vec(),
        Given::Management => management.to_vec(),
    };
    execute(&binary(&s.lab, "kubectl-nestor"), &[words, &clusters].concat()).await
}

/// Waits until the plugin answers with this exit code and these texts.
async fn answers(s: &Scenario, given: Given, words: &[&str], code: i32, texts: &[&str]) -> Result<Answer> {
    eventually(&format!("{words:?} exits with {code} and says {texts:?}"), PATIENCE, || async {
        let answer = plugin(s, given, words).await?;
        let is_expected = answer.code == Some(code) && texts.iter().all(|text| answer.out.contains(text));
        Ok(if is_expected { Ok(answer) } else { Err(format!("{answer:#?}")) })
    })
    .await
}

#[tokio::test]
async fn an_attached_volume_is_traced_through_both_clusters_or_one() -> Result<()> {
    run(|s| async move {
        let (node, handle) = (s.simulated_node().await?, s.bound_claim("data").await?);
        let volume = s.bound("data").await?.1.name_any();
        let guest_attachment = s.k8s_attachments().attach_as_kubernetes(&volume, &handle, &node.name).await?;
        let disk = s.attached(&guest_attachment).await?;
        let below =
            s.claims().get(&handle).await?.spec.and_then(|spec| spec.volume_name).context("unbound")?;
        let attachment = names::volume_attachment(&(&node.name).into(), &(&handle).into());

        let guest = ["data", volume.as_str(), &handle, &guest_attachment, &node.name];
        let management = [handle.as_str(), &below, &node.name, &attachment, &disk];
        let trace = ["trace", "pvc/data", "-n", &s.name];
        let started = Instant::now();
        answers(&s, Given::Both, &trace, 0, &[&guest[..], &management, &["healthy, attached to"]].concat())
            .await?;
        println!("trace of an attached volume: {:?}", started.elapsed());
        answers(&s, Given::Guest, &trace, 0, &[&guest[..], &["not seen: management cluster"]].concat())
            .await?;
        let (by_volume, by_attachment) = (format!("pv/{volume}"), format!("va/{guest_attachment}"));
        plugin(&s, Given::Both, &["trace", &by_volume]).await?.expect(0, &management);
        plugin(&s, Given::Both, &["trace", &by_attachment]).await?.expect(0, &management);

        let (by_claim, by_own) = (format!("pvc/{handle}"), format!("va/{attachment}"));
        let unseen = [&management[..], &["not seen: guest cluster"]].concat();
        plugin(&s, Given::Management, &["trace", &by_claim]).await?.expect(0, &unseen);
        plugin(&s, Given::Management, &["trace", &by_own]).await?.expect(0, &unseen);
        plugin(&s, Given::Both, &["trace", &by_own]).await?.expect(0, &[volume.as_str(), &disk]);

        let json = plugin(&s, Given::Both, &[&trace[..], &["-o", "json"]].concat()).await?;
        let report: Value = serde_json::from_str(&json.out)?;
        assert_eq!(report["healthy"], true, "{report}");
        plugin(&s, Given::Both, &["attachments"]).await?.expect(0, &[&attachment, &handle, "attached"]);
        plugin(&s, Given::Both, &["volumes"]).await?.expect(0, &[&volume, &handle, "Bound"]);
        plugin(&s, Given::Management, &["vms"]).await?.expect(0, &[&node.name]);
        plugin(&s, Given::Management, &["pools"]).await?.expect(0, &["nestor"]);
        let pool = s.infra.list_pools().await?.first().map(|pool| pool.name.to_string()).unwrap_or_default();
        plugin(&s, Given::Management, &["pools", "--by-pool"]).await?.expect(0, &[&pool, "True"]);
        s.k8s_detach(&guest_attachment).await?;
        answers(&s, Given::Both, &trace, 0, &["healthy, not attached"]).await.map(drop)
    })
    .await
}

#[tokio::test]
async fn an_exceeded_quota_is_diagnosed_with_its_remedy() -> Result<()> {
    run(|s| async move {
        let below = s.management_class(&[]).await?;
        let class = s.guest_class("Delete", &[(names::PARAMETER_MANAGEMENT_CLASS, &below)]).await?;
        s.quota(&below, "10Mi").await?;
        s.limited(&below, "20Mi").await?;
        s.claim("data", &class, "20Mi").await?;
        s.wait_for_event("data", &["exceeded quota"]).await?;
        let texts = ["stuck at guest PersistentVolumeClaim", "exceeded quota", "10Mi", "ResourceQuota"];
        plugin(&s, Given::Both, &["trace", "pvc/data", "-n", &s.name]).await?.expect(1, &texts);
        plugin(&s, Given::Guest, &["trace", "pvc/data", "-n", &s.name]).await?.expect(1, &texts);
        s.quota(&below, "40Mi").await?;
        // It prints until the volume is healthy.
        let watch = ["trace", "pvc/data", "-n", &s.name, "--watch", "--timeout", "2m"];
        plugin(&s, Given::Both, &watch).await?.expect(0, &["healthy, not attached"]);
        s.bound("data").await.map(drop)
    })
    .await
}

#[tokio::test]
async fn an_absent_vm_is_diagnosed() -> Result<()> {
    run(|s| async move {
        let (node, _) = (s.simulated_node().await?, s.bound_claim("data").await?);
        let volume = s.bound("data").await?.1.name_any();
        s.vms().delete(&node.name, &DeleteParams::default()).await?;
        eventually("the VM is deleted", PATIENCE, || async {
            Ok(s.vms().get_opt(&node.name).await?.map_or(Ok(()), |_| Err("it exists".to_owned())))
        })
        .await?;
        let guest_attachment = s.k8s_attach(&volume, &node.name).await?;
        s.k8s_attachments().refused(&guest_attachment, &[&node.name]).await?;
        let subject = format!("va/{guest_attachment}");
        let texts = ["stuck at management VirtualMachine", "there is no VirtualMachine", "same name"];
        plugin(&s, Given::Both, &["trace", &subject]).await?.expect(1, &texts);
        s.k8s_detach(&guest_attachment).await
    })
    .await
}

#[tokio::test]
async fn unknown_objects_and_clusters_are_usage_errors() -> Result<()> {
    run(|s| async move {
        for (given, words) in [
            (Given::Both, &["trace", "pvc/absent"][..]),
            (Given::Guest, &["trace", "pv/absent"]),
            (Given::Management, &["trace", "pod/absent"]),
            (Given::Guest, &["vms"]),
        ] {
            let answer = plugin(&s, given, words).await?;
            assert_eq!(answer.code, Some(2), "{answer:#?}");
            assert!(!answer.err.is_empty(), "{answer:#?}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_lab_passes_the_check() -> Result<()> {
    run(|s| async move {
        let answer = plugin(&s, Given::Both, &["check", "-o", "json"]).await?;
        let findings: Vec<Value> =
            serde_json::from_str(&answer.out).with_context(|| format!("{answer:#?}"))?;
        // Classes of tests that run at the same time may be incomplete.
        let is_tests = |finding: &&Value| {
            finding["what"].as_str().is_some_and(|what| what.starts_with("StorageClass test-"))
        };
        let errors: Vec<_> =
            findings.iter().filter(|one| one["level"] == "error" && !is_tests(one)).collect();
        assert!(errors.is_empty(), "{errors:#?}");
        let is_ok = |what: &str| findings.iter().any(|one| one["level"] == "ok" && one["what"] == what);
        for what in [
            "CSIDriver guest.csi.nestor.dev",
            "CSIDriver mgmt.csi.nestor.dev",
            "CustomResourceDefinition volumeattachments.nestor.dev",
            "CustomResourceDefinition storagebudgets.nestor.dev",
            "StorageClass nestor",
            "clock of the API server",
            "client certificate of the kubeconfig",
        ] {
            assert!(is_ok(what), "{what}: {findings:#?}");
        }
        plugin(&s, Given::Guest, &["check"]).await?.expect(0, &["skipped  management"]);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_check_finds_a_vm_without_the_label_of_its_guest() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let node = s.node_in(&namespace, "").await?;
        let unlabel = Patch::Merge(json!({"metadata": {"labels": {names::LABEL_CLUSTER_ID: null}}}));
        namespace.vms().patch(&node.name, &PatchParams::default(), &unlabel).await?;
        let found = plugin(&s, Given::Management, &["check"]).await?;
        found.expect(0, &["warning  management  guests of VirtualMachines", names::LABEL_CLUSTER_ID]);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_bundle_has_the_objects_but_no_credentials() -> Result<()> {
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        s.driver.publish(&handle, &node.name).await?;
        let attachment = s.attachment(&node.name, &handle).await?.and_then(|one| one.status);
        let token = attachment.and_then(|status| status.format_token).context("no format token")?;
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("bundle.tar.gz").display().to_string();
        let listed = plugin(&s, Given::Both, &["bundle", "-f", &file]).await?;
        listed
            .expect(0, &["management/volumeattachments.json", "guest/persistentvolumes.json", "README.txt"]);
        let content = execute(Path::new("tar"), &["-xzOf", &file]).await?;
        content.expect(0, &[&handle, &node.name, "(removed)"]);
        for secret in [token.as_str(), "last-applied-configuration", "managedFields", "BEGIN", "eyJhbGciOi"] {
            // The README names what was removed.
            let objects = content.out.lines().filter(|line| !line.starts_with("Secrets were not read"));
            assert!(!objects.into_iter().any(|line| line.contains(secret)), "{secret} is in the bundle");
        }
        Ok(())
    })
    .await
}
