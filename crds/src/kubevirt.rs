//! What KubeVirt's API and its claims mean to all programs.

/// API group of KubeVirt.
pub const GROUP: &str = "kubevirt.io";

/// Whether several VMs may write to the disk of a claim at once, by its spec: the access modes of a claim never change. With a filesystem,
/// a claim holds the disk image of one VM.
pub fn is_shareable(access_modes: &[String], volume_mode: Option<&str>) -> bool {
    volume_mode == Some("Block") && access_modes.iter().any(|mode| mode == "ReadWriteMany")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_raw_block_device_with_read_write_many_is_shareable() {
        let is = |modes: &[&str], mode| {
            is_shareable(&modes.iter().map(|&one| one.to_owned()).collect::<Vec<_>>(), mode)
        };
        assert!(
            is(&["ReadWriteMany"], Some("Block")) && is(&["ReadWriteOnce", "ReadWriteMany"], Some("Block"))
        );
        for mode in [None, Some("Filesystem")] {
            assert!(!is(&["ReadWriteMany"], mode), "a disk image");
        }
        for modes in [&[][..], &["ReadWriteOnce"], &["ReadWriteOncePod"], &["ReadOnlyMany"]] {
            assert!(!is(modes, Some("Block")), "{modes:?}");
        }
    }
}
