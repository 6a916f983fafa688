//! Whether a device is the disk it is taken for, by what the device itself says.
//!
//! The name under by-id is only udev's word at one moment; before anything is written, the device's
//! own serial is compared. Where each bus shows it: SCSI in VPD page 80 and, as a WWN, in its wwid;
//! virtio-blk in `serial`, cut at 20 bytes; NVMe in `uuid` (Linux, `Documentation/ABI`, block).

use std::path::Path;

use uuid::Uuid;

/// virtio-blk carries this many bytes of a serial (virtio specification, "VIRTIO_BLK_T_GET_ID").
const VIRTIO_SERIAL: usize = 20;

/// What a device says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// SCSI serial.
    pub(super) scsi_serial: Option<String>,
    /// World-wide name, with its kind before it.
    pub(super) wwid: Option<String>,
    /// Serial of a virtio-blk or NVMe device.
    pub(super) serial: Option<String>,
    /// UUID of an NVMe namespace.
    pub(super) nvme_uuid: Option<String>,
}

/// What the facts say about a disk UUID.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is that disk.
    Proven,
    /// It is another; the text says what the device says.
    Another(String),
    /// The device says nothing of itself.
    Unknown,
}

impl Facts {
    /// Reads what the device with this folder in sysfs says.
    pub(super) fn read(sysfs: &Path) -> Self {
        Self {
            scsi_serial: std::fs::read(sysfs.join("device/vpd_pg80")).ok().and_then(|page| vpd_serial(&page)),
            wwid: text(&sysfs.join("wwid")).or_else(|| text(&sysfs.join("device/wwid"))),
            serial: text(&sysfs.join("serial")).or_else(|| text(&sysfs.join("device/serial"))),
            nvme_uuid: text(&sysfs.join("uuid")),
        }
    }

    /// Judges. A fact that holds all of a UUID decides; else one that holds its first part does.
    pub(super) fn judge(&self, uuid: &Uuid) -> Verdict {
        let wanted = uuid.simple().to_string();
        let wwn = self.wwid.as_deref().and_then(|wwid| wwid.strip_prefix("naa."));
        let whole: Vec<String> =
            [self.scsi_serial.as_deref(), self.serial.as_deref(), self.nvme_uuid.as_deref(), wwn]
                .into_iter()
                .flatten()
                .filter_map(whole_uuid)
                .collect();
        let cut_serial: String = uuid.hyphenated().to_string().chars().take(VIRTIO_SERIAL).collect();
        let proven = if whole.is_empty() {
            let by_wwn = wwn.is_some_and(|wwn| wwn.eq_ignore_ascii_case(&wanted[..16]));
            by_wwn || self.serial.as_deref().is_some_and(|serial| serial.eq_ignore_ascii_case(&cut_serial))
        } else {
            whole.iter().all(|said| *said == wanted)
        };
        match (proven, self.to_string()) {
            (true, _) => Verdict::Proven,
            (false, said) if said.is_empty() => Verdict::Unknown,
            (false, said) => Verdict::Another(said),
        }
    }
}

impl std::fmt::Display for Facts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let facts = [
            ("SCSI serial", &self.scsi_serial),
            ("wwid", &self.wwid),
            ("serial", &self.serial),
            ("NVMe UUID", &self.nvme_uuid),
        ];
        let said: Vec<_> =
            facts.iter().filter_map(|(what, said)| Some(format!("{what} {:?}", said.as_ref()?))).collect();
        f.write_str(&said.join(", "))
    }
}

/// The 32 hex digits of a text that is a whole UUID, with or without hyphens; all zero means unset.
fn whole_uuid(text: &str) -> Option<String> {
    let hex: String = text.chars().filter(|c| *c != '-').collect::<String>().to_ascii_lowercase();
    let whole =
        hex.len() == 32 && hex.bytes().all(|b| b.is_ascii_hexdigit()) && hex.bytes().any(|b| b != b'0');
    whole.then_some(hex)
}

/// The serial in VPD page 80: two bytes of kind, two of length, then text (SPC-5, "Unit Serial Number").
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

    fn judge(facts: &Facts) -> Verdict {
        facts.judge(&UUID.parse().unwrap())
    }

    fn some(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn each_bus_can_prove_a_disk() {
        for facts in [
            Facts { scsi_serial: some(UUID), wwid: some("naa.6f9c1b2a0d3e4f5a"), ..Facts::default() },
            Facts { scsi_serial: some("6F9C1B2A0D3E4F5A8B7C1234567890AB"), ..Facts::default() },
            Facts { wwid: some("naa.6f9c1b2a0d3e4f5a"), ..Facts::default() },
            Facts { wwid: some("naa.6f9c1b2a0d3e4f5a8b7c1234567890ab"), ..Facts::default() },
            Facts { serial: some("6f9c1b2a-0d3e-4f5a-8"), ..Facts::default() },
            Facts { nvme_uuid: some(UUID), serial: some("controller-1"), ..Facts::default() },
            Facts { scsi_serial: some(UUID), wwid: some("t10.QEMU    HARDDISK"), ..Facts::default() },
        ] {
            assert_eq!(judge(&facts), Verdict::Proven, "{facts}");
        }
    }

    #[test]
    fn another_disk_is_told_by_what_it_says() {
        let near = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ac";
        for facts in [
            // The WWN agrees, but the whole serial does not.
            Facts { scsi_serial: some(near), wwid: some("naa.6f9c1b2a0d3e4f5a"), ..Facts::default() },
            Facts { wwid: some("naa.6f9c1b2a0d3e4f5b"), ..Facts::default() },
            Facts { serial: some("6f9c1b2a-0d3e-4f5a-9"), ..Facts::default() },
            Facts { scsi_serial: some("system-disk"), ..Facts::default() },
            Facts { serial: some("6f9c1b2a"), ..Facts::default() },
        ] {
            assert!(matches!(judge(&facts), Verdict::Another(_)), "{facts}");
        }
    }

    #[test]
    fn a_silent_device_proves_nothing() {
        assert_eq!(judge(&Facts::default()), Verdict::Unknown);
    }

    #[test]
    fn a_vpd_page_is_read_by_its_length() {
        assert_eq!(vpd_serial(b"\0\x80\0\x05abc  \0junk"), some("abc"));
        assert_eq!(vpd_serial(b"\0\x80\0\x10abc"), some("abc"));
        assert_eq!(vpd_serial(b"\0\x80\0\0"), None);
        assert_eq!(vpd_serial(b""), None);
    }
}
