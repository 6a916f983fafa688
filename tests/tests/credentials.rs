//! Credentials: roles of the storage infra's clients, certificates that are renewed without a restart, and the guests' tokens,
//! which are renewed, and revoked by a rotation.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use infra_api::{
    Client, ClientError, ClientOptions, PoolName, ProblemCode, Role, SnapshotId, VolumeId, VolumeSpec,
};
use k8s_openapi::ByteString;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret, ServiceAccount};
use kube::api::{Api, ListParams, PostParams};
use lab::infra::BACKUP_ACCOUNT;
use lab::pki::{Authority, write_private};
use serde_json::{Value, json};
use tests::driver::{Driver, new_volume};
use tests::guest_token::TokenGuest;
use tests::infra_pki::{CLIENT, InfraPki, SERVER};
use tests::program::{Controller, Running, binary};
use tests::tenants::new_claim;
use tests::{MIB, PATIENCE, Scenario, eventually, run, run_alone, unique};

/// A client of the lab's storage infra with a role.
fn client(s: &Scenario, role: Role) -> Result<Client> {
    let infra = s.lab.state().infra.as_ref().context("the lab has no infra")?;
    Ok(Client::new(&ClientOptions::from_pki_dir(&infra.url, &infra.pki, role))?)
}

/// Checks that a call was refused because of the client's role, with these texts.
fn is_forbidden<T: std::fmt::Debug>(outcome: Result<T, ClientError>, texts: &[&str]) -> Result<()> {
    let error = outcome.err().context("the call succeeded")?;
    let problem = error.problem().with_context(|| format!("no problem: {error}"))?;
    let is_clear = texts.iter().all(|text| problem.detail.contains(text));
    ensure!(problem.status == 403 && problem.code == ProblemCode::Forbidden && is_clear, "{problem:?}");
    Ok(())
}

#[tokio::test]
async fn a_client_of_the_infra_does_what_its_role_allows() -> Result<()> {
    run(|s| async move {
        let handle = s.bound_claim("data").await?;
        let volume = s.infra_volume(&handle).await?.id;
        let reader = client(&s, Role::Reader)?;
        ensure!(reader.get_volume(&volume).await?.is_some());
        let others = ["role reader", "DELETE /v1/volumes/{id}", "nestor:driver or nestor:operator"];
        is_forbidden(reader.delete_volume(&volume).await, &others)?;
        ensure!(s.infra.get_volume(&volume).await?.is_some(), "the volume is gone");

        let driver = client(&s, Role::Driver)?;
        driver.list_pools().await?;
        let missing = PoolName::new("missing")?;
        is_forbidden(driver.delete_pool(&missing).await, &["role driver", "nestor:operator"])?;
        is_forbidden(driver.discard_saved_state(uuid::Uuid::new_v4()).await, &["role driver"])?;

        Ok(client(&s, Role::Operator)?.delete_pool(&missing).await?)
    })
    .await
}

/// A volume of the account of the lab's backup.
fn backed_up() -> Result<VolumeSpec> {
    let owner = json!({"account": BACKUP_ACCOUNT, "class": "nestor"});
    Ok(serde_json::from_value(json!({"capacityBytes": 4 * MIB, "owner": owner}))?)
}

/// What a backup does with a volume of its account. Its snapshot is deleted at the end.
async fn backs_up(backup: &Client, volume: &VolumeId) -> Result<()> {
    let listed = backup.list_volumes(None, None).await?.items;
    ensure!(listed.iter().any(|one| one.id == *volume), "its volume is missing: {listed:?}");
    ensure!(listed.iter().all(|one| one.owner.account.as_str() == BACKUP_ACCOUNT), "{listed:?}");
    let id = SnapshotId::new(unique("backup"))?;
    let spec = serde_json::from_value(json!({"volume": volume}))?;
    let snapshot = backup.put_snapshot(&id, &spec, PATIENCE).await?;
    ensure!(snapshot.owner.account.as_str() == BACKUP_ACCOUNT, "{snapshot:?}");
    backup.delete_snapshot(&id).await?;
    ensure!(backup.get_snapshot(&id).await?.is_none(), "the snapshot is still there");
    is_forbidden(backup.delete_volume(volume).await, &["role backup"])?;
    is_forbidden(backup.list_pools().await, &["role backup"])
}

#[tokio::test]
async fn a_backup_of_the_infra_reaches_the_volumes_of_its_account_only() -> Result<()> {
    run(|s| async move {
        let handle = s.bound_claim("data").await?;
        let of_a_guest = s.infra_volume(&handle).await?;
        ensure!(of_a_guest.owner.account.as_str() == s.cluster_id, "{of_a_guest:?}");
        let backup = client(&s, Role::Backup)?;
        ensure!(backup.get_volume(&of_a_guest.id).await?.is_none(), "it reads a volume of a guest");
        let own = VolumeId::new(unique("backed-up"))?;
        s.infra.put_volume(&own, &backed_up()?, PATIENCE).await?;
        let outcome = backs_up(&backup, &own).await;
        s.infra.delete_volume(&own).await?;
        outcome
    })
    .await
}

/// Starts a storage-infra of its own with certificates of an authority; returns it with its address.
async fn own_server(s: &Scenario, folder: &Path, without_role: &str) -> Result<(Running, String)> {
    let file = |name: &str| folder.join(name).display().to_string();
    let words = [
        "serve".to_owned(),
        "--log-format=json".to_owned(),
        "--listen=127.0.0.1:0".to_owned(),
        format!("--data-dir={}", file(&format!("data-{without_role}"))),
        format!("--tls-cert={}", file("server.crt")),
        format!("--tls-key={}", file("server.key")),
        format!("--client-ca={}", file("ca.crt")),
        format!("--hypervisor=loop=loop:{}", file("loop")),
        format!("--clients-without-role={without_role}"),
    ];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let server = Running::start(&binary(&s.lab, "storage-infra"), &words).await?;
    let address = eventually("the server serves", PATIENCE, || async {
        let log = server.log();
        let mut events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let serving = events.find(|event| event["message"] == "serving the API");
        let address = serving.and_then(|event| event["address"].as_str().map(str::to_owned));
        Ok(address.ok_or(log))
    })
    .await?;
    Ok((server, address))
}

#[tokio::test]
async fn a_certificate_without_a_role_is_refused_unless_the_server_says_otherwise() -> Result<()> {
    run(|s| async move {
        let folder = tempfile::tempdir()?;
        std::fs::create_dir(folder.path().join("loop"))?;
        let authority = Authority::new("of an earlier version")?;
        write_private(&folder.path().join("ca.crt"), &authority.cert())?;
        authority.server("storage-infra", &["127.0.0.1"])?.write(folder.path(), "server")?;
        let (cert, key) = authority.client("storage-infra client", None)?.write(folder.path(), "client")?;
        let (odd_cert, odd_key) =
            authority.client("odd", Some("nestor:root"))?.write(folder.path(), "odd")?;
        let ca = folder.path().join("ca.crt");

        let (refusing, address) = own_server(&s, folder.path(), "refuse").await?;
        let url = format!("https://{address}");
        let earlier = Client::new(&ClientOptions::from_files(&url, &ca, &cert, &key))?;
        is_forbidden(earlier.health().await, &["has no role", "storage-infra pki issue --role"])?;
        let (_, metrics) = refusing.get("/metrics").await?;
        ensure!(metrics.contains("nestor_storage_infra_requests_without_role_total 1"), "{metrics}");

        let (_allowing, address) = own_server(&s, folder.path(), "operator").await?;
        let url = format!("https://{address}");
        let earlier = Client::new(&ClientOptions::from_files(&url, &ca, &cert, &key))?;
        earlier.list_volumes(None, None).await?;
        let odd = Client::new(&ClientOptions::from_files(&url, &ca, &odd_cert, &odd_key))?;
        is_forbidden(odd.health().await, &["nestor:root"])?;
        let (cert, key) =
            authority.client("backup", [&*Role::Backup.organization()])?.write(folder.path(), "backup")?;
        let backup = Client::new(&ClientOptions::from_files(&url, &ca, &cert, &key))?;
        is_forbidden(backup.health().await, &["names none", "pki issue --role backup --account ACCOUNT"])
    })
    .await
}

/// Creates and deletes volumes with mgmt-csi until `stop`; returns how many. No call is repeated: the first failure is an error.
async fn create_and_delete(driver: Driver, stop: Arc<AtomicBool>, done: Arc<AtomicUsize>) -> Result<()> {
    while !stop.load(Ordering::SeqCst) {
        let mut request = new_volume(&unique("rotation"), 4 * MIB, "");
        request.parameters.clear();
        let volume = driver.create(request).await.context("create")?;
        driver.delete(&volume.volume_id).await.context("delete")?;
        done.fetch_add(1, Ordering::SeqCst);
    }
    Ok(())
}

#[tokio::test]
async fn certificates_and_the_ca_are_replaced_under_load_without_a_restart_or_a_failed_call() -> Result<()> {
    run_alone(|s| async move {
        let pki = InfraPki::of(&s)?;
        // The certificate of a client that does not take part in the rotation.
        let kept = tempfile::tempdir()?;
        for name in ["operator.crt", "operator.key"] {
            std::fs::copy(pki.dir.join(name), kept.path().join(name))?;
        }
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let driver = Driver::connect(&s.lab.mgmt_socket()?).await?;
        let load = tokio::spawn(create_and_delete(driver, stop.clone(), done.clone()));

        pki.begin_rotation().await?;
        pki.renew_all("30d").await?;
        // A second renewal, of the same CA.
        pki.renew_all("31d").await?;
        let before = done.load(Ordering::SeqCst);
        pki.run(&["rotate-ca", "--finish"]).await?;
        let url = &s.lab.state().infra.as_ref().context("the lab has no infra")?.url;
        let kept = |name: &str| kept.path().join(name);
        let options = ClientOptions::from_files(
            url,
            &pki.dir.join("ca.crt"),
            &kept("operator.crt"),
            &kept("operator.key"),
        );
        eventually("a certificate of the previous CA is refused", PATIENCE, || async {
            Ok(match Client::new(&options)?.health().await {
                Err(error) if error.problem().is_none() => Ok(()),
                other => Err(format!("{other:?}")),
            })
        })
        .await?;
        client(&s, Role::Operator)?.health().await.context("a certificate of the new CA")?;
        eventually("calls after the rotation", PATIENCE, || async {
            let now = done.load(Ordering::SeqCst);
            Ok(if now > before + 1 || load.is_finished() { Ok(()) } else { Err(format!("{now} calls")) })
        })
        .await?;
        stop.store(true, Ordering::SeqCst);
        load.await??;
        for certificate in [SERVER, CLIENT] {
            let expiry: f64 = pki.expiry(certificate).await?.parse()?;
            ensure!(expiry > 1_700_000_000.0, "{certificate:?}: {expiry}");
        }
        Ok(())
    })
    .await
}

/// Checks that the API server refuses a token.
async fn is_revoked(s: &Scenario, guest: &TokenGuest, token: &str) -> Result<()> {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(guest.client(s, token).await?, &guest.namespace);
    match claims.list(&ListParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 401 => Ok(()),
        other => anyhow::bail!("the token is accepted: {:?}", other.map(|list| list.items.len())),
    }
}

#[tokio::test]
async fn a_guests_token_is_renewed_without_a_restart_and_dies_by_a_rotation() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let guest = TokenGuest::create(&s, &namespace).await?;
        let _projection = guest.project(&s);
        let (kubeconfig, flag) = (guest.kubeconfig(), guest.flag(&s));
        let id = &guest.tenant.cluster_id;
        let controller = Controller::start_in(&s, &namespace.name, &kubeconfig, id, &[&flag]).await?;
        new_claim(&controller.driver).await.context("with the first token")?;
        let (_, metrics) = controller.process.get("/metrics").await?;
        let expiry = "nestor_gc_csi_management_credential_expiry_timestamp_seconds{} ";
        ensure!(metrics.lines().any(|line| line.starts_with(expiry)), "{metrics}");

        let stolen = guest.stored(&s).await?;
        guest.make_due(&s).await?;
        let renewed = guest.renewed(&s).await?;
        ensure!(renewed != stolen, "mgmt-csi created no other token");
        eventually("gc-csi stores the renewed token", PATIENCE, || async {
            let stored = guest.stored(&s).await?;
            Ok(if stored == renewed { Ok(()) } else { Err(controller.process.log()) })
        })
        .await?;
        new_claim(&controller.driver).await.context("with the renewed token")?;

        guest.rotate(&s).await?;
        for token in [&stolen, &renewed] {
            is_revoked(&s, &guest, token).await?;
        }
        let rotated = guest.stored(&s).await?;
        ensure!(rotated != renewed && rotated != stolen, "the token was not replaced");
        eventually("gc-csi creates a volume after the rotation", PATIENCE, || async {
            Ok(new_claim(&controller.driver).await.map_err(|error| format!("{error:#}")))
        })
        .await?;
        controller.process.ready().await?;
        controller.stop().await
    })
    .await
}

#[tokio::test]
async fn a_guest_creates_no_tokens_and_reads_no_other_secret() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let guest = TokenGuest::create(&s, &namespace).await?;
        let client = guest.client(&s, &guest.stored(&s).await?).await?;
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &namespace.name);
        let (params, request) = (PostParams::default(), TokenRequest::default());
        let created = accounts.create_token_request(&guest.account, &params, &request).await;
        let secrets: Api<Secret> = Api::namespaced(client, &namespace.name);
        secrets.get(&guest.secret_name()).await.context("its own token")?;
        let listed = secrets.list(&ListParams::default()).await.map(drop);
        let read = secrets.get("another").await.map(drop);
        for outcome in [created.map(drop), listed, read] {
            let refused = outcome.err().context("permitted")?;
            ensure!(matches!(&refused, kube::Error::Api(status) if status.code == 403), "{refused}");
        }
        Ok(())
    })
    .await
}

/// The token with an expiry in the past, which the API server refuses.
fn expired(token: &str) -> Result<String> {
    let [header, payload, signature] =
        token.split('.').collect::<Vec<_>>().try_into().map_err(|_| anyhow::anyhow!("no JSON Web Token"))?;
    let payload = payload.replace('-', "+").replace('_', "/");
    let padded = format!("{payload}{}", "=".repeat((4 - payload.len() % 4) % 4));
    let ByteString(bytes) = serde_json::from_value(json!(padded))?;
    let mut claims: Value = serde_json::from_slice(&bytes)?;
    claims["exp"] = json!(1_700_000_000);
    let encoded = serde_json::to_value(ByteString(claims.to_string().into_bytes()))?;
    let payload = encoded.as_str().context("no text")?.replace('+', "-").replace('/', "_");
    Ok(format!("{header}.{}.{signature}", payload.trim_end_matches('=')))
}

#[tokio::test]
async fn a_token_that_expired_during_a_long_stop_heals_by_a_rotation() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let guest = TokenGuest::create(&s, &namespace).await?;
        let old = expired(&guest.stored(&s).await?)?;
        guest.store(&s, &old).await?;
        std::fs::write(guest.kubeconfig().with_file_name("token"), old)?;
        let _projection = guest.project(&s);
        let process = guest.start_unready(&s).await?;
        let texts = ["management credential", "expired at 2023-11-14", "kubectl nestor guest rotate"];
        process.not_ready_because(&texts).await?;
        process.has_logged("expired at 2023-11-14").await?;
        guest.rotate(&s).await?;
        process.ready().await?;
        ensure!(process.stop().await?.success(), "gc-csi failed");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_volume_that_does_not_exist_is_forbidden_rather_than_missing() -> Result<()> {
    run(|s| async move {
        let missing = VolumeId::new("missing")?;
        is_forbidden(client(&s, Role::Reader)?.delete_volume(&missing).await, &["role reader"])
    })
    .await
}
