//! Compatibility check between a guest PersistentVolume and the management claim that it names. It reports mistakes of
//! manually created PersistentVolumes and prevents the attach.

use crds::names::MANAGEMENT_VOLUME;
use kube_kit::quantity;

use crate::pin::Pin;

/// Requirements of a guest PersistentVolume on its management claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PvRequirements {
    /// Name of the guest PersistentVolume, if known.
    pub(crate) volume: Option<String>,
    /// Its capacity in bytes.
    pub(crate) capacity: Option<u64>,
    /// Whether it is a raw block volume.
    pub(crate) block: bool,
    /// Its access modes, as Kubernetes names them.
    pub(crate) modes: Vec<String>,
    /// Whether it is attached read-only, whatever its access modes.
    pub(crate) read_only: bool,
    /// The management PersistentVolume that it is pinned to.
    pub(crate) pin: Pin,
}

impl PvRequirements {
    /// Whether it is only ever read.
    pub(crate) fn reads_only(&self) -> bool {
        self.read_only || self.modes.iter().all(|mode| mode == "ReadOnlyMany")
    }

    /// Its name for messages.
    fn name(&self) -> String {
        match &self.volume {
            Some(name) => format!("guest PersistentVolume {name}"),
            None => "the guest's PersistentVolume".to_owned(),
        }
    }
}

/// Properties of a management claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ClaimProperties {
    /// Capacity in bytes; None before it is bound.
    pub(crate) capacity: Option<u64>,
    /// Whether it is a raw block volume; None if volumes of both modes can use it.
    pub(crate) block: Option<bool>,
    /// Access modes, as Kubernetes names them.
    pub(crate) modes: Vec<String>,
    /// Whether it is shared read-only with this guest.
    pub(crate) read_only: bool,
    /// The management PersistentVolume that it is or will be bound to.
    pub(crate) volume: Option<String>,
}

/// An incompatibility. The message names the objects of both clusters and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Incompatible {
    /// The claim does not exist for this guest.
    #[error(
        "{0}: management PersistentVolumeClaim {1} does not exist, or is neither this guest's nor shared with it; \
         correct volumeHandle, or ask the platform team to label the claim {2}: rw or ro"
    )]
    ClaimNotFound(String, String, String),
    /// The claim is being deleted.
    #[error(
        "management PersistentVolumeClaim {0} is being deleted: once its disk is detached, it is gone and, with reclaim \
         policy Delete, so is the data; copy the data before that, or ask the platform team to set Retain on the \
         management PersistentVolume"
    )]
    ClaimTerminating(String),
    /// A property of the volume differs from the claim.
    #[error("{0}, but management PersistentVolumeClaim {1} {2}; {3}")]
    Differs(String, String, String, &'static str),
    /// The claim is bound to another PersistentVolume than the volume is pinned to.
    #[error(
        "{volume} is pinned to management PersistentVolume {pinned}, but management PersistentVolumeClaim {claim} is \
         bound to {bound}: a claim that was deleted and recreated under the same name has other data; bind the claim \
         to {pinned} again or, to use the other volume, set annotation {MANAGEMENT_VOLUME} on {volume} to its name"
    )]
    Replaced {
        /// The guest PersistentVolume.
        volume: String,
        /// The PersistentVolume that it is pinned to.
        pinned: String,
        /// Name of the management claim.
        claim: String,
        /// The PersistentVolume that the claim is bound to.
        bound: String,
    },
}

/// Checks the requirements against the management claim `claim`; `claim_properties` is None if it does not exist for
/// this guest. `share_label` is the label that would share it.
pub(crate) fn check(
    requirements: &PvRequirements,
    claim: &str,
    share_label: &str,
    claim_properties: Option<&ClaimProperties>,
) -> Result<(), Incompatible> {
    let volume = requirements.name();
    let Some(claim_properties) = claim_properties else {
        return Err(Incompatible::ClaimNotFound(volume, claim.to_owned(), share_label.to_owned()));
    };
    check_pin(requirements, claim, claim_properties.volume.as_deref())?;
    let differs = |says: String, has: String, remedy| {
        Err(Incompatible::Differs(format!("{volume} {says}"), claim.to_owned(), has, remedy))
    };
    if let Some(block) = claim_properties.block
        && requirements.block != block
    {
        let mode = |block| if block { "Block" } else { "Filesystem" };
        return differs(
            format!("has volumeMode {}", mode(requirements.block)),
            format!("has {}", mode(block)),
            "recreate the volume with the claim's volumeMode",
        );
    }
    if let (Some(stated), Some(has)) = (requirements.capacity, claim_properties.capacity)
        && stated > has
    {
        return differs(
            format!("has capacity {}", quantity::of(stated).0),
            format!("has {}", quantity::of(has).0),
            "recreate the volume with at most that capacity, or have the claim expanded",
        );
    }
    if let Some(mode) = requirements.modes.iter().find(|mode| !allows(&claim_properties.modes, mode)) {
        return differs(
            format!("has access mode {mode}"),
            format!("has {} only", claim_properties.modes.join(", ")),
            "recreate the volume with an access mode of the claim",
        );
    }
    if claim_properties.read_only && !requirements.reads_only() {
        return differs(
            format!("has access mode {} and is not read-only", requirements.modes.join(", ")),
            "is shared read-only with this guest".to_owned(),
            "recreate the volume with csi.readOnly: true, or with access mode ReadOnlyMany",
        );
    }
    Ok(())
}

/// Checks the pin of a volume against the PersistentVolume `bound` that the claim is bound to.
pub(crate) fn check_pin(
    requirements: &PvRequirements,
    claim: &str,
    bound: Option<&str>,
) -> Result<(), Incompatible> {
    let Some(pinned) = requirements.pin.to().filter(|pinned| bound != Some(*pinned)) else { return Ok(()) };
    let bound = bound.map_or("none".to_owned(), |bound| format!("management PersistentVolume {bound}"));
    let (pinned, claim) = (pinned.to_owned(), claim.to_owned());
    Err(Incompatible::Replaced { volume: requirements.name(), pinned, claim, bound })
}

/// Whether a claim with these access modes allows this one. ReadWriteOncePod restricts pods, not nodes, so it equals
/// ReadWriteOnce for a VM. ReadWriteMany allows all modes.
fn allows(modes: &[String], mode: &str) -> bool {
    let node_wise =
        |mode: &str| if mode == "ReadWriteOncePod" { "ReadWriteOnce".to_owned() } else { mode.to_owned() };
    modes.iter().any(|one| one == "ReadWriteMany" || node_wise(one) == node_wise(mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LABEL: &str = "share.nestor.dev/guest-1";

    fn requirements(gibibytes: u64, modes: &[&str]) -> PvRequirements {
        PvRequirements {
            volume: Some("data".to_owned()),
            capacity: Some(gibibytes << 30),
            modes: modes.iter().map(|mode| (*mode).to_owned()).collect(),
            ..PvRequirements::default()
        }
    }

    fn claim_properties(gibibytes: u64, modes: &[&str]) -> ClaimProperties {
        let modes = modes.iter().map(|mode| (*mode).to_owned()).collect();
        let block = Some(false);
        ClaimProperties { capacity: Some(gibibytes << 30), modes, block, ..ClaimProperties::default() }
    }

    fn finding(requirements: &PvRequirements, claim_properties: Option<&ClaimProperties>) -> String {
        check(requirements, "claim-1", LABEL, claim_properties)
            .map_err(|incompatible| incompatible.to_string())
            .err()
            .unwrap_or_default()
    }

    #[test]
    fn a_claim_of_the_same_mode_that_is_large_enough_is_compatible() {
        for (requested, has) in [
            ("ReadWriteOnce", "ReadWriteOnce"),
            ("ReadWriteOncePod", "ReadWriteOnce"),
            ("ReadWriteOnce", "ReadWriteOncePod"),
            ("ReadOnlyMany", "ReadOnlyMany"),
            ("ReadOnlyMany", "ReadWriteMany"),
            ("ReadWriteOnce", "ReadWriteMany"),
        ] {
            assert_eq!(
                finding(&requirements(1, &[requested]), Some(&claim_properties(2, &[has]))),
                "",
                "{requested} of {has}"
            );
        }
        let unbound = ClaimProperties { capacity: None, ..claim_properties(1, &["ReadWriteOnce"]) };
        assert_eq!(finding(&requirements(9, &["ReadWriteOnce"]), Some(&unbound)), "");
    }

    #[test]
    fn each_difference_names_both_objects_and_a_remedy() {
        let one = claim_properties(1, &["ReadWriteOnce"]);
        assert_eq!(
            finding(&requirements(2, &["ReadWriteOnce"]), Some(&one)),
            "guest PersistentVolume data has capacity 2Gi, but management PersistentVolumeClaim claim-1 has 1Gi; \
             recreate the volume with at most that capacity, or have the claim expanded"
        );
        let block = PvRequirements { block: true, ..requirements(1, &["ReadWriteOnce"]) };
        assert!(finding(&block, Some(&one)).contains("volumeMode Block"));
        let any = ClaimProperties { block: None, ..one.clone() };
        assert_eq!(finding(&block, Some(&any)), "");
        assert_eq!(finding(&PvRequirements { block: false, ..block.clone() }, Some(&any)), "");
        for mode in ["ReadOnlyMany", "ReadWriteMany"] {
            assert!(finding(&requirements(1, &["ReadWriteOnce", mode]), Some(&one)).contains(mode), "{mode}");
        }
        assert!(finding(&requirements(1, &["ReadWriteOnce"]), None).contains(LABEL));
    }

    #[test]
    fn a_claim_that_is_bound_to_another_volume_is_incompatible() {
        let pin = Pin { attribute: Some("pvc-old".to_owned()), annotation: None };
        let pinned = PvRequirements { pin, ..requirements(1, &["ReadWriteOnce"]) };
        let claim = |to: Option<&str>| ClaimProperties {
            volume: to.map(str::to_owned),
            ..claim_properties(1, &["ReadWriteOnce"])
        };
        assert_eq!(finding(&pinned, Some(&claim(Some("pvc-old")))), "");
        assert_eq!(finding(&requirements(1, &["ReadWriteOnce"]), Some(&claim(Some("pvc-new")))), "");
        for (volume, stated) in [(Some("pvc-new"), "PersistentVolume pvc-new"), (None, "bound to none")] {
            let finding = finding(&pinned, Some(&claim(volume)));
            let texts = ["data", "claim-1", "pvc-old", stated, MANAGEMENT_VOLUME];
            assert!(texts.iter().all(|text| finding.contains(text)), "{finding}");
        }
    }

    #[test]
    fn a_claim_that_is_shared_read_only_is_compatible_only_with_readers() {
        let shared =
            ClaimProperties { read_only: true, ..claim_properties(1, &["ReadWriteOnce", "ReadOnlyMany"]) };
        assert!(finding(&requirements(1, &["ReadWriteOnce"]), Some(&shared)).contains("read-only"));
        assert_eq!(finding(&requirements(1, &["ReadOnlyMany"]), Some(&shared)), "");
        let reader = PvRequirements { read_only: true, ..requirements(1, &["ReadWriteOnce"]) };
        assert_eq!(finding(&reader, Some(&shared)), "");
    }
}
