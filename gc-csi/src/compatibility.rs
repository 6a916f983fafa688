//! Whether a guest's PersistentVolume fits the management claim that it names. A person who writes one by hand can be
//! wrong about every part of it, so the same check tells them at once and keeps the disk out of the VM.

use crds::names::MANAGEMENT_VOLUME;
use kube_kit::quantity;

use crate::pin::Pin;

/// Which management claim, for what, and how a guest wants it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PvRequirements {
    /// The guest's PersistentVolume, where it is known.
    pub(crate) volume: Option<String>,
    /// What it says its capacity is, in bytes.
    pub(crate) capacity: Option<u64>,
    /// Whether it is for a raw block device.
    pub(crate) block: bool,
    /// Its access modes, as Kubernetes writes them.
    pub(crate) modes: Vec<String>,
    /// Whether it is attached for reading only, whatever its modes are.
    pub(crate) read_only: bool,
    /// Which bytes it stands for.
    pub(crate) pin: Pin,
}

impl PvRequirements {
    /// Whether it is only ever read.
    pub(crate) fn reads_only(&self) -> bool {
        self.read_only || self.modes.iter().all(|mode| mode == "ReadOnlyMany")
    }

    /// What it is, for people.
    fn name(&self) -> String {
        match &self.volume {
            Some(name) => format!("guest PersistentVolume {name}"),
            None => "the guest's PersistentVolume".to_owned(),
        }
    }
}

/// The management claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ClaimProperties {
    /// What it really has, in bytes; None before it is bound.
    pub(crate) capacity: Option<u64>,
    /// Whether it is a raw block device.
    pub(crate) block: bool,
    /// Its access modes, as Kubernetes writes them.
    pub(crate) modes: Vec<String>,
    /// Whether it is shared with this guest for reading only.
    pub(crate) read_only: bool,
    /// The management PersistentVolume that it is bound to, or is to be.
    pub(crate) volume: Option<String>,
}

/// What does not fit, in a sentence that names both tiers' objects and says what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Incompatible {
    /// There is no such claim to this guest.
    #[error(
        "{0}: management PersistentVolumeClaim {1} does not exist, or is neither this guest's nor shared with it; \
         correct volumeHandle, or ask the platform team to label the claim {2}: rw or ro"
    )]
    ClaimNotFound(String, String, String),
    /// It differs from the claim.
    #[error("{0}, but management PersistentVolumeClaim {1} {2}; {3}")]
    Differs(String, String, String, &'static str),
    /// The claim has other bytes than those that the volume stands for.
    #[error(
        "{volume} is pinned to management PersistentVolume {pinned}, but management PersistentVolumeClaim {claim} is \
         bound to {bound}: a claim that was deleted and made anew under the same name has other bytes; have the claim \
         bound to {pinned} again, or, if the other volume is meant, set annotation {MANAGEMENT_VOLUME} on {volume} to \
         its name"
    )]
    Replaced {
        /// The guest's volume.
        volume: String,
        /// What it is pinned to.
        pinned: String,
        /// The management claim.
        claim: String,
        /// What that is bound to.
        bound: String,
    },
}

/// Compares what is asked with the management claim `claim`, which is None where this guest has none of that name;
/// `share_label` is the label by which it could be given one.
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
    if requirements.block != claim_properties.block {
        let mode = |block| if block { "Block" } else { "Filesystem" };
        return differs(
            format!("has volumeMode {}", mode(requirements.block)),
            format!("has {}", mode(claim_properties.block)),
            "make the volume anew with the claim's volumeMode",
        );
    }
    if let (Some(stated), Some(has)) = (requirements.capacity, claim_properties.capacity)
        && stated > has
    {
        return differs(
            format!("says its capacity is {}", quantity::of(stated).0),
            format!("has {}", quantity::of(has).0),
            "make the volume anew with no more than that, or have the claim expanded",
        );
    }
    if let Some(mode) = requirements.modes.iter().find(|mode| !allows(&claim_properties.modes, mode)) {
        return differs(
            format!("has access mode {mode}"),
            format!("has {} only", claim_properties.modes.join(", ")),
            "make the volume anew with an access mode that the claim has",
        );
    }
    if claim_properties.read_only && !requirements.reads_only() {
        return differs(
            format!("has access mode {} and is not read-only", requirements.modes.join(", ")),
            "is shared with this guest for reading only".to_owned(),
            "make the volume anew with csi.readOnly: true, or with access mode ReadOnlyMany",
        );
    }
    Ok(())
}

/// Whether the claim, which is bound to `bound`, has the bytes that the volume stands for.
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

/// Whether a claim of these modes can be used in this one. ReadWriteOncePod keeps pods apart, not nodes, so to a
/// VM it is ReadWriteOnce; and what many may write, many may read, and one alone may have.
fn allows(modes: &[String], wanted: &str) -> bool {
    let node_wise =
        |mode: &str| if mode == "ReadWriteOncePod" { "ReadWriteOnce".to_owned() } else { mode.to_owned() };
    modes.iter().any(|mode| mode == "ReadWriteMany" || node_wise(mode) == node_wise(wanted))
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
        ClaimProperties { capacity: Some(gibibytes << 30), modes, ..ClaimProperties::default() }
    }

    fn finding(requirements: &PvRequirements, claim_properties: Option<&ClaimProperties>) -> String {
        check(requirements, "claim-1", LABEL, claim_properties)
            .map_err(|incompatible| incompatible.to_string())
            .err()
            .unwrap_or_default()
    }

    #[test]
    fn a_claim_that_is_as_large_or_larger_and_of_the_same_mode_fits() {
        for (wanted, has) in [
            ("ReadWriteOnce", "ReadWriteOnce"),
            ("ReadWriteOncePod", "ReadWriteOnce"),
            ("ReadWriteOnce", "ReadWriteOncePod"),
            ("ReadOnlyMany", "ReadOnlyMany"),
            ("ReadOnlyMany", "ReadWriteMany"),
            ("ReadWriteOnce", "ReadWriteMany"),
        ] {
            assert_eq!(
                finding(&requirements(1, &[wanted]), Some(&claim_properties(2, &[has]))),
                "",
                "{wanted} of {has}"
            );
        }
        let unbound = ClaimProperties { capacity: None, ..claim_properties(1, &["ReadWriteOnce"]) };
        assert_eq!(finding(&requirements(9, &["ReadWriteOnce"]), Some(&unbound)), "");
    }

    #[test]
    fn each_difference_is_told_with_both_names_and_a_remedy() {
        let one = claim_properties(1, &["ReadWriteOnce"]);
        assert_eq!(
            finding(&requirements(2, &["ReadWriteOnce"]), Some(&one)),
            "guest PersistentVolume data says its capacity is 2Gi, but management PersistentVolumeClaim claim-1 has \
             1Gi; make the volume anew with no more than that, or have the claim expanded"
        );
        let block = PvRequirements { block: true, ..requirements(1, &["ReadWriteOnce"]) };
        assert!(finding(&block, Some(&one)).contains("volumeMode Block"));
        for mode in ["ReadOnlyMany", "ReadWriteMany"] {
            assert!(finding(&requirements(1, &["ReadWriteOnce", mode]), Some(&one)).contains(mode), "{mode}");
        }
        assert!(finding(&requirements(1, &["ReadWriteOnce"]), None).contains(LABEL));
    }

    #[test]
    fn a_claim_with_other_bytes_does_not_fit_whatever_else_does() {
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
    fn a_claim_shared_for_reading_takes_readers_only() {
        let shared =
            ClaimProperties { read_only: true, ..claim_properties(1, &["ReadWriteOnce", "ReadOnlyMany"]) };
        assert!(finding(&requirements(1, &["ReadWriteOnce"]), Some(&shared)).contains("for reading only"));
        assert_eq!(finding(&requirements(1, &["ReadOnlyMany"]), Some(&shared)), "");
        let reader = PvRequirements { read_only: true, ..requirements(1, &["ReadWriteOnce"]) };
        assert_eq!(finding(&reader, Some(&shared)), "");
    }
}
