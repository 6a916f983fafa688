//! Gathering of a [`Snapshot`]: reads by name, and few lists with selectors or limits. The cost does not depend on the number
//! of volumes.
//!
//! | object | found by |
//! | --- | --- |
//! | management claim | `volumeHandle` of the guest PersistentVolume, which is its name; before that, the deterministic name |
//! | node | the pods of the claim's namespace that use it, and the VMs that the condition `nestor.dev/Attached` names; without those, the owners of VolumeAttachments, by field selector `spec.volumeName` |
//! | guest VolumeAttachment | its deterministic name, from handle, driver and node |
//! | VirtualMachine | the node ID in the CSINode, which is its name |
//! | VolumeAttachment | its deterministic name, from VM and claim |
//! | events | field selector `involvedObject` in the namespace of the object, only for objects that are not healthy |

mod guest;
mod management;
mod placements;
pub mod read;
pub mod snapshot;

use std::collections::BTreeMap;

use crate::clusters::{Clusters, Tier};
use crate::diagnose;
use crate::error::Error;
use crate::subject::Subject;
pub use management::cluster_id;
use snapshot::{About, Event, Snapshot};

/// Reads everything about the volume of a subject.
pub async fn gather(clusters: &Clusters, subject: &Subject) -> Result<Snapshot, Error> {
    let mut snapshot = Snapshot {
        now: read::now(),
        sees_guest: clusters.guest.is_some(),
        sees_management: clusters.management.is_some(),
        ..Default::default()
    };
    let is_in_guest = guest::start(clusters, subject, &mut snapshot).await?;
    if !is_in_guest {
        management::start(clusters, subject, &mut snapshot).await?;
        guest::follow_up(clusters, &mut snapshot).await?;
    }
    management::follow_down(clusters, &mut snapshot).await?;
    placements::gather(clusters, subject, &mut snapshot).await?;
    snapshot.events = events(clusters, &snapshot).await?;
    Ok(snapshot)
}

/// Reads the events of the objects that a diagnosis without events finds unhealthy.
async fn events(clusters: &Clusters, snapshot: &Snapshot) -> Result<BTreeMap<About, Vec<Event>>, Error> {
    let suspects = diagnose::suspects(snapshot);
    let reads = suspects.into_iter().map(async |about| {
        let cluster = match about.tier {
            Tier::Guest => clusters.guest.as_ref(),
            Tier::Management => clusters.management.as_ref(),
        };
        let Some(cluster) = cluster else { return Ok((about, Vec::new())) };
        match read::events(&cluster.client, &about).await {
            Ok(events) => Ok((about, events)),
            // Without the right to read events, the objects alone are diagnosed.
            Err(error) if read::is_answer(&error) => Ok((about, Vec::new())),
            Err(error) => Err(Error::request(cluster.tier.name(), "events", &error)),
        }
    });
    Ok(futures::future::try_join_all(reads).await?.into_iter().collect())
}
