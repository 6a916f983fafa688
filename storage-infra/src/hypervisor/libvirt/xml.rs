//! What of a domain's XML matters for plugging disks. Pure: text in, facts and text out.

use std::collections::HashSet;

use uuid::Uuid;

use crate::engine::DiskSource;
use crate::hypervisor::Disk;

/// Targets per virtio-scsi controller that are used; one LUN each.
const TARGETS: u32 = 255;

/// A disk of a live domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LiveDisk {
    /// The `<serial>`, when it is a UUID.
    pub uuid: Option<Uuid>,
    /// The `<target dev>`: how libvirt names the disk, not how the guest does.
    pub target: String,
    /// The `<disk>` element as it stands.
    pub xml: String,
}

/// A live domain, as far as disks go.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct LiveDomain {
    /// Its disks.
    pub disks: Vec<LiveDisk>,
    controllers: Vec<u32>,
    taken: HashSet<(u32, u32)>,
}

impl LiveDomain {
    /// Reads a domain's XML.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let document = roxmltree::Document::parse(text).map_err(|e| format!("not XML: {e}"))?;
        let devices = document
            .root_element()
            .children()
            .find(|node| node.has_tag_name("devices"))
            .ok_or("the domain has no <devices>")?;
        let mut domain = Self::default();
        for device in devices.children().filter(roxmltree::Node::is_element) {
            let child = |name: &str| device.children().find(|node| node.has_tag_name(name));
            let number =
                |node: roxmltree::Node<'_, '_>, name: &str| node.attribute(name).and_then(|v| v.parse().ok());
            match device.tag_name().name() {
                "controller"
                    if device.attribute("type") == Some("scsi")
                        && matches!(
                            device.attribute("model"),
                            Some("virtio-scsi" | "virtio-transitional" | "virtio-non-transitional")
                        ) =>
                {
                    domain.controllers.extend(number(device, "index"));
                }
                "disk" | "hostdev" => {
                    if let Some(address) = child("address").filter(|a| a.attribute("type") == Some("drive"))
                        && let (Some(controller), Some(target)) =
                            (number(address, "controller"), number(address, "target"))
                    {
                        domain.taken.insert((controller, target));
                    }
                    if device.has_tag_name("disk") {
                        domain.disks.push(LiveDisk {
                            uuid: child("serial").and_then(|s| s.text()?.trim().parse().ok()),
                            target: child("target")
                                .and_then(|t| t.attribute("dev"))
                                .unwrap_or_default()
                                .to_owned(),
                            xml: text[device.range()].to_owned(),
                        });
                    }
                }
                _ => {}
            }
        }
        domain.controllers.sort_unstable();
        Ok(domain)
    }

    /// The disk with this UUID as its serial.
    pub(super) fn find(&self, uuid: Uuid) -> Option<&LiveDisk> {
        self.disks.iter().find(|disk| disk.uuid == Some(uuid))
    }

    /// The XML that plugs a disk into a free place of this domain.
    pub(super) fn disk_xml(&self, disk: &Disk) -> Result<String, String> {
        if self.controllers.is_empty() {
            return Err("the domain has no virtio-scsi controller; give it one: \
                 <controller type='scsi' model='virtio-scsi'/>"
                .into());
        }
        let (controller, target) = self
            .controllers
            .iter()
            .flat_map(|&controller| (0..TARGETS).map(move |target| (controller, target)))
            .find(|place| !self.taken.contains(place))
            .ok_or_else(|| {
                format!("all {} places on the domain's virtio-scsi controllers are taken", self.taken.len())
            })?;
        let name = (0..)
            .map(device_name)
            .find(|name| self.disks.iter().all(|disk| disk.target != *name))
            .unwrap_or_default();
        let DiskSource::File(path) = &disk.source;
        let path = path.to_str().ok_or_else(|| format!("the path {} is not UTF-8", path.display()))?;
        let access = if disk.read_only { "<readonly/><shareable/>" } else { "" };
        // Errors go to the guest, which can tell its user; stopping would take the whole machine with one full pool.
        Ok(format!(
            "<disk type='file' device='disk'>\
             <driver name='qemu' type='raw' cache='none' discard='unmap' error_policy='report'/>\
             <source file='{}'/><target dev='{name}' bus='scsi'/>{access}\
             <serial>{}</serial><wwn>{}</wwn>\
             <address type='drive' controller='{controller}' bus='0' target='{target}' unit='0'/></disk>",
            escape(path),
            disk.uuid,
            disk.wwn(),
        ))
    }
}

/// `sda`, `sdb`, … `sdz`, `sdaa`, …
fn device_name(mut index: u32) -> String {
    let mut letters = Vec::new();
    loop {
        letters.push(b'a' + (index % 26) as u8);
        index /= 26;
        if index == 0 {
            break;
        }
        index -= 1;
    }
    letters.reverse();
    format!("sd{}", String::from_utf8_lossy(&letters))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "<disk type='file' device='disk'><source file='/root.raw'/><target dev='sda' bus='scsi'/>\
        <address type='drive' controller='0' bus='0' target='0' unit='0'/></disk>";

    fn domain(devices: &str) -> LiveDomain {
        LiveDomain::parse(&format!("<domain type='qemu'><name>x</name><devices>{devices}</devices></domain>"))
            .unwrap()
    }

    fn disk(path: &str, read_only: bool) -> Disk {
        Disk {
            uuid: Uuid::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef),
            source: DiskSource::File(path.into()),
            read_only,
        }
    }

    #[test]
    fn a_new_disk_takes_the_first_free_name_and_place_and_is_found_again_by_its_serial() {
        let controller = "<controller type='scsi' index='0' model='virtio-scsi'/>";
        let before = domain(&format!("{controller}{ROOT}"));
        let xml = before.disk_xml(&disk("/pool/a'b.raw", false)).unwrap();
        assert!(xml.contains("target dev='sdb'") && xml.contains("target='1'"), "{xml}");
        assert!(xml.contains("<wwn>0123456789abcdef</wwn>") && xml.contains("a&apos;b"), "{xml}");
        let after = domain(&format!("{controller}{ROOT}{xml}"));
        let found = after.find(disk("/", false).uuid).unwrap();
        assert_eq!((found.target.as_str(), found.xml.as_str()), ("sdb", xml.as_str()));
        assert!(before.find(disk("/", false).uuid).is_none());
    }

    #[test]
    fn a_read_only_disk_is_marked_so_for_the_guest_and_for_the_lock() {
        let xml = domain("<controller type='scsi' index='0' model='virtio-scsi'/>")
            .disk_xml(&disk("/v", true))
            .unwrap();
        assert!(xml.contains("<readonly/><shareable/>"), "{xml}");
    }

    #[test]
    fn a_domain_without_a_place_says_what_it_lacks() {
        let error = domain("<controller type='scsi' index='0' model='lsilogic'/>")
            .disk_xml(&disk("/v", false))
            .unwrap_err();
        assert!(error.contains("virtio-scsi controller"), "{error}");
    }

    #[test]
    fn names_go_on_after_z() {
        let names: Vec<String> = [0, 25, 26, 51, 52, 701, 702].into_iter().map(device_name).collect();
        assert_eq!(names, ["sda", "sdz", "sdaa", "sdaz", "sdba", "sdzz", "sdaaa"]);
    }
}
