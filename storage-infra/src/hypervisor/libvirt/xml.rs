//! Domain XML: parses the disks of a live domain and generates the XML of a new disk. Pure.

use std::collections::HashSet;

use infra_api::{DiskDiscard, DiskIo, DiskOptions, OnFull, Qos};
use uuid::Uuid;

use crate::hypervisor::{
    AttachedDisk, BlockJob, CephClient, Disk, DiskLocation, DiskSource, MirrorState, RbdImage, RbdSource,
    Settings, wwn,
};

/// How QEMU reads and writes a file, if its volume does not say: as QEMU does by default. It never blocks QEMU's main loop.
const DEFAULT_IO: DiskIo = DiskIo::Threads;

/// Number of targets used per virtio-scsi controller; one LUN each.
const TARGETS: u32 = 255;

/// A disk of a live domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LiveDisk {
    /// The `<serial>`, if it is a UUID.
    pub uuid: Option<Uuid>,
    /// Whether it occupies a slot of a SCSI controller.
    pub is_scsi: bool,
    /// The `<target dev>`: libvirt's name of the disk, not the guest's.
    pub target: String,
    /// Where its data is: the layer that is written first, then those below it. Empty if that is neither a file nor an
    /// image.
    pub layers: Vec<DiskLocation>,
    /// How it is opened.
    pub settings: Settings,
    /// Whether the running block job writes the first layer into one below it.
    pub is_committed: bool,
    /// The copy of the disk that is running: where it goes, and how far it is.
    pub mirror: Option<(DiskLocation, MirrorState)>,
    /// Whether the guest cannot write.
    pub read_only: bool,
    /// The `<disk>` element, unchanged.
    pub xml: String,
}

/// Disks and SCSI controllers of a live domain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct LiveDomain {
    /// Name of the domain.
    pub name: String,
    /// The disks.
    pub disks: Vec<LiveDisk>,
    controllers: Vec<u32>,
    taken: HashSet<(u32, u32)>,
}

/// Why a disk cannot be attached to a domain.
#[derive(Debug)]
pub(super) enum AttachError {
    /// The domain has no free slot for another disk.
    NoFreeSlot(String),
    /// The disk cannot be described in XML.
    Unsupported(String),
}

impl LiveDomain {
    /// Parses a domain's XML.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let document = roxmltree::Document::parse(text).map_err(|e| format!("not XML: {e}"))?;
        let devices = document
            .root_element()
            .children()
            .find(|node| node.has_tag_name("devices"))
            .ok_or("the domain has no <devices>")?;
        let name = document.root_element().children().find(|node| node.has_tag_name("name"));
        let name = name.and_then(|name| name.text()).unwrap_or_default().to_owned();
        let mut domain = Self { name, ..Self::default() };
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
                            layers: layers(device),
                            settings: settings(device),
                            is_committed: child("mirror")
                                .is_some_and(|mirror| mirror.attribute("job") == Some("active-commit")),
                            mirror: child("mirror").and_then(mirror),
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

    /// Finds the disk with this UUID as its serial.
    pub(super) fn find(&self, uuid: Uuid) -> Option<&LiveDisk> {
        self.disks.iter().find(|disk| disk.uuid == Some(uuid))
    }

    /// Finds a disk by its serial, or else by its data in any layer.
    pub(super) fn find_disk(&self, disk: &Disk) -> Option<&LiveDisk> {
        let data = disk.source.location();
        self.find(disk.uuid).or_else(|| self.disks.iter().find(|one| one.layers.contains(&data)))
    }

    /// Maximum number of volumes that the domain can have attached: its slots without those of foreign disks.
    pub(super) fn max_disks(&self) -> u32 {
        let usable =
            |(controller, target): &&(u32, u32)| self.controllers.contains(controller) && *target < TARGETS;
        let taken = self.taken.iter().filter(usable).count();
        let ours = self.disks.iter().filter(|disk| disk.uuid.is_some() && disk.is_scsi).count();
        let slots = self.controllers.len() * TARGETS as usize;
        u32::try_from(slots - taken.saturating_sub(ours)).unwrap_or(u32::MAX)
    }

    /// The XML that attaches a disk to a free slot of this domain.
    pub(super) fn disk_xml(&self, disk: &Disk) -> Result<String, AttachError> {
        if self.controllers.is_empty() {
            return Err(AttachError::NoFreeSlot(
                "it has no virtio-scsi controller; add one: <controller type='scsi' model='virtio-scsi'/>"
                    .into(),
            ));
        }
        let (controller, target) = self
            .controllers
            .iter()
            .flat_map(|&controller| (0..TARGETS).map(move |target| (controller, target)))
            .find(|slot| !self.taken.contains(slot))
            .ok_or_else(|| {
                AttachError::NoFreeSlot(format!(
                    "all {} slots of its virtio-scsi controllers are in use; detach a disk or add a controller",
                    self.taken.len()
                ))
            })?;
        let name = (0..)
            .map(device_name)
            .find(|name| self.disks.iter().all(|disk| disk.target != *name))
            .unwrap_or_default();
        let source = Source::of(&disk.source)?;
        let read_only = if disk.read_only { "<readonly/>" } else { "" };
        // Without <shareable/> QEMU's image lock excludes every other virtual machine.
        let shared = if disk.shared { "<shareable/>" } else { "" };
        let limits = iotune(&disk.qos);
        // All other errors are reported to the guest, which reports them to its user.
        let policy = match disk.on_full {
            OnFull::Pause => "enospace",
            OnFull::Fail => "report",
        };
        Ok(format!(
            "<disk type='{}' device='disk'>\
             <driver name='qemu' type='raw' {} error_policy='{policy}' rerror_policy='report'/>\
             {}<target dev='{name}' bus='scsi'/>{read_only}{shared}{limits}\
             <serial>{}</serial><wwn>{}</wwn>\
             <address type='drive' controller='{controller}' bus='0' target='{target}' unit='0'/></disk>",
            source.kind,
            driver_options(&disk.source, &disk.options),
            source.xml,
            disk.uuid,
            disk.wwn(),
        ))
    }
}

impl LiveDisk {
    /// Where writes go.
    pub(super) fn location(&self) -> Option<&DiskLocation> {
        self.layers.first()
    }

    /// The disk of this domain.
    pub(super) fn attached_to(&self, node: Uuid, domain: &LiveDomain) -> AttachedDisk {
        let job = self.mirror.as_ref();
        AttachedDisk {
            node,
            name: domain.name.clone(),
            target: self.target.clone(),
            layers: self.layers.clone(),
            wwn: self.uuid.map(wwn),
            read_only: self.read_only,
            settings: Some(self.settings.clone()),
            job: job.map(|(to, _)| BlockJob { is_commit: self.is_committed, to: to.clone() }),
        }
    }
}

/// The layers of a `<disk>`, by its `<source>` and the `<backingStore>` in it, and in each other.
fn layers(disk: roxmltree::Node<'_, '_>) -> Vec<DiskLocation> {
    let mut found = Vec::new();
    let mut next = Some(disk);
    while let Some(layer) = next {
        let child = |name: &str| layer.children().find(|node| node.has_tag_name(name));
        found.extend(child("source").and_then(location));
        next = child("backingStore");
    }
    found
}

/// How a `<disk>` is opened.
fn settings(disk: roxmltree::Node<'_, '_>) -> Settings {
    let child = |name: &str| disk.children().find(|node| node.has_tag_name(name));
    let driver = |name: &str| child("driver").and_then(|driver| driver.attribute(name)).unwrap_or_default();
    Settings {
        format: driver("type").to_owned(),
        cache: driver("cache").to_owned(),
        shareable: child("shareable").is_some(),
        transient: child("transient").is_some(),
    }
}

/// Where the data of a disk is by its `<source>`. A layer of an unknown kind is a layer all the same.
fn location(source: roxmltree::Node<'_, '_>) -> Option<DiskLocation> {
    let other = || {
        let all: Vec<String> = source.attributes().map(|a| format!("{}={}", a.name(), a.value())).collect();
        (!all.is_empty()).then(|| DiskLocation::Other(format!("a source with {}", all.join(", "))))
    };
    known_location(source).or_else(other)
}

/// The file, block device or RBD image that an element names.
fn known_location(element: roxmltree::Node<'_, '_>) -> Option<DiskLocation> {
    if let Some(file) = element.attribute("file").or_else(|| element.attribute("dev")) {
        return Some(DiskLocation::File(file.into()));
    }
    let is_rbd = element.attribute("protocol") == Some("rbd");
    element.attribute("name").filter(|_| is_rbd).and_then(RbdImage::parse).map(DiskLocation::Rbd)
}

/// The kind of a disk, and its `<auth>` and `<source>`.
struct Source {
    kind: &'static str,
    xml: String,
}

impl Source {
    fn of(source: &DiskSource) -> Result<Self, AttachError> {
        match source {
            DiskSource::File(path) => {
                Ok(Self { kind: "file", xml: format!("<source file='{}'/>", attribute(path.to_str())?) })
            }
            DiskSource::Rbd(source) => Ok(Self { kind: "network", xml: rbd(source)? }),
        }
    }
}

/// The key is in the secret, which only the host of the domain has.
fn rbd(source: &RbdSource) -> Result<String, AttachError> {
    let RbdSource { image, client } = source;
    Ok(format!(
        "<auth username='{}'><secret type='ceph' uuid='{}'/></auth>\
         <source protocol='rbd' name='{}'><config file='{}'/></source>",
        attribute(Some(&client.user))?,
        client.secret,
        attribute(Some(&image.to_string()))?,
        attribute(client.conf.to_str())?,
    ))
}

/// The secret that holds the key of a Ceph client: on no disk, and readable by no other client of libvirt.
pub(super) fn secret_xml(client: &CephClient) -> String {
    format!(
        "<secret ephemeral='yes' private='yes'><uuid>{0}</uuid><usage type='ceph'><name>nestor {0}</name></usage></secret>",
        client.secret
    )
}

/// A text as the value of an XML attribute.
fn attribute(text: Option<&str>) -> Result<String, AttachError> {
    let text = text.filter(|text| text.chars().all(is_attribute_text)).ok_or_else(|| {
        AttachError::Unsupported(format!("its source {text:?} is not UTF-8 or has control characters"))
    })?;
    Ok(escape(text))
}

/// Where the copy of a `<mirror>` element goes, and how far it is by its attribute `ready`.
fn mirror(element: roxmltree::Node<'_, '_>) -> Option<(DiskLocation, MirrorState)> {
    let source = element.children().find(|node| node.has_tag_name("source"));
    // Before the copy has begun, only the element itself names the file.
    let to = source.and_then(location).or_else(|| known_location(element))?;
    let state = match element.attribute("ready") {
        Some("yes") => MirrorState::Ready,
        Some("pivot") => MirrorState::Pivoting,
        Some("abort") => MirrorState::Aborting,
        _ => MirrorState::Copying,
    };
    Some((to, state))
}

/// The XML of the storage into which a disk is copied.
pub(super) fn mirror_xml(to: &DiskSource, options: &DiskOptions) -> Result<String, AttachError> {
    let Source { kind, xml } = Source::of(to)?;
    let options = driver_options(to, options);
    Ok(format!("<disk type='{kind}' device='disk'><driver name='qemu' type='raw' {options}/>{xml}</disk>"))
}

/// The attributes of `<driver>` for the options of a disk.
fn driver_options(source: &DiskSource, options: &DiskOptions) -> String {
    let discard = options.discard.unwrap_or(DiskDiscard::Unmap);
    let zeros = options.detect_zeroes.map(|zeros| format!(" detect_zeroes='{zeros}'")).unwrap_or_default();
    let cache = source.cache(options);
    let io = match source {
        DiskSource::File(_) => format!(" io='{}'", options.io.unwrap_or(DEFAULT_IO)),
        DiskSource::Rbd(_) => String::new(),
    };
    format!("cache='{cache}'{io} discard='{discard}'{zeros}")
}

/// The host's UUID in libvirt's capabilities XML.
pub(super) fn host_uuid(capabilities: &str) -> Option<Uuid> {
    let document = roxmltree::Document::parse(capabilities).ok()?;
    let host = document.root_element().children().find(|node| node.has_tag_name("host"))?;
    host.children().find(|node| node.has_tag_name("uuid"))?.text()?.trim().parse().ok()
}

/// The `<iotune>` element; empty without limits.
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

/// Whether XML attributes keep a character. Control characters are not allowed, or become spaces.
fn is_attribute_text(one: char) -> bool {
    !one.is_control() && !matches!(one, '\u{fffe}' | '\u{ffff}')
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use infra_api::{DetectZeroes, DiskCache};

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
            options: DiskOptions::default(),
        }
    }

    #[test]
    fn a_new_disk_gets_the_first_free_name_and_slot_and_is_found_by_its_serial() {
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
    fn disk_xml_contains_access_mode_error_policy_and_qos_limits() {
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
    fn max_disks_excludes_foreign_disks_and_a_full_domain_is_reported() {
        let none = domain("<controller type='scsi' index='0' model='lsilogic'/>");
        let AttachError::NoFreeSlot(error) = none.disk_xml(&disk("/v", false)).unwrap_err() else {
            panic!("not full")
        };
        assert!(none.max_disks() == 0 && error.contains("virtio-scsi controller"), "{error}");

        let ours = domain(&format!("{CONTROLLER}{ROOT}")).disk_xml(&disk("/v", false)).unwrap();
        assert_eq!(domain(&format!("{CONTROLLER}{ROOT}{ours}")).max_disks(), 254);
        let hostdev = |target| {
            format!(
                "<hostdev><address type='drive' controller='0' bus='0' target='{target}' unit='0'/></hostdev>"
            )
        };
        let all: String = (0..TARGETS).map(hostdev).collect();
        let full = domain(&format!("{CONTROLLER}{all}"));
        assert!(
            full.max_disks() == 0
                && matches!(full.disk_xml(&disk("/v", false)), Err(AttachError::NoFreeSlot(_)))
        );
    }

    #[test]
    fn a_running_copy_is_read_with_its_file_and_how_far_it_is() {
        let disk = |mirror: &str| {
            let disk = format!("<disk><source file='/a'/>{mirror}<target dev='sda' bus='scsi'/></disk>");
            domain(&disk).disks[0].clone()
        };
        assert_eq!(disk("").mirror, None);
        let mirror = "<mirror type='file' job='copy'><source file='/b'/></mirror>";
        let found = disk(mirror);
        let [a, b] = ["/a", "/b"].map(|path| DiskLocation::File(path.into()));
        assert_eq!((found.layers, found.mirror), (vec![a], Some((b.clone(), MirrorState::Copying))));
        for (word, state) in
            [("yes", MirrorState::Ready), ("pivot", MirrorState::Pivoting), ("abort", MirrorState::Aborting)]
        {
            let found = disk(&mirror.replace("job='copy'", &format!("job='copy' ready='{word}'")));
            assert_eq!(found.mirror, Some((b.clone(), state)), "{word}");
        }
        let file = DiskSource::File("/pool/a'b.raw".into());
        let options = DiskOptions { io: Some(DiskIo::Native), ..DiskOptions::default() };
        let xml = mirror_xml(&file, &options).unwrap();
        assert!(xml.contains("a&apos;b.raw") && xml.contains("io='native'"), "{xml}");
    }

    #[test]
    fn options_of_a_disk_apply_where_its_engine_has_them() {
        let file = DiskSource::File("/pool/a.raw".into());
        let image = RbdImage { pool: "p".into(), namespace: None, name: "v".into() };
        let client = CephClient {
            conf: "/c".into(),
            user: "u".into(),
            keyring: "/k".into(),
            secret: Uuid::from_u128(1),
        };
        let rbd = DiskSource::Rbd(RbdSource { image, client });
        let none = DiskOptions::default();
        assert_eq!(driver_options(&file, &none), "cache='none' io='threads' discard='unmap'");
        assert_eq!(driver_options(&rbd, &none), "cache='none' discard='unmap'");
        let all = DiskOptions {
            io: Some(DiskIo::IoUring),
            cache: Some(DiskCache::Writeback),
            discard: Some(DiskDiscard::Ignore),
            detect_zeroes: Some(DetectZeroes::Unmap),
        };
        assert_eq!(
            driver_options(&file, &all),
            "cache='none' io='io_uring' discard='ignore' detect_zeroes='unmap'"
        );
        assert_eq!(driver_options(&rbd, &all), "cache='writeback' discard='ignore' detect_zeroes='unmap'");
    }

    #[test]
    fn the_layers_and_settings_of_a_disk_are_read() {
        let disk = |inner: &str| {
            domain(&format!("<disk>{inner}<target dev='sda' bus='scsi'/></disk>")).disks[0].clone()
        };
        let base_xml = "<backingStore type='file'><format type='raw'/><source file='/v.raw'/><backingStore/></backingStore>";
        let found =
            disk(&format!("<driver type='qcow2' cache='none'/><source file='/top'/>{base_xml}<transient/>"));
        let [top, base] = ["/top", "/v.raw"].map(|path| DiskLocation::File(path.into()));
        assert_eq!(found.layers, [top, base.clone()]);
        let settings =
            Settings { format: "qcow2".into(), cache: "none".into(), shareable: false, transient: true };
        assert_eq!(found.settings, settings);
        let committed = disk(
            "<source file='/top'/><mirror type='file' job='active-commit'><source file='/v.raw'/></mirror>",
        );
        let attached = committed.attached_to(Uuid::nil(), &LiveDomain::default());
        assert_eq!(attached.job, Some(BlockJob { is_commit: true, to: base.clone() }));
        // A layer that is no file hides what is below it.
        for (top, path) in [("dev='/dev/sdx'", "/dev/sdx"), ("protocol='nbd' name='x'", "protocol=nbd")] {
            let found = disk(&format!("<source {top}/>{base_xml}"));
            assert!(found.layers[0].to_string().contains(path) && found.layers[1] == base, "{found:?}");
        }
        assert_eq!(disk("").layers, []);
    }

    #[test]
    fn the_host_uuid_is_read_from_the_capabilities() {
        let uuid = Uuid::from_u128(7);
        let text = |host: &str| {
            format!("<capabilities><host>{host}<cpu/></host><guest><uuid>x</uuid></guest></capabilities>")
        };
        assert_eq!(host_uuid(&text(&format!("<uuid>{uuid}</uuid>"))), Some(uuid));
        assert_eq!((host_uuid(&text("")), host_uuid("")), (None, None));
    }

    #[test]
    fn device_names_continue_after_z() {
        let names: Vec<String> = [0, 25, 26, 51, 52, 701, 702].into_iter().map(device_name).collect();
        assert_eq!(names, ["sda", "sdz", "sdaa", "sdaz", "sdba", "sdzz", "sdaaa"]);
    }
}
