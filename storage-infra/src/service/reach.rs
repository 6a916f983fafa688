//! Refusals where the host of a VM does not reach a pool.

use infra_api::{ObjectKind, Problem, ProblemCode, VolumeId};
use uuid::Uuid;

use super::lookups::pool_of;
use super::problems::Result;
use crate::catalog::{NodeRow, PoolRow, Tx, VolumeRow};
use crate::placement::Hosts;

/// Why a node cannot have a volume of a pool that its host does not reach; `None` if it does.
pub(super) fn unreached(hosts: &Hosts, volume: &VolumeId, pool: &PoolRow, node: &NodeRow) -> Option<String> {
    let host = &node.spec.hypervisor;
    (!hosts.reaches(host, &pool.spec)).then(|| {
        format!(
            "the volume {volume} is in the pool {}, which is reached by these hosts: {}; the node {} ({}) is on the host {host}, \
             which does not reach it. Migrate the VM to one of them, or move the volume to a pool that {host} reaches; if {host} \
             does reach the pool, change its hosts with storage-infra pool hosts {}",
            pool.name,
            hosts.names_text(&pool.spec),
            node.spec.name,
            node.uuid,
            pool.name
        )
    })
}

/// A problem with this reason.
pub(super) fn problem(volume: &VolumeId, why: String) -> Problem {
    Problem::new(ProblemCode::NotReachable, why).about(ObjectKind::Volume, volume)
}

/// Of the volumes that are attached to a node, those in pools that a host does not reach, with their pools.
pub(super) fn unreached_volumes(
    tx: &Tx<'_>,
    hosts: &Hosts,
    node: Uuid,
    host: &str,
) -> Result<Vec<(VolumeId, PoolRow)>> {
    let mut found = Vec::new();
    for attachment in tx.attachments(Some(node), None)? {
        let Some(volume) = tx.volume(&attachment.volume)? else { continue };
        let pool = pool_of(tx, &volume)?;
        if !hosts.reaches(host, &pool.spec) {
            found.push((volume.id, pool));
        }
    }
    Ok(found)
}

/// The nodes that have volumes of this pool attached on hosts that would not reach it with this spec.
pub(super) fn nodes_cut_off(
    tx: &Tx<'_>,
    hosts: &Hosts,
    pool: &PoolRow,
    spec: &infra_api::PoolSpec,
) -> Result<Vec<NodeRow>> {
    let mut found: Vec<NodeRow> = Vec::new();
    for attachment in tx.attachments(None, None)? {
        let is_here = |row: &VolumeRow| row.pool == pool.name;
        if !tx.volume(&attachment.volume)?.as_ref().is_some_and(is_here) {
            continue;
        }
        let Some(node) = tx.node(attachment.node)? else { continue };
        let is_known = found.iter().any(|one| one.uuid == node.uuid);
        if !is_known && !hosts.reaches(&node.spec.hypervisor, spec) {
            found.push(node);
        }
    }
    Ok(found)
}
