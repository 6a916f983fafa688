//! Whether bytes may go for good. The catalog's word is not enough: it may be older than the pool, or another's. So what is
//! irreversible needs a [`Cleared`], which is given only for [`Evidence`] from all who know who has a file: what is noted with
//! it, the hypervisors' live state, and the locks on it. Pure: what was found in, the decision out.

use std::fmt;
use std::path::PathBuf;

use uuid::Uuid;

use super::Object;
use super::image_lock;
use super::record::Holder;
use crate::hypervisor::Plugged;

/// What is in a pool by an object's names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Files {
    /// Its complete file, under each path that leads there.
    pub complete: Vec<PathBuf>,
    /// There is one that was never complete.
    pub unfinished: bool,
    /// Who has either open, by what the kernel knows.
    pub open: Option<image_lock::Holder>,
}

impl Files {
    /// Whether there is nothing that could be lost.
    pub fn is_nothing(&self) -> bool {
        self.complete.is_empty() && !self.unfinished
    }
}

/// What all who were asked said about an object's files. Nobody may be left out: who cannot be asked is a reason to refuse.
#[derive(Debug, Clone)]
pub struct Evidence {
    /// The object.
    pub object: Object,
    /// What tells it from another of the same id.
    pub identity: Uuid,
    /// What is there.
    pub files: Files,
    /// The pool knows of more than the catalog.
    pub is_behind: bool,
    /// Who is noted with the file, and may have it for all that is known.
    pub noted: Vec<Holder>,
    /// The VMs that have the file, by the live state of every hypervisor, with the hypervisor's name.
    pub live: Vec<(String, Plugged)>,
}

/// Why an object's bytes stay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// A VM has it, by its hypervisor's live state.
    Plugged(Vec<(String, Plugged)>),
    /// A process or a device of this host has it.
    Open(image_lock::Holder),
    /// These are noted with it, and nothing proves that they let go of it.
    Noted(Vec<Holder>),
    /// The catalog is older than the pool.
    Behind,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plugged(vms) => {
                let vms: Vec<String> = vms
                    .iter()
                    .map(|(at, vm)| format!("{} ({}) on hypervisor {at}", vm.name, vm.node))
                    .collect();
                write!(f, "it is plugged into the VM {}; detach it first", vms.join(", "))
            }
            Self::Open(holder) => {
                write!(f, "{holder}; end that first, once it is certain that it is not needed")
            }
            Self::Noted(holders) => {
                let who: Vec<String> = holders
                    .iter()
                    .map(|one| format!("{} ({}) as {}", one.node.name, one.uuid, one.id))
                    .collect();
                write!(
                    f,
                    "it is noted with its bytes as attached to {}, and the catalog does not know of that",
                    who.join(", ")
                )
            }
            Self::Behind => f.write_str("what is noted in the pool is newer than the catalog"),
        }
    }
}

impl Refusal {
    /// Whether the catalog is known to be older than the pool.
    pub fn is_behind(&self) -> bool {
        matches!(self, Self::Noted(_) | Self::Behind)
    }
}

/// The permission to remove, cut or make anew the files of one object, given after everybody was asked.
#[derive(Debug)]
pub struct Cleared {
    object: Object,
    identity: Uuid,
    was_nothing: bool,
}

impl Cleared {
    /// The object that may go.
    pub fn object(&self) -> &Object {
        &self.object
    }

    /// What tells it from another of the same id.
    pub fn identity(&self) -> Uuid {
        self.identity
    }

    /// There was nothing by the object's names when it was looked at.
    pub fn was_nothing(&self) -> bool {
        self.was_nothing
    }
}

impl Evidence {
    /// Decides. All reasons to refuse are given, the strongest first.
    pub fn decide(self) -> Result<Cleared, Vec<Refusal>> {
        let was_nothing = self.files.is_nothing();
        if was_nothing {
            return Ok(Cleared { object: self.object, identity: self.identity, was_nothing });
        }
        let plugged = (!self.live.is_empty()).then_some(Refusal::Plugged(self.live));
        let noted = (!self.noted.is_empty()).then_some(Refusal::Noted(self.noted));
        let behind = self.is_behind.then_some(Refusal::Behind);
        let reasons = [plugged, self.files.open.map(Refusal::Open), noted, behind];
        let reasons: Vec<Refusal> = reasons.into_iter().flatten().collect();
        if reasons.is_empty() {
            return Ok(Cleared { object: self.object, identity: self.identity, was_nothing });
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
            files: Files { complete: vec!["/pool/v.raw".into()], unfinished: false, open: None },
            is_behind: false,
            noted: Vec::new(),
            live: Vec::new(),
        }
    }

    fn holder() -> Holder {
        Holder {
            id: AttachmentId::new("a").unwrap(),
            uuid: Uuid::from_u128(9),
            node: NodeSpec { name: "n".into(), hypervisor: "h".into(), zone: None, labels: Labels::new() },
            read_only: true,
            access: Access::MultiNodeReadOnly,
            created_at: "then".into(),
        }
    }

    fn plugged() -> (String, Plugged) {
        let (name, path) = ("vm".to_owned(), PathBuf::from("/pool/v.raw"));
        ("here".to_owned(), Plugged { node: Uuid::from_u128(9), name, path, wwn: None, read_only: true })
    }

    #[test]
    fn what_nobody_has_may_go_and_whoever_has_it_is_named() {
        let cleared = evidence().decide().unwrap();
        assert_eq!((cleared.object(), cleared.identity()), (&evidence().object, evidence().identity));
        assert!(!cleared.was_nothing());
        let open = image_lock::Holder::Loop("/dev/loop0".into());
        let held = [
            Evidence { live: vec![plugged()], ..evidence() },
            Evidence { files: Files { open: Some(open), ..evidence().files }, ..evidence() },
            Evidence { noted: vec![holder()], ..evidence() },
            Evidence { is_behind: true, ..evidence() },
        ];
        let told = ["vm (00000000", "/dev/loop0", "n (00000000", "newer than the catalog"];
        for (held, told) in held.into_iter().zip(told) {
            let [reason] = held.decide().unwrap_err().try_into().unwrap();
            assert!(reason.to_string().contains(told), "{reason}");
        }
    }

    #[test]
    fn where_there_is_nothing_nobody_can_lose_it() {
        let nothing =
            Evidence { files: Files::default(), is_behind: true, noted: vec![holder()], ..evidence() };
        assert!(nothing.decide().unwrap().was_nothing());
        let unfinished = Files { unfinished: true, ..Files::default() };
        assert!(Evidence { files: unfinished, is_behind: true, ..evidence() }.decide().is_err());
    }
}
