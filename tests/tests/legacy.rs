//! Volumes of an earlier driver, served by gc-csi under that driver's name: they keep working, and new ones are refused.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use crds::names;
use csi::proto::identity_client::IdentityClient;
use csi::proto::node_client::NodeClient;
use csi::proto::volume_capability::{AccessType, access_mode::Mode};
use csi::proto::volume_usage::Unit;
use csi::proto::{
    CapacityRange, ControllerExpandVolumeRequest, GetPluginInfoRequest, NodeExpandVolumeRequest,
    NodeGetInfoRequest, NodeGetVolumeStatsRequest, NodePublishVolumeRequest, NodeStageVolumeRequest,
    NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, VolumeCapability,
};
use csi::registration::proto::InfoRequest;
use csi::registration::proto::registration_client::RegistrationClient;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, PostParams};
use lab::LoopNode;
use serde_json::json;
use tests::driver::{Driver, mount, new_volume};
use tests::guest::static_volume;
use tests::program::{Controller, Running, binary};
use tests::{MIB, PATIENCE, Scenario, eventually, run, unique};
use tonic::{Code, Request};

/// A unique name of an earlier driver.
fn earlier() -> String {
    format!("{}.csi.example.com", unique("old"))
}

/// A gc-csi controller that also serves the name of an earlier driver.
struct Serving {
    controller: Controller,
    /// The Controller service under the earlier name.
    legacy: Driver,
    /// The socket of that service.
    socket: PathBuf,
}

async fn serve(s: &Scenario, name: &str) -> Result<Serving> {
    let name = format!("--legacy-driver-name={name}");
    let controller = Controller::start(s, &[&name, "--legacy-endpoint=unix://${FOLDER}/legacy.sock"]).await?;
    let socket = controller.socket("legacy.sock");
    let legacy = eventually("the earlier driver's name is served", PATIENCE, || async {
        Ok(Driver::connect(&socket).await.map_err(|error| format!("{error:#}")))
    })
    .await?;
    Ok(Serving { controller, legacy, socket })
}

/// The name that a driver reports on a socket.
async fn name_on(socket: &Path) -> Result<String> {
    let mut identity = IdentityClient::new(csi::client::connect(socket).await?);
    Ok(identity.get_plugin_info(GetPluginInfoRequest {}).await?.into_inner().name)
}

/// The driver name and endpoint that a registration socket reports to kubelet.
async fn registered_on(socket: &Path) -> Result<(String, String)> {
    let mut registration = RegistrationClient::new(csi::client::connect(socket).await?);
    let info = registration.get_info(InfoRequest {}).await?.into_inner();
    Ok((info.name, info.endpoint))
}

#[tokio::test]
async fn each_socket_reports_its_name_and_new_volumes_are_refused_with_the_class_to_use() -> Result<()> {
    run(|s| async move {
        // Created before the driver starts, so that its cache has the classes.
        let (management_class, guest_class) = s.classes(&[]).await?;
        let name = earlier();
        let serving = serve(&s, &name).await?;
        assert_eq!(name_on(&serving.controller.socket("csi.sock")).await?, names::GUEST_DRIVER);
        assert_eq!(name_on(&serving.socket).await?, name);

        let texts = [name.as_str(), names::GUEST_DRIVER, &guest_class];
        let refused =
            serving.legacy.create(new_volume(&s.csi_name(), MIB, &management_class)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(texts.iter().all(|text| refused.message().contains(text)), "{refused}");
        // The same process creates the volume under its own name.
        serving.controller.driver.create(new_volume(&s.csi_name(), MIB, &management_class)).await?;

        // The error is reported on the claim.
        let legacy_class = s.guest_class_of(&name, "Delete", &[("storagePolicy", &management_class)]).await?;
        let _provisioner =
            Running::sidecar(&s, "csi-provisioner", &serving.socket, &["--immediate-topology=false"]).await?;
        s.claim("data", &legacy_class, "1Mi").await?;
        let (reason, _) = s.wait_for_event("data", &texts).await?;
        assert_eq!(reason, "ProvisioningFailed");
        serving.controller.stop().await
    })
    .await
}

/// A bound guest claim `data` with a PersistentVolume of the earlier driver; its handle is the name of a management
/// claim.
async fn made_by(s: &Scenario, driver: &str, handle: &str) -> Result<PersistentVolume> {
    let class = s.guest_class_of(driver, "Delete", &[]).await?;
    let spec = json!({
        "storageClassName": class, "persistentVolumeReclaimPolicy": "Delete", "csi": {"driver": driver},
    });
    let mut volume = static_volume(&unique(&s.name), &s.name, handle, &spec)?;
    volume.annotations_mut().insert("pv.kubernetes.io/provisioned-by".to_owned(), driver.to_owned());
    let volume = s.guest_volumes().create(&PostParams::default(), &volume).await?;
    s.claim_with("data", &class, "4Mi", json!({"volumeName": volume.name_any()})).await?;
    Ok(s.bound("data").await?.1)
}

#[tokio::test]
async fn sidecars_attach_expand_and_delete_a_volume_of_the_earlier_driver() -> Result<()> {
    run(|s| async move {
        let name = earlier();
        let serving = serve(&s, &name).await?;
        let socket = serving.socket.as_path();
        let _provisioner =
            Running::sidecar(&s, "csi-provisioner", socket, &["--immediate-topology=false"]).await?;
        let _attacher = Running::sidecar(&s, "csi-attacher", socket, &[]).await?;
        let _resizer =
            Running::sidecar(&s, "csi-resizer", socket, &["--handle-volume-inuse-error=false"]).await?;

        let handle = s.volume().await?;
        let volume = made_by(&s, &name, &handle).await?.name_any();
        let node = s.node().await?;
        join_as(&s, &node, &name).await?;
        let attachment = s.k8s_attachments().attach_by(&name, &volume, &node.name).await?;
        let disk = s.attached(&attachment).await?;
        assert_eq!(s.infra_volume(&handle).await?.disk_uuid.to_string(), disk);
        s.wait_for_event("data", &["attached to VirtualMachine", &node.name]).await?;

        s.request("data", "8Mi").await?;
        eventually("the volume is expanded", PATIENCE, || async {
            let spec = s.guest_volumes().get(&volume).await?.spec.unwrap_or_default();
            let size = spec.capacity.and_then(|all| all.get("storage").map(|size| size.0.clone()));
            Ok(match size.as_deref() {
                Some("8Mi") => Ok(()),
                _ => Err(format!("{size:?}; events: {:?}", s.events("data").await?)),
            })
        })
        .await?;
        assert_eq!(s.infra_volume(&handle).await?.capacity_bytes, 8 << 20);

        s.k8s_detach(&attachment).await?;
        s.no_attachments(&node).await?;
        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        eventually("the guest volume is deleted", PATIENCE, || async {
            let left = s.guest_volumes().get_opt(&volume).await?;
            let events = s.events_of("PersistentVolume", &volume).await?;
            Ok(left.map_or(Ok(()), |volume| Err(format!("{:?}; events: {events:?}", volume.status))))
        })
        .await?;
        s.no_leftovers().await?;
        serving.controller.stop().await
    })
    .await
}

#[tokio::test]
async fn a_disk_attached_under_both_names_is_detached_with_the_last_of_them() -> Result<()> {
    run(|s| async move {
        let name = earlier();
        let serving = serve(&s, &name).await?;
        let handle = s.volume().await?;
        let volume = made_by(&s, &name, &handle).await?.name_any();
        let node = s.node().await?;
        join_as(&s, &node, &name).await?;
        let own = &serving.controller.driver;
        let disk = own.publish(&handle, &node.name).await?;
        // No sidecar serves this attachment: the test makes the calls.
        let attachment = s.k8s_attachments().attach_by(&name, &volume, &node.name).await?;
        assert_eq!(serving.legacy.publish(&handle, &node.name).await?, disk);

        own.unpublish(&handle, &node.name).await?;
        let stays = s.disk(&node.name, &handle).await?;
        assert!(
            stays.is_some_and(|disk| disk.attached),
            "the disk was detached from the pods of the other name"
        );
        assert_eq!(serving.legacy.publish(&handle, &node.name).await?, disk);

        s.k8s_detach(&attachment).await?;
        serving.legacy.unpublish(&handle, &node.name).await?;
        s.no_attachments(&node).await?;
        serving.controller.stop().await
    })
    .await
}

/// Adds a node to its guest, with the earlier driver in its CSINode.
async fn join_as(s: &Scenario, node: &LoopNode, driver: &str) -> Result<()> {
    s.lab.join_guest(node).await?;
    let nodes: Api<CSINode> = Api::all(s.guest.clone());
    let mut known = nodes.get(&node.name).await?;
    let also =
        CSINodeDriver { name: driver.to_owned(), node_id: node.name.clone(), ..CSINodeDriver::default() };
    known.spec.drivers.push(also);
    nodes.replace(&node.name, &PostParams::default(), &known).await?;
    Ok(())
}

/// Unmounts everything below a folder, so that a failed test does not leave a disk in use.
struct Mounts(PathBuf);

impl Drop for Mounts {
    fn drop(&mut self) {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
        for point in points.filter(|point| point.starts_with(&self.0)).collect::<Vec<_>>().iter().rev() {
            let _ = rustix::mount::unmount(point, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

#[tokio::test]
async fn a_volume_of_the_earlier_driver_works_through_the_earlier_sockets_of_controller_and_node()
-> Result<()> {
    run(|s| async move {
        let name = earlier();
        let serving = serve(&s, &name).await?;
        let handle = {
            let request = new_volume(&s.csi_name(), 320 * MIB, "nestor");
            s.driver.create(request).await?.volume_id
        };
        let vm = s.node().await?;
        let folder = tempfile::tempdir()?;
        let _mounts = Mounts(folder.path().canonicalize()?);
        let plugin = node_plugin(&s, &vm, folder.path(), &name).await?;
        let path = |file: &str| folder.path().join(file);
        assert_eq!(name_on(&path("csi.sock")).await?, names::GUEST_DRIVER);
        assert_eq!(name_on(&path("legacy.sock")).await?, name);
        for (socket, driver, expected) in
            [("reg.sock", names::GUEST_DRIVER, "csi.sock"), ("legacy-reg.sock", &name, "legacy.sock")]
        {
            let (registered, endpoint) = registered_on(&path(socket)).await?;
            assert_eq!((registered.as_str(), Path::new(&endpoint)), (driver, path(expected).as_path()));
        }
        let mut node = NodeClient::new(csi::client::connect(&path("legacy.sock")).await?);
        assert_eq!(node.node_get_info(NodeGetInfoRequest {}).await?.into_inner().node_id, vm.name);

        let context = serving.legacy.publish_context(&handle, &vm.name).await?;
        let text = |file: &str| path(file).display().to_string();
        std::fs::create_dir_all(path("kubelet/plugins/volume"))?;
        std::fs::create_dir_all(path("kubelet/pods/pod"))?;
        let (staging, target) = (text("kubelet/plugins/volume/globalmount"), text("kubelet/pods/pod/mount"));
        node.node_stage_volume(NodeStageVolumeRequest {
            volume_id: handle.clone(),
            publish_context: context.clone(),
            staging_target_path: staging.clone(),
            volume_capability: Some(xfs()),
            ..Default::default()
        })
        .await?;
        node.node_publish_volume(NodePublishVolumeRequest {
            volume_id: handle.clone(),
            publish_context: context.clone(),
            staging_target_path: staging.clone(),
            target_path: target.clone(),
            volume_capability: Some(xfs()),
            ..Default::default()
        })
        .await?;
        std::fs::write(Path::new(&target).join("file"), "kept")?;

        let range = CapacityRange { required_bytes: 640 * MIB, limit_bytes: 0 };
        let mut expand = Request::new(ControllerExpandVolumeRequest {
            volume_id: handle.clone(),
            capacity_range: Some(range),
            volume_capability: Some(xfs()),
            ..Default::default()
        });
        expand.set_timeout(PATIENCE);
        let expanded = serving.legacy.calls().controller_expand_volume(expand).await?.into_inner();
        assert_eq!((expanded.capacity_bytes, expanded.node_expansion_required), (640 * MIB, true));
        node.node_expand_volume(NodeExpandVolumeRequest {
            volume_id: handle.clone(),
            volume_path: target.clone(),
            staging_target_path: staging.clone(),
            capacity_range: Some(range),
            volume_capability: Some(xfs()),
            ..Default::default()
        })
        .await?;
        let stats = NodeGetVolumeStatsRequest {
            volume_id: handle.clone(),
            volume_path: target.clone(),
            ..Default::default()
        };
        let usage = node.node_get_volume_stats(stats).await?.into_inner().usage;
        let bytes = usage.iter().find(|usage| usage.unit == Unit::Bytes as i32).context("no bytes")?;
        assert!(bytes.total > 500 * MIB, "{bytes:?}");
        assert_eq!(std::fs::read_to_string(Path::new(&target).join("file"))?, "kept");

        let unpublish = NodeUnpublishVolumeRequest { volume_id: handle.clone(), target_path: target.clone() };
        node.node_unpublish_volume(unpublish).await?;
        let unstage = NodeUnstageVolumeRequest { volume_id: handle.clone(), staging_target_path: staging };
        node.node_unstage_volume(unstage).await?;
        serving.legacy.unpublish(&handle, &vm.name).await?;
        s.no_attachments(&vm).await?;
        serving.legacy.delete(&handle).await?;
        assert!(s.claims().get_opt(&handle).await?.is_none());
        let status = plugin.stop().await?;
        assert!(status.success(), "the node plugin exited with {status}");
        serving.controller.stop().await
    })
    .await
}

/// Starts gc-csi-node for a loop node under both names, with its sockets in a folder.
async fn node_plugin(s: &Scenario, vm: &LoopNode, folder: &Path, legacy: &str) -> Result<Running> {
    let inside = |file: &str| folder.join(file).display().to_string();
    std::fs::create_dir_all(folder.join("kubelet"))?;
    let words = [
        format!("--node-name={}", vm.name),
        format!("--kubelet-dir={}", inside("kubelet")),
        format!("--by-id-dir={}", vm.by_id_dir.display()),
        format!("--endpoint=unix://{}", inside("csi.sock")),
        format!("--registration-socket={}", inside("reg.sock")),
        format!("--legacy-driver-name={legacy}"),
        format!("--legacy-endpoint=unix://{}", inside("legacy.sock")),
        format!("--legacy-registration-socket={}", inside("legacy-reg.sock")),
    ];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let plugin = Running::start(&binary(&s.lab, "gc-csi-node"), &words).await?;
    for socket in ["csi.sock", "reg.sock", "legacy.sock", "legacy-reg.sock"] {
        eventually(&format!("the node plugin serves {socket}"), PATIENCE, || async {
            let connected = csi::client::connect(&folder.join(socket)).await;
            Ok(connected.map(drop).map_err(|error| format!("{error}; {}", plugin.log())))
        })
        .await?;
    }
    Ok(plugin)
}

/// A filesystem that can be expanded while it is mounted.
fn xfs() -> VolumeCapability {
    let mut capability = mount(Mode::SingleNodeWriter);
    if let Some(AccessType::Mount(mount)) = &mut capability.access_type {
        mount.fs_type = "xfs".to_owned();
    }
    capability
}
