//! `attachments`: VolumeAttachments (nestor.dev) of the guest's namespace.

use crds::VolumeAttachment;
use jiff::Timestamp;
use kube::ResourceExt;
use process_kit::duration;
use serde::Serialize;

use super::{List, Row, or_dash, read, show};
use crate::cli::Format;
use crate::clusters::Clusters;
use crate::error::Error;

const HEAD: [&str; 8] = ["NAME", "VM", "CLAIM", "STATE", "ERROR", "AGE", "DISK", "MESSAGE"];

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Attachment {
    name: String,
    vm: Option<String>,
    claim: String,
    state: &'static str,
    error: Option<String>,
    created: Option<Timestamp>,
    disk_uuid: Option<String>,
    message: Option<String>,
}

impl Row for Attachment {
    fn cells(&self) -> Vec<String> {
        let age = self.created.map(|created| Timestamp::now().duration_since(created));
        let age = age.and_then(|age| std::time::Duration::try_from(age).ok()).map(duration::show);
        vec![
            self.name.clone(),
            or_dash(self.vm.clone()),
            self.claim.clone(),
            self.state.to_owned(),
            or_dash(self.error.clone()),
            or_dash(age),
            or_dash(self.disk_uuid.clone()),
            or_dash(self.message.clone()),
        ]
    }
}

/// Lists the attachments of the guest's management namespace.
pub async fn run(clusters: &Clusters, output: Format) -> Result<bool, Error> {
    let attachments = read::attachments(clusters.management_for("attachments")?).await?;
    let rows: Vec<Attachment> = attachments.iter().map(attachment).collect();
    show(output, &List { head: &HEAD, narrow: 6, unseen: Vec::new() }, &rows).map(|()| true)
}

fn attachment(one: &VolumeAttachment) -> Attachment {
    let status = one.status.clone().unwrap_or_default();
    let owner = one.owner_references().iter().find(|owner| owner.kind == "VirtualMachine");
    Attachment {
        name: one.name_any(),
        vm: owner.map(|owner| owner.name.clone()),
        claim: one.spec.volume_name.to_string(),
        state: state(one, status.attached),
        created: one.metadata.creation_timestamp.as_ref().map(|time| time.0),
        disk_uuid: status.disk_uuid,
        error: status.error.as_ref().map(|error| error.reason.clone()),
        message: status.error.map(|error| error.message),
    }
}

fn state(one: &VolumeAttachment, is_attached: bool) -> &'static str {
    match (one.metadata.deletion_timestamp.is_some(), is_attached) {
        (true, _) => "detaching",
        (false, true) => "attached",
        (false, false) => "attaching",
    }
}
