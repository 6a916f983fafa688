//! What of a domain's XML matters for plugging disks. Pure: text in, facts and text out.

use std::collections::HashSet;

use infra_api::{OnFull, Qos};
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
    /// It takes a place on a SCSI controller.
    pub is_scsi: bool,
    /// The `<target dev>`: how libvirt names the disk, not how the guest does.
    pub target: String,
    /// The file that is its source, where it is one.
    pub file: Option<String>,
    /// The guest cannot write.
    pub read_only: bool,
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

/// Why a disk cannot be plugged into a domain.
#[derive(Debug)]
pub(super) enum NoPlace {
    /// There is no place for another disk.
    Full(String),
    /// This disk or this domain is not as it must be.
    Unfit(String),
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
                            is_scsi: child("target").and_then(|t| t.attribute("bus")) == Some("scsi"),
                            target: child("target")
                                .and_then(|t| t.attribute("dev"))
                                .unwrap_or_default()
                                .to_owned(),
                            file: child("source").and_then(|s| s.attribute("file")).map(str::to_owned),
                            read_only: child("readonly").is_some(),
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

    /// How many disks of ours the domain can have: its places, less those that disks of others take.
    pub(super) fn max_disks(&self) -> u32 {
        let usable =
            |(controller, target): &&(u32, u32)| self.controllers.contains(controller) && *target < TARGETS;
        let taken = self.taken.iter().filter(usable).count();
        let ours = self.disks.iter().filter(|disk| disk.uuid.is_some() && disk.is_scsi).count();
        let places = self.controllers.len() * TARGETS as usize;
        u32::try_from(places - taken.saturating_sub(ours)).unwrap_or(u32::MAX)
    }

    /// The XML that plugs a disk into a free place of this domain.
    pub(super) fn disk_xml(&self, disk: &Disk) -> Result<String, NoPlace> {
        if self.controllers.is_empty() {
            return Err(NoPlace::Full(
                "it has no virtio-scsi controller; give it one: <controller type='scsi' model='virtio-scsi'/>"
                    .into(),
            ));
        }
        let (controller, target) = self
            .controllers
            .iter()
            .flat_map(|&controller| (0..TARGETS).map(move |target| (controller, target)))
            .find(|place| !self.taken.contains(place))
            .ok_or_else(|| {
                NoPlace::Full(format!(
                    "all {} places on its virtio-scsi controllers are taken; detach a disk, or give it another \
                     controller",
                    self.taken.len()
                ))
            })?;
        let name = (0..)
            .map(device_name)
            .find(|name| self.disks.iter().all(|disk| disk.target != *name))
            .unwrap_or_default();
        let DiskSource::File(path) = &disk.source;
        let path = path
            .to_str()
            .ok_or_else(|| NoPlace::Unfit(format!("the path {} is not UTF-8", path.display())))?;
        let read_only = if disk.read_only { "<readonly/>" } else { "" };
        // Without it QEMU's lock on the file keeps every other machine out.
        let shared = if disk.shared { "<shareable/>" } else { "" };
        let limits = iotune(&disk.qos);
        // Whatever else fails goes to the guest, which can tell its user.
        let policy = match disk.on_full {
            OnFull::Pause => "enospace",
            OnFull::Fail => "report",
        };
        Ok(format!(
            "<disk type='file' device='disk'>\
             <driver name='qemu' type='raw' cache='none' discard='unmap' error_policy='{policy}' \
             rerror_policy='report'/>\
             <source file='{}'/><target dev='{name}' bus='scsi'/>{read_only}{shared}{limits}\
             <serial>{}</serial><wwn>{}</wwn>\
             <address type='drive' controller='{controller}' bus='0' target='{target}' unit='0'/></disk>",
            escape(path),
            disk.uuid,
            disk.wwn(),
        ))
    }
}

/// The host's UUID in libvirt's capabilities.
pub(super) fn host_uuid(capabilities: &str) -> Option<Uuid> {
    let document = roxmltree::Document::parse(capabilities).ok()?;
    let host = document.root_element().children().find(|node| node.has_tag_name("host"))?;
    host.children().find(|node| node.has_tag_name("uuid"))?.text()?.trim().parse().ok()
}

/// The limits of a disk; nothing where there are none.
fn iotune(qos: &Qos) -> String {
    if qos.is_unlimited() {
        return String::new();
    }
    let limit = |name: &str, value: Option<u64>| {
        value.map(|value| format!("<{name}>{value}</{name}>")).unwrap_or_default()
    };
    format!(
        "<iotune>{}{}</iotune>",
        limit("total_bytes_sec", qos.bytes_per_second),
        limit("total_iops_sec", qos.iops)
    )
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
            shared: false,
            qos: Qos::default(),
            on_full: OnFull::default(),
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

    const CONTROLLER: &str = "<controller type='scsi' index='0' model='virtio-scsi'/>";

    #[test]
    fn a_disk_says_who_may_write_and_share_it_and_how_fast_it_may_be() {
        let mut all = disk("/v", true);
        assert!(!domain(CONTROLLER).disk_xml(&all).unwrap().contains("shareable"));
        all.shared = true;
        all.qos = Qos { iops: Some(100), bytes_per_second: Some(4096) };
        let xml = domain(CONTROLLER).disk_xml(&all).unwrap();
        assert!(xml.contains("<readonly/><shareable/>"), "{xml}");
        assert!(
            xml.contains(
                "<iotune><total_bytes_sec>4096</total_bytes_sec><total_iops_sec>100</total_iops_sec></iotune>"
            ),
            "{xml}"
        );
        assert!(xml.contains("error_policy='enospace' rerror_policy='report'"), "{xml}");
        all.on_full = OnFull::Fail;
        all.read_only = false;
        let xml = domain(CONTROLLER).disk_xml(&all).unwrap();
        assert!(xml.contains("<shareable/>") && !xml.contains("<readonly/>"), "{xml}");
        assert!(xml.contains(" error_policy='report' rerror_policy='report'"), "{xml}");
    }

    #[test]
    fn a_domain_has_places_for_all_but_the_disks_of_others_and_says_when_they_are_taken() {
        let none = domain("<controller type='scsi' index='0' model='lsilogic'/>");
        let NoPlace::Full(error) = none.disk_xml(&disk("/v", false)).unwrap_err() else { panic!("not full") };
        assert!(none.max_disks() == 0 && error.contains("virtio-scsi controller"), "{error}");

        let ours = domain(&format!("{CONTROLLER}{ROOT}")).disk_xml(&disk("/v", false)).unwrap();
        assert_eq!(domain(&format!("{CONTROLLER}{ROOT}{ours}")).max_disks(), 254);
        let place = |target| {
            format!(
                "<hostdev><address type='drive' controller='0' bus='0' target='{target}' unit='0'/></hostdev>"
            )
        };
        let all: String = (0..TARGETS).map(place).collect();
        let full = domain(&format!("{CONTROLLER}{all}"));
        assert!(full.max_disks() == 0 && matches!(full.disk_xml(&disk("/v", false)), Err(NoPlace::Full(_))));
    }

    #[test]
    fn the_host_of_a_daemon_is_read_from_its_capabilities() {
        let uuid = Uuid::from_u128(7);
        let text = |host: &str| {
            format!("<capabilities><host>{host}<cpu/></host><guest><uuid>x</uuid></guest></capabilities>")
        };
        assert_eq!(host_uuid(&text(&format!("<uuid>{uuid}</uuid>"))), Some(uuid));
        assert_eq!((host_uuid(&text("")), host_uuid("")), (None, None));
    }

    #[test]
    fn names_go_on_after_z() {
        let names: Vec<String> = [0, 25, 26, 51, 52, 701, 702].into_iter().map(device_name).collect();
        assert_eq!(names, ["sda", "sdz", "sdaa", "sdaz", "sdba", "sdzz", "sdaaa"]);
    }
}
