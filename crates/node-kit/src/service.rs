//! CSI Node service: conversion between gRPC messages and the driver's operations.

use std::fmt::Debug;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use csi::proto::node_service_capability::rpc::Type as Can;
use csi::proto::{self, volume_usage::Unit};
use csi::{Status, locks::VolumeLocks};
use process_kit::operation;
use tokio::time::Instant;
use tonic::{Request, Response};

use super::blocking::blocking;
use super::content::UsedAttestations;
use super::disk::DiskNames;
use super::kubelet::Kubelet;
use super::stats::{Amount, Stats, Usage};
use super::{expand, publish, request, stage, stats, status};

/// How long to wait for a disk if the caller sets no deadline.
const DEFAULT_WAIT: Duration = Duration::from_secs(20);

/// Announced capabilities. `SINGLE_NODE_MULTI_WRITER` means that the driver distinguishes ReadWriteOncePod, which it
/// limits to one target, from ReadWriteOnce.
const CAPABILITIES: [Can; 5] = [
    Can::StageUnstageVolume,
    Can::GetVolumeStats,
    Can::ExpandVolume,
    Can::VolumeCondition,
    Can::SingleNodeMultiWriter,
];

/// The topology of a node.
#[tonic::async_trait]
pub trait Topology: Debug + Send + Sync {
    /// Whether the driver reports one.
    fn is_reported(&self) -> bool;

    /// The topology of the node with this ID, if the driver reports one. Waits until `until`.
    async fn of_node(&self, id: &str, until: Instant) -> Result<Option<proto::Topology>, Status>;
}

/// The Node service.
#[derive(Debug, Clone)]
pub struct Node {
    /// Node ID.
    pub id: String,
    /// Maximum number of volumes; None if unknown.
    pub max_volumes: Option<i64>,
    /// The node's topology.
    pub topology: Arc<dyn Topology>,
    /// kubelet's directory layout.
    pub kubelet: Kubelet,
    /// Disk lookup.
    pub names: DiskNames,
    /// Record of used attestations.
    pub used: UsedAttestations,
    /// Locks of volumes with an operation in progress.
    pub locks: VolumeLocks,
}

impl Node {
    /// Runs an operation on a volume to completion, even if the caller disconnects: a retry must not run concurrently with
    /// the mkfs or mount of an earlier call. Until the operation finishes, retries receive ABORTED.
    async fn run_locked<T, E>(
        &self,
        volume: &str,
        work: impl Future<Output = Result<T, E>> + Send + 'static,
    ) -> Result<T, Status>
    where
        T: Send + 'static,
        E: status::GrpcCode + Send + 'static,
    {
        let guard = self.locks.acquire(volume)?;
        let running = tokio::spawn(operation::inherit(async move {
            let _guard = guard;
            work.await
        }));
        match running.await {
            Ok(done) => done.map_err(|failure| status::from_error(&failure)),
            Err(error) => {
                Err(Status::internal(format!("the operation on volume {volume} panicked: {error}")))
            }
        }
    }
}

#[tonic::async_trait]
impl proto::node_server::Node for Node {
    async fn node_stage_volume(
        &self,
        call: Request<proto::NodeStageVolumeRequest>,
    ) -> Result<Response<proto::NodeStageVolumeResponse>, Status> {
        let until = csi::deadline::of(&call, DEFAULT_WAIT);
        let requested = call.into_inner();
        let volume = request::volume_id(&requested.volume_id)?;
        let requested = request::stage(&requested, until)?;
        let (names, used, kubelet) = (self.names.clone(), self.used.clone(), self.kubelet.clone());
        self.run_locked(&volume, async move { stage::stage(&names, &used, requested, &kubelet).await })
            .await?;
        Ok(Response::new(proto::NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        call: Request<proto::NodeUnstageVolumeRequest>,
    ) -> Result<Response<proto::NodeUnstageVolumeResponse>, Status> {
        let requested = call.into_inner();
        let volume = request::volume_id(&requested.volume_id)?;
        let staging = request::path("staging_target_path", &requested.staging_target_path)?;
        let kubelet = self.kubelet.clone();
        self.run_locked(&volume, blocking(move || stage::unstage(&staging, &kubelet))).await?;
        Ok(Response::new(proto::NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        call: Request<proto::NodePublishVolumeRequest>,
    ) -> Result<Response<proto::NodePublishVolumeResponse>, Status> {
        let until = csi::deadline::of(&call, DEFAULT_WAIT);
        let requested = call.into_inner();
        let volume = request::volume_id(&requested.volume_id)?;
        let requested = request::publish(&requested, until)?;
        let (names, used, kubelet) = (self.names.clone(), self.used.clone(), self.kubelet.clone());
        self.run_locked(&volume, async move { publish::publish(&names, used, requested, kubelet).await })
            .await?;
        Ok(Response::new(proto::NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        call: Request<proto::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<proto::NodeUnpublishVolumeResponse>, Status> {
        let requested = call.into_inner();
        let volume = request::volume_id(&requested.volume_id)?;
        let target = request::path("target_path", &requested.target_path)?;
        self.run_locked(&volume, blocking(move || publish::unpublish(&target))).await?;
        Ok(Response::new(proto::NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        call: Request<proto::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<proto::NodeGetVolumeStatsResponse>, Status> {
        let requested = call.into_inner();
        request::volume_id(&requested.volume_id)?;
        let path = request::volume_path(&requested.volume_path)?;
        let stats =
            blocking(move || stats::stats(&path)).await.map_err(|failure| status::from_error(&failure))?;
        Ok(Response::new(stats.into()))
    }

    async fn node_expand_volume(
        &self,
        call: Request<proto::NodeExpandVolumeRequest>,
    ) -> Result<Response<proto::NodeExpandVolumeResponse>, Status> {
        let until = csi::deadline::of(&call, DEFAULT_WAIT);
        let requested = call.into_inner();
        let volume = request::volume_id(&requested.volume_id)?;
        let requested = request::expand(&requested, until)?;
        let bytes = self.run_locked(&volume, expand::expand(requested)).await?;
        let capacity_bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        Ok(Response::new(proto::NodeExpandVolumeResponse { capacity_bytes }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<proto::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<proto::NodeGetCapabilitiesResponse>, Status> {
        use proto::node_service_capability::{Rpc, Type};
        let capability =
            |can: Can| proto::NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: can as i32 })) };
        let capabilities = CAPABILITIES.into_iter().map(capability).collect();
        Ok(Response::new(proto::NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(
        &self,
        call: Request<proto::NodeGetInfoRequest>,
    ) -> Result<Response<proto::NodeGetInfoResponse>, Status> {
        let until = csi::deadline::of(&call, DEFAULT_WAIT);
        Ok(Response::new(proto::NodeGetInfoResponse {
            node_id: self.id.clone(),
            max_volumes_per_node: self.max_volumes.unwrap_or(0),
            accessible_topology: self.topology.of_node(&self.id, until).await?,
        }))
    }
}

impl From<Stats> for proto::NodeGetVolumeStatsResponse {
    fn from(stats: Stats) -> Self {
        let saturating = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let usage = |amount: Amount, unit: Unit| proto::VolumeUsage {
            total: saturating(amount.total),
            used: saturating(amount.used),
            available: saturating(amount.available),
            unit: unit as i32,
        };
        let usage = match stats.usage {
            Usage::Block(bytes) => vec![proto::VolumeUsage {
                total: saturating(bytes),
                unit: Unit::Bytes as i32,
                ..proto::VolumeUsage::default()
            }],
            Usage::Filesystem { bytes, inodes } => [(Some(bytes), Unit::Bytes), (inodes, Unit::Inodes)]
                .into_iter()
                .filter_map(|(amount, unit)| Some(usage(amount?, unit)))
                .collect(),
        };
        let condition = proto::VolumeCondition {
            abnormal: stats.abnormal.is_some(),
            message: stats.abnormal.unwrap_or_else(|| "the volume is healthy".to_owned()),
        };
        Self { usage, volume_condition: Some(condition) }
    }
}
