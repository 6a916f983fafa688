//! Disk identity: verifies a device by the serial or WWN that the device itself reports.
//!
//! A link in by-id shows only udev's view at one moment, so the driver compares the device's own serial before it writes.
//! Sources per bus: SCSI: VPD page 80, and the WWN in its wwid; virtio-blk: `serial`, truncated to 20 bytes; NVMe: `uuid`
//! (Linux, `Documentation/ABI`, block).

use std::path::Path;

use uuid::Uuid;

/// Maximum length of virtio-blk serials (virtio specification, "VIRTIO_BLK_T_GET_ID").
const VIRTIO_SERIAL: usize = 20;

/// Identifiers that a device reports.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Identifiers {
    /// SCSI serial.
    pub(super) scsi_serial: Option<String>,
    /// World-wide name with its type prefix.
    pub(super) wwid: Option<String>,
    /// Serial of a virtio-blk or NVMe device.
    pub(super) serial: Option<String>,
    /// UUID of an NVMe namespace.
    pub(super) nvme_uuid: Option<String>,
}

/// Result of comparing a device with a disk UUID.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Comparison {
    /// The device is this disk.
    Match,
    /// The device is another disk; contains its identifiers.
    Mismatch(String),
    /// The device reports no identifiers.
    Missing,
}

impl Identifiers {
    /// Reads the identifiers from the device's sysfs directory.
    pub(super) fn read(sysfs: &Path) -> Self {
        Self {
            scsi_serial: std::fs::read(sysfs.join("device/vpd_pg80")).ok().and_then(|page| vpd_serial(&page)),
            wwid: text(&sysfs.join("wwid")).or_else(|| text(&sysfs.join("device/wwid"))),
            serial: text(&sysfs.join("serial")).or_else(|| text(&sysfs.join("device/serial"))),
            nvme_uuid: text(&sysfs.join("uuid")),
        }
    }

    /// Compares the identifiers with a disk UUID. Complete UUIDs take precedence over truncated ones.
    pub(super) fn compare(&self, uuid: &Uuid) -> Comparison {
        let requested = uuid.simple().to_string();
        let wwn = self.wwid.as_deref().and_then(|wwid| wwid.strip_prefix("naa."));
        let whole: Vec<String> =
            [self.scsi_serial.as_deref(), self.serial.as_deref(), self.nvme_uuid.as_deref(), wwn]
                .into_iter()
                .flatten()
                .filter_map(whole_uuid)
                .collect();
        let cut_serial: String = uuid.hyphenated().to_string().chars().take(VIRTIO_SERIAL).collect();
        let matches = if whole.is_empty() {
            let by_wwn = wwn.is_some_and(|wwn| wwn.eq_ignore_ascii_case(&requested[..16]));
            by_wwn || self.serial.as_deref().is_some_and(|serial| serial.eq_ignore_ascii_case(&cut_serial))
        } else {
            whole.iter().all(|reported| *reported == requested)
        };
        match (matches, self.to_string()) {
            (true, _) => Comparison::Match,
            (false, reported) if reported.is_empty() => Comparison::Missing,
            (false, reported) => Comparison::Mismatch(reported),
        }
    }
}

impl std::fmt::Display for Identifiers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let identifiers = [
            ("SCSI serial", &self.scsi_serial),
            ("wwid", &self.wwid),
            ("serial", &self.serial),
            ("NVMe UUID", &self.nvme_uuid),
        ];
        let reported: Vec<_> = identifiers
            .iter()
            .filter_map(|(what, reported)| Some(format!("{what} {:?}", reported.as_ref()?)))
            .collect();
        f.write_str(&reported.join(", "))
    }
}

/// The 32 hex digits of a complete UUID, with or without hyphens; None for other texts and for zeros, which mean unset.
fn whole_uuid(text: &str) -> Option<String> {
    let hex: String = text.chars().filter(|c| *c != '-').collect::<String>().to_ascii_lowercase();
    let whole =
        hex.len() == 32 && hex.bytes().all(|b| b.is_ascii_hexdigit()) && hex.bytes().any(|b| b != b'0');
    whole.then_some(hex)
}

/// Serial in VPD page 80: two bytes of type, two of length, then text (SPC-5, "Unit Serial Number").
fn vpd_serial(page: &[u8]) -> Option<String> {
    let length = usize::from(u16::from_be_bytes([*page.get(2)?, *page.get(3)?]));
    let serial = page.get(4..)?;
    tidy(&String::from_utf8_lossy(&serial[..length.min(serial.len())]))
}

fn text(path: &Path) -> Option<String> {
    tidy(&String::from_utf8_lossy(&std::fs::read(path).ok()?))
}

fn tidy(text: &str) -> Option<String> {
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";

    fn compare(identifiers: &Identifiers) -> Comparison {
        identifiers.compare(&UUID.parse().unwrap())
    }

    fn some(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn each_bus_can_verify_a_disk() {
        for identifiers in [
            Identifiers {
                scsi_serial: some(UUID),
                wwid: some("naa.6f9c1b2a0d3e4f5a"),
                ..Identifiers::default()
            },
            Identifiers { scsi_serial: some("6F9C1B2A0D3E4F5A8B7C1234567890AB"), ..Identifiers::default() },
            Identifiers { wwid: some("naa.6f9c1b2a0d3e4f5a"), ..Identifiers::default() },
            Identifiers { wwid: some("naa.6f9c1b2a0d3e4f5a8b7c1234567890ab"), ..Identifiers::default() },
            Identifiers { serial: some("6f9c1b2a-0d3e-4f5a-8"), ..Identifiers::default() },
            Identifiers { nvme_uuid: some(UUID), serial: some("controller-1"), ..Identifiers::default() },
            Identifiers {
                scsi_serial: some(UUID),
                wwid: some("t10.QEMU    HARDDISK"),
                ..Identifiers::default()
            },
        ] {
            assert_eq!(compare(&identifiers), Comparison::Match, "{identifiers}");
        }
    }

    #[test]
    fn another_disk_is_recognized_by_its_identifiers() {
        let near = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ac";
        for identifiers in [
            // The WWN matches, but the complete serial does not.
            Identifiers {
                scsi_serial: some(near),
                wwid: some("naa.6f9c1b2a0d3e4f5a"),
                ..Identifiers::default()
            },
            Identifiers { wwid: some("naa.6f9c1b2a0d3e4f5b"), ..Identifiers::default() },
            Identifiers { serial: some("6f9c1b2a-0d3e-4f5a-9"), ..Identifiers::default() },
            Identifiers { scsi_serial: some("system-disk"), ..Identifiers::default() },
            Identifiers { serial: some("6f9c1b2a"), ..Identifiers::default() },
        ] {
            assert!(matches!(compare(&identifiers), Comparison::Mismatch(_)), "{identifiers}");
        }
    }

    #[test]
    fn a_device_without_identifiers_is_unknown() {
        assert_eq!(compare(&Identifiers::default()), Comparison::Missing);
    }

    #[test]
    fn a_vpd_page_is_read_up_to_its_length() {
        assert_eq!(vpd_serial(b"\0\x80\0\x05abc  \0junk"), some("abc"));
        assert_eq!(vpd_serial(b"\0\x80\0\x10abc"), some("abc"));
        assert_eq!(vpd_serial(b"\0\x80\0\0"), None);
        assert_eq!(vpd_serial(b""), None);
    }
}
