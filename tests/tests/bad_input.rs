//! Bad input: flags, files, credentials, objects, names and certificates, for each program.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use crds::names;
use infra_api::{ClientOptions, Role};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, PostParams};
use kube_kit::client::chain;
use serde_json::json;
use tests::driver::{Driver, new_volume};
use tests::program::{Running, binary, kubeconfig, run_to_end};
use tests::{MIB, PATIENCE, Scenario, eventually, run, unique};
use tonic::Code;

/// Each program with its server subcommand.
const SERVERS: [(&str, &[&str]); 6] = [
    ("gc-csi", &[]),
    ("gc-csi-node", &[]),
    ("mgmt-csi", &[]),
    ("vm-operator-shim", &[]),
    ("nestor-console", &[]),
    ("storage-infra", &["serve"]),
];

#[tokio::test]
async fn an_unknown_flag_is_a_usage_error_with_its_name() -> Result<()> {
    run(|s| async move {
        for (program, verb) in SERVERS {
            let arguments = [verb, &["--no-such-flag"]].concat();
            let ended = run_to_end(&binary(&s.lab, program), &arguments).await?;
            assert_eq!(ended.code, Some(2), "{program}: {}", ended.stderr);
            assert!(ended.stderr.contains("--no-such-flag"), "{program}: {}", ended.stderr);
            assert!(!ended.stderr.contains("panicked"), "{program}: {}", ended.stderr);
        }
        Ok(())
    })
    .await
}

/// A program that connects to a cluster, with a bad kubeconfig in one of its flags.
struct Case {
    program: &'static str,
    flag: &'static str,
    arguments: Vec<String>,
}

/// Each program that takes a kubeconfig, with `wrong` in one flag and correct values in the others.
fn with_kubeconfig(s: &Scenario, folder: &std::path::Path, wrong: &str) -> Result<Vec<Case>> {
    let state = s.lab.state().clone();
    let management = state.management.context("the lab has no management cluster")?;
    let guest = state.guests.get("g1").context("the lab has no guest g1")?;
    let infra = state.infra.context("the lab has no infra")?;
    let endpoint = || format!("unix://{}", folder.join(unique("csi")).display());
    let pki = |file: &str| infra.pki.join(file).display().to_string();
    let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let guest_config = guest.cluster.kubeconfig_of("gc-csi-controller").display().to_string();
    let own_config = management.kubeconfig_of(&guest.account()).display().to_string();
    let controller = |guest_config: &str, own_config: &str| {
        owned(&[
            "--endpoint",
            &endpoint(),
            "--guest-kubeconfig",
            guest_config,
            "--management-kubeconfig",
            own_config,
            "--management-namespace",
            &guest.namespace,
            "--cluster-id",
            &guest.cluster_id,
        ])
    };
    Ok(vec![
        Case {
            program: "gc-csi",
            flag: "--management-kubeconfig",
            arguments: controller(&guest_config, wrong),
        },
        Case { program: "gc-csi", flag: "--guest-kubeconfig", arguments: controller(wrong, &own_config) },
        Case {
            program: "mgmt-csi",
            flag: "--kubeconfig",
            arguments: owned(&[
                "--endpoint",
                &endpoint(),
                "--kubeconfig",
                wrong,
                "--infra-url",
                &infra.url,
                "--infra-ca",
                &pki("ca.crt"),
                "--infra-cert",
                &pki("driver.crt"),
                "--infra-key",
                &pki("driver.key"),
            ]),
        },
        Case {
            program: "vm-operator-shim",
            flag: "--kubeconfig",
            arguments: owned(&["--kubeconfig", wrong]),
        },
        Case { program: "nestor-console", flag: "--kubeconfig", arguments: owned(&["--kubeconfig", wrong]) },
    ])
}

fn words(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

#[tokio::test]
async fn a_bad_kubeconfig_ends_the_process_with_an_error_that_names_file_and_flag() -> Result<()> {
    run(|s| async move {
        let folder = tempfile::tempdir()?;
        let missing = folder.path().join("missing.kubeconfig");
        let garbage = folder.path().join("garbage.kubeconfig");
        std::fs::write(&garbage, "clusters: [")?;
        let empty = folder.path().join("empty.kubeconfig");
        std::fs::write(&empty, "")?;
        for wrong in [missing, garbage, empty] {
            let wrong = wrong.display().to_string();
            for case in with_kubeconfig(&s, folder.path(), &wrong)? {
                let ended = run_to_end(&binary(&s.lab, case.program), &words(&case.arguments)).await?;
                let what = format!("{} {} {wrong}: {}", case.program, case.flag, ended.stderr);
                assert_eq!(ended.code, Some(1), "{what}");
                let line = ended.stderr.lines().last().unwrap_or_default();
                assert!(line.contains(&wrong) && line.contains(case.flag), "{what}");
                assert!(!ended.stderr.contains("panicked"), "{what}");
            }
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_bad_tls_file_of_storage_infra_is_named_with_its_flag() -> Result<()> {
    run(|s| async move {
        let folder = tempfile::tempdir()?;
        let garbage = folder.path().join("garbage.pem");
        std::fs::write(&garbage, "no certificate")?;
        let state = s.lab.state().clone();
        let pki = state.infra.context("the lab has no infra")?.pki;
        let file = |name: &str| pki.join(name).display().to_string();
        for flag in ["--tls-cert", "--tls-key", "--client-ca"] {
            for wrong in [garbage.display().to_string(), folder.path().join("missing").display().to_string()]
            {
                let chosen = |name: &'static str, own: &str| {
                    if name == flag { wrong.clone() } else { file(own) }
                };
                let arguments = [
                    "serve".to_owned(),
                    "--data-dir".to_owned(),
                    folder.path().join("data").display().to_string(),
                    "--listen".to_owned(),
                    "127.0.0.1:0".to_owned(),
                    "--tls-cert".to_owned(),
                    chosen("--tls-cert", "server.crt"),
                    "--tls-key".to_owned(),
                    chosen("--tls-key", "server.key"),
                    "--client-ca".to_owned(),
                    chosen("--client-ca", "ca.crt"),
                    "--hypervisor".to_owned(),
                    format!("loop=loop:{}", folder.path().display()),
                ];
                let ended = run_to_end(&binary(&s.lab, "storage-infra"), &words(&arguments)).await?;
                let what = format!("{flag} {wrong}: {}", ended.stderr);
                assert_eq!(ended.code, Some(1), "{what}");
                assert!(ended.stderr.contains(&wrong) && ended.stderr.contains(flag), "{what}");
            }
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_unreachable_cluster_is_reported_on_readyz_while_the_process_waits() -> Result<()> {
    run(|s| async move {
        let folder = tempfile::tempdir()?;
        let unreachable = folder.path().join("unreachable.kubeconfig");
        // Nothing listens on port 1.
        kubeconfig(&unreachable, "https://127.0.0.1:1", None, "token")?;
        refused_as_not_ready(&s, folder.path(), unreachable, &["127.0.0.1:1"]).await
    })
    .await
}

#[tokio::test]
async fn refused_credentials_are_reported_on_readyz() -> Result<()> {
    run(|s| async move {
        let folder = tempfile::tempdir()?;
        let state = s.lab.state().clone();
        let management = state.management.context("the lab has no management cluster")?;
        let stale = folder.path().join("stale.kubeconfig");
        kubeconfig(&stale, &management.server, Some(&management.ca), "no-such-token")?;
        refused_as_not_ready(&s, folder.path(), stale, &["Unauthorized"]).await
    })
    .await
}

/// Checks that every program with this kubeconfig runs, reports why it is not ready, and exits cleanly.
async fn refused_as_not_ready(
    s: &Scenario,
    folder: &std::path::Path,
    config: PathBuf,
    texts: &[&str],
) -> Result<()> {
    for case in with_kubeconfig(s, folder, &config.display().to_string())? {
        let program = binary(&s.lab, case.program);
        let what = format!("{} {}", case.program, case.flag);
        let running = Running::start(&program, &words(&case.arguments)).await?;
        running.not_ready_because(texts).await.with_context(|| what.clone())?;
        let (alive, _) = running.get("/healthz").await?;
        assert_eq!(alive, 200, "{what}: a restart cannot help");
        let status = running.stop().await.with_context(|| what.clone())?;
        assert!(status.success(), "{what} exited with {status}");
    }
    Ok(())
}

#[tokio::test]
async fn malformed_objects_do_not_affect_others() -> Result<()> {
    run(|s| async move {
        let odd = unique("odd");
        let attachments: Api<DynamicObject> = Api::namespaced_with(
            s.management.clone(),
            &s.namespace,
            &kube::core::ApiResource::erase::<crds::VolumeAttachment>(&()),
        );
        let attachment = |name: &str, node: &str, volume: &str| {
            json!({
                "apiVersion": "nestor.dev/v1alpha1", "kind": "VolumeAttachment",
                "metadata": {"name": format!("{odd}-{name}"), "labels": {"test": odd}},
                "spec": {"nodeUUID": node, "volumeName": volume},
            })
        };
        let somewhere = uuid::Uuid::new_v4().to_string();
        for one in [
            attachment("node", "no uuid at all ../", "absent"),
            attachment("volume", &somewhere, &"x".repeat(253)),
            attachment("path", &somewhere, "../../etc/passwd"),
            attachment(&"l".repeat(200), &somewhere, "absent"),
        ] {
            attachments.create(&PostParams::default(), &serde_json::from_value(one)?).await?;
        }
        let vms = s.raw_vms();
        let vm = |name: &str, spec: serde_json::Value| {
            json!({
                "apiVersion": format!("vmoperator.vmware.com/{}", crds::VIRTUAL_MACHINE_VERSIONS[0]),
                "kind": "VirtualMachine",
                "metadata": {"name": format!("{odd}-{name}"), "labels": {"test": odd}},
                "spec": spec,
            })
        };
        let long = "n".repeat(253);
        let claim = |name: &str| json!({"name": name, "persistentVolumeClaim": {"claimName": "absent"}});
        for one in [
            // Without status, so its UUID is unknown.
            vm("bare", json!({"volumes": [claim("a")]})),
            vm("foreign", json!({"className": {"deep": [1, null, {}]}, "volumes": [{"name": "iso", "cdrom": 7}]})),
            vm("long", json!({"volumes": [claim(&long), {"name": "", "persistentVolumeClaim": {"claimName": ""}}]})),
        ] {
            vms.create(&PostParams::default(), &serde_json::from_value(one)?).await?;
        }
        let strange = json!({"status": {"biosUUID": "not a uuid", "powerState": "Melting",
            "volumes": [{"name": "ghost", "attached": true, "diskUUID": "", "error": "", "extra": {"a": [1]}}]}});
        for name in ["foreign", "long"] {
            let patch = kube::api::Patch::Merge(&strange);
            vms.patch_status(&format!("{odd}-{name}"), &Default::default(), &patch).await?;
        }

        // A regular attach and detach beside these objects.
        let (node, handle) = (s.node().await?, s.volume().await?);
        s.driver.publish(&handle, &node.name).await?;
        s.driver.unpublish(&handle, &node.name).await?;

        for (name, text) in [("node", "not a UUID"), ("volume", "does not exist in the management cluster")] {
            let name = format!("{odd}-{name}");
            eventually(&format!("VolumeAttachment {name} has an error"), PATIENCE, || async {
                let attachment = s.attachments().get(&name).await?;
                let error = attachment.status.and_then(|status| status.error).map(|error| error.message);
                Ok(match error {
                    Some(error) if error.contains(text) || error.contains("absent") => Ok(()),
                    other => Err(format!("{other:?}")),
                })
            })
            .await?;
        }
        let short = Duration::from_secs(3);
        let refused = s.driver.publish_within(&handle, &format!("{odd}-bare"), short).await;
        assert!(refused.is_err(), "a disk was attached to a VM without a UUID");
        s.remove_entries(&format!("{odd}-bare"), |_| true).await?;

        let own = ListParams::default().labels(&format!("test={odd}"));
        vms.delete_collection(&DeleteParams::default(), &own).await?;
        attachments.delete_collection(&DeleteParams::default(), &own).await?;
        eventually("the malformed objects are deleted", PATIENCE, || async {
            let left = attachments.list(&own).await?.items.len() + vms.list(&own).await?.items.len();
            Ok(if left == 0 { Ok(()) } else { Err(format!("{left} left")) })
        })
        .await
    })
    .await
}

#[tokio::test]
async fn overlong_and_odd_names_are_refused_or_hashed() -> Result<()> {
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        let endless = "v".repeat(300);
        for refused in [
            s.driver.delete(&endless).await.unwrap_err(),
            s.driver.delete("").await.unwrap_err(),
            s.driver.publish(&endless, &node.name).await.unwrap_err(),
            s.driver.publish(&handle, &endless).await.unwrap_err(),
            s.driver.publish(&handle, "").await.unwrap_err(),
            s.driver.unpublish(&endless, &node.name).await.unwrap_err(),
            s.driver.unpublish(&handle, &endless).await.unwrap_err(),
            s.driver.create(new_volume("", MIB, "nestor")).await.unwrap_err(),
            s.driver.create(new_volume(&s.csi_name(), i64::MIN, "nestor")).await.unwrap_err(),
        ] {
            assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        }
        for odd in ["../../etc/passwd", "a b", "Ünï", ".", "-", "a\0b"] {
            s.driver.delete(odd).await.with_context(|| format!("{odd:?}"))?;
            let refused = s.driver.publish(odd, &node.name).await.unwrap_err();
            assert_eq!(refused.code(), Code::NotFound, "{odd:?}: {refused}");
            let refused = s.driver.publish(&handle, odd).await.unwrap_err();
            assert_eq!(refused.code(), Code::NotFound, "{odd:?}: {refused}");
            s.driver.unpublish(odd, &node.name).await.with_context(|| format!("{odd:?}"))?;
            s.driver.unpublish(&handle, odd).await.with_context(|| format!("{odd:?}"))?;
        }
        let name = s.own(&format!("{}{}", s.name, "n".repeat(300)));
        s.driver.create(new_volume(&name, MIB, "nestor")).await?;

        let mgmt_csi = Driver::connect(&s.lab.mgmt_socket()?).await?;
        let refused = mgmt_csi.delete(&endless).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        for odd in ["../../etc/passwd", "a b", "Ünï"] {
            mgmt_csi.delete(odd).await.with_context(|| format!("{odd:?}"))?;
        }
        let mut request = new_volume(&format!("{}/../ü", s.name), MIB, "");
        request.parameters.clear();
        let made = mgmt_csi.create(request.clone()).await?;
        assert_eq!(mgmt_csi.create(request).await?, made);
        mgmt_csi.delete(&made.volume_id).await?;
        // Both drivers still serve.
        s.driver.publish(&handle, &node.name).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn clients_without_a_certificate_of_the_infra_are_refused() -> Result<()> {
    run(|s| async move {
        let state = s.lab.state().clone();
        let infra = state.infra.context("the lab has no infra")?;
        let mut options = ClientOptions::from_pki_dir(&infra.url, &infra.pki, Role::Operator);
        (options.connect_timeout, options.timeout) = (PATIENCE, PATIENCE);
        infra_api::Client::new(&options)?.health().await.context("the right certificate is accepted")?;

        // Self-signed, with the name of the right client.
        let key = rcgen::KeyPair::generate()?;
        let own = rcgen::CertificateParams::new(vec!["client".to_owned()])?.self_signed(&key)?;
        let folder = tempfile::tempdir()?;
        let (own_cert, own_key) = (folder.path().join("own.crt"), folder.path().join("own.key"));
        std::fs::write(&own_cert, own.pem())?;
        std::fs::write(&own_key, key.serialize_pem())?;
        let stranger = ClientOptions { cert: own_cert.clone(), key: own_key, ..options.clone() };
        let refused = infra_api::Client::new(&stranger)?.health().await.unwrap_err();
        let text = chain(&refused);
        assert!(refused.problem().is_none(), "expected a TLS error, not a response: {text}");

        // Our client refuses a server with a certificate of another authority.
        let elsewhere = ClientOptions { ca: own_cert, ..options };
        let refused = infra_api::Client::new(&elsewhere)?.health().await.unwrap_err();
        assert!(chain(&refused).to_lowercase().contains("certificate"), "{}", chain(&refused));
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_claim_of_another_guest_is_not_found() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let name = unique("stranger");
        let claim = json!({
            "metadata": {"name": name, "labels": {names::LABEL_CLUSTER_ID: "another-guest"}},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
                "resources": {"requests": {"storage": "1Mi"}},
            },
        });
        s.claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
        let refused = s.driver.publish(&name, &node.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::NotFound, "{refused}");
        s.driver.delete(&name).await?;
        assert!(s.claims().get(&name).await?.metadata.deletion_timestamp.is_none(), "the claim was deleted");
        s.claims().delete(&name, &DeleteParams::default()).await?;
        eventually("the other guest's claim is deleted", PATIENCE, || async {
            Ok(s.claims().get_opt(&name).await?.map_or(Ok(()), |_| Err("it exists".to_owned())))
        })
        .await
    })
    .await
}
