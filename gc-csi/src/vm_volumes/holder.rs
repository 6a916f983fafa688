//! The single writer, where the VM API does not ensure it: the management claim names the VM that may have the disk.
//!
//! An attach takes the claim before it adds the entry, by a compare-and-swap, and a detach gives it back when the disk is proven
//! detached. Two rules keep a late write of one from undoing the other:
//!
//! - An attach takes the claim after it has read the VM to which its PATCH applies, and takes it again before each repetition.
//! - A detach changes the VM after it has read the claim, so that no PATCH planned earlier applies any more; and it gives back only what
//!   it has read. Every take is different.
//!
//! A [shareable](crds::kubevirt::is_shareable) claim has a record only while a volume of the guest uses it alone. VMs that share it take nothing, and get
//! its disk only while there is no record.

use crds::names::{ANNOTATION_ATTACHED_TO, VmName};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Vm;
use super::blank::Blank;

/// The VM that may have a volume's disk.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Holder {
    /// Name of the VM.
    pub vm: String,
    /// UID of the VM.
    pub uid: String,
}

impl Holder {
    /// The VM of this name, with its UID.
    pub fn of(name: &VmName, vm: &Vm) -> Self {
        Self { vm: name.to_string(), uid: vm.metadata.uid.clone().unwrap_or_default() }
    }
}

/// A holder as it is recorded on a claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Taken {
    /// The VM.
    #[serde(flatten)]
    pub holder: Holder,
    /// Different at every take.
    pub take: String,
    /// The attestation that the disk was blank when it was taken, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blank: Option<Blank>,
}

impl Taken {
    /// The annotation's value.
    pub fn to_text(&self) -> String {
        json!(self).to_string()
    }
}

/// The annotation of a claim's metadata.
pub fn recorded(metadata: &ObjectMeta) -> Option<&str> {
    metadata.annotations.as_ref()?.get(ANNOTATION_ATTACHED_TO).map(String::as_str)
}

/// Decision about a take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Take {
    /// Nobody else holds the volume: write the new holder.
    Allowed,
    /// Only if this VM is proven off.
    IfOff(Holder),
    /// The record can't be read, so nobody knows who holds the volume.
    Unreadable,
}

/// Decides whether a VM may take a volume with this record.
pub fn decide_take(recorded: Option<&str>, vm: &Holder) -> Take {
    let Some(text) = recorded else { return Take::Allowed };
    match serde_json::from_str::<Taken>(text) {
        Ok(taken) if taken.holder == *vm => Take::Allowed,
        Ok(taken) => Take::IfOff(taken.holder),
        Err(_) => Take::Unreadable,
    }
}

/// The record that a detach from a VM of this name gives back when the disk is proven detached; None if another VM, or none, holds the
/// volume.
pub fn held_by<'a>(recorded: Option<&'a str>, vm_name: &str) -> Option<(&'a str, Holder)> {
    let taken: Taken = serde_json::from_str(recorded?).ok()?;
    (taken.holder.vm == vm_name).then_some((recorded?, taken.holder))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(vm: &str, uid: &str) -> Holder {
        Holder { vm: vm.to_owned(), uid: uid.to_owned() }
    }

    fn text(vm: &str, uid: &str) -> String {
        Taken { holder: holder(vm, uid), take: "1".to_owned(), blank: None }.to_text()
    }

    #[test]
    fn a_volume_is_taken_from_another_vm_only_if_that_is_proven_off() {
        let own = holder("vm-1", "u1");
        assert_eq!(decide_take(None, &own), Take::Allowed);
        assert_eq!(decide_take(Some(&text("vm-1", "u1")), &own), Take::Allowed);
        assert_eq!(decide_take(Some(&text("vm-2", "u2")), &own), Take::IfOff(holder("vm-2", "u2")));
        let earlier = Take::IfOff(holder("vm-1", "u0"));
        assert_eq!(decide_take(Some(&text("vm-1", "u0")), &own), earlier, "a VM of the same name");
        assert_eq!(decide_take(Some("vm-1"), &own), Take::Unreadable);
    }

    #[test]
    fn a_detach_gives_back_what_its_own_vm_holds() {
        let own = text("vm-1", "u1");
        assert_eq!(own, r#"{"take":"1","uid":"u1","vm":"vm-1"}"#);
        assert_eq!(held_by(Some(&own), "vm-1"), Some((own.as_str(), holder("vm-1", "u1"))));
        assert_eq!(held_by(Some(&own), "vm-2"), None);
        assert_eq!(held_by(None, "vm-1"), None);
        assert_eq!(held_by(Some("?"), "vm-1"), None);
    }
}
