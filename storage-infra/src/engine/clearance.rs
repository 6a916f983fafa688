//! Clearance for irreversible operations: decides whether an object's files may be removed, truncated or recreated.
//!
//! The catalog alone cannot decide that: it may be older than the pool, or another server's. So such an operation
//! requires a [`Clearance`] token, which is issued only on [`Evidence`] from every source that knows which process or
//! virtual machine uses a file: the record stored with it, the live state of all hypervisors, and the locks on it.
//! Pure.

use std::fmt;

use uuid::Uuid;

use super::Object;
use super::image_lock;
use super::record::RecordedAttachment;
use crate::hypervisor::{AttachedDisk, DiskLocation};
use crate::safety::Check;

/// Files of an object in its pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Files {
    /// All places of the complete data, such as paths of a file: as registered, and without symbolic links.
    pub complete: Vec<DiskLocation>,
    /// Whether an incomplete file exists.
    pub unfinished: bool,
    /// The process or device that has one of the files open, according to the kernel.
    pub open: Option<image_lock::Holder>,
}

impl Files {
    /// Whether there are no files, so that no data can be lost.
    pub fn is_empty(&self) -> bool {
        self.complete.is_empty() && !self.unfinished
    }
}

/// Everything known about the users of an object's files. A source that cannot be queried is a reason to refuse, so no
/// source is optional.
#[derive(Debug, Clone)]
pub struct Evidence {
    /// The object.
    pub object: Object,
    /// Distinguishes it from another object of the same ID.
    pub identity: Uuid,
    /// Its files.
    pub files: Files,
    /// Whether the catalog is older than the pool.
    pub is_catalog_stale: bool,
    /// Attachments recorded with the file that the catalog does not know.
    pub recorded: Vec<RecordedAttachment>,
    /// Virtual machines that have the file attached, from the live state of every hypervisor, with the hypervisor's
    /// name.
    pub live: Vec<(String, AttachedDisk)>,
}

/// Why an object's files must not be changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// A virtual machine has it attached, according to its hypervisor's live state.
    Attached(Vec<(String, AttachedDisk)>),
    /// A process or device of this host has it open.
    Open(image_lock::Holder),
    /// The record lists attachments, and nothing proves that they have ended.
    Recorded(Vec<RecordedAttachment>),
    /// The catalog is older than the pool.
    StaleCatalog,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attached(vms) => {
                let vms: Vec<String> = vms
                    .iter()
                    .map(|(at, vm)| format!("{} ({}) on hypervisor {at}", vm.name, vm.node))
                    .collect();
                write!(f, "it is attached to the virtual machine {}; detach it first", vms.join(", "))
            }
            Self::Open(holder) => {
                write!(f, "it is in use by {holder}; stop that first, if it is not needed")
            }
            Self::Recorded(attachments) => {
                let nodes: Vec<String> = attachments
                    .iter()
                    .map(|one| format!("{} ({}) as {}", one.node.name, one.uuid, one.id))
                    .collect();
                write!(
                    f,
                    "its record says that it is attached to {}, and the catalog does not know that attachment",
                    nodes.join(", ")
                )
            }
            Self::StaleCatalog => f.write_str("the records in the pool are newer than the catalog"),
        }
    }
}

impl Refusal {
    /// Whether the catalog is known to be older than the pool.
    pub fn is_catalog_stale(&self) -> bool {
        matches!(self, Self::Recorded(_) | Self::StaleCatalog)
    }
}

/// Permission to remove, truncate or recreate the files of one object.
#[derive(Debug)]
pub struct Clearance {
    object: Object,
    identity: Uuid,
    was_empty: bool,
}

impl Clearance {
    /// The object.
    pub fn object(&self) -> &Object {
        &self.object
    }

    /// Distinguishes it from another object of the same ID.
    pub fn identity(&self) -> Uuid {
        self.identity
    }

    /// Whether the object had no files when the evidence was collected.
    pub fn was_empty(&self) -> bool {
        self.was_empty
    }
}

impl Evidence {
    /// Decides. Returns all reasons to refuse, the strongest first.
    pub fn decide(self) -> Result<Clearance, Vec<Refusal>> {
        let was_empty = self.files.is_empty();
        if was_empty {
            return Ok(Clearance { object: self.object, identity: self.identity, was_empty });
        }
        let is_attached = !self.live.is_empty() && Check::LiveEvidence.applies();
        let attached = is_attached.then_some(Refusal::Attached(self.live));
        let recorded = (!self.recorded.is_empty()).then_some(Refusal::Recorded(self.recorded));
        let stale = self.is_catalog_stale.then_some(Refusal::StaleCatalog);
        let reasons = [attached, self.files.open.map(Refusal::Open), recorded, stale];
        let reasons: Vec<Refusal> = reasons.into_iter().flatten().collect();
        if reasons.is_empty() {
            return Ok(Clearance { object: self.object, identity: self.identity, was_empty });
        }
        Err(reasons)
    }
}

#[cfg(test)]
mod tests {
    use infra_api::{Access, AttachmentId, Labels, NodeSpec, VolumeId};

    use super::*;

    fn evidence() -> Evidence {
        Evidence {
            object: Object::Volume(VolumeId::new("v").unwrap()),
            identity: Uuid::from_u128(7),
            files: Files {
                complete: vec![DiskLocation::File("/pool/v.raw".into())],
                unfinished: false,
                open: None,
            },
            is_catalog_stale: false,
            recorded: Vec::new(),
            live: Vec::new(),
        }
    }

    fn recorded_attachment() -> RecordedAttachment {
        RecordedAttachment {
            id: AttachmentId::new("a").unwrap(),
            uuid: Uuid::from_u128(9),
            node: NodeSpec { name: "n".into(), hypervisor: "h".into(), zone: None, labels: Labels::new() },
            read_only: true,
            access: Access::MultiNodeReadOnly,
            created_at: "then".into(),
        }
    }

    fn attached_disk() -> (String, AttachedDisk) {
        let data = DiskLocation::File("/pool/v.raw".into());
        ("here".to_owned(), AttachedDisk::of(Uuid::from_u128(9), data))
    }

    #[test]
    fn an_unused_file_is_cleared_and_users_of_a_file_are_named() {
        let cleared = evidence().decide().unwrap();
        assert_eq!((cleared.object(), cleared.identity()), (&evidence().object, evidence().identity));
        assert!(!cleared.was_empty());
        let open = image_lock::Holder::Loop("/dev/loop0".into());
        let held = [
            Evidence { live: vec![attached_disk()], ..evidence() },
            Evidence { files: Files { open: Some(open), ..evidence().files }, ..evidence() },
            Evidence { recorded: vec![recorded_attachment()], ..evidence() },
            Evidence { is_catalog_stale: true, ..evidence() },
        ];
        let expected = ["vm (00000000", "/dev/loop0", "n (00000000", "newer than the catalog"];
        for (held, text) in held.into_iter().zip(expected) {
            let [reason] = held.decide().unwrap_err().try_into().unwrap();
            assert!(reason.to_string().contains(text), "{reason}");
        }
    }

    #[test]
    fn an_object_without_files_is_always_cleared() {
        let nothing = Evidence {
            files: Files::default(),
            is_catalog_stale: true,
            recorded: vec![recorded_attachment()],
            ..evidence()
        };
        assert!(nothing.decide().unwrap().was_empty());
        let unfinished = Files { unfinished: true, ..Files::default() };
        assert!(Evidence { files: unfinished, is_catalog_stale: true, ..evidence() }.decide().is_err());
    }
}
