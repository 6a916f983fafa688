//! Fuzz target of the domain XML.

use std::path::PathBuf;

use infra_api::{DiskOptions, OnFull, Qos};
use uuid::Uuid;

use super::xml::{AttachError, LiveDomain, host_uuid};
use crate::hypervisor::{Disk, DiskSource};

/// XML of a domain, and a path of a disk after a NUL: the XML of the disk names exactly this file, in a free slot.
pub fn domain_xml(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (xml, path) = text.split_once('\0').unwrap_or((&text, "/pool/volume.raw"));
    host_uuid(xml);
    let Ok(domain) = LiveDomain::parse(xml) else { return };
    let disk = disk(path);
    match domain.disk_xml(&disk) {
        Ok(attached) => check(&disk, &attached),
        Err(AttachError::NoFreeSlot(why) | AttachError::Unsupported(why)) => assert!(!why.is_empty()),
    }
    assert!(domain.find(disk.uuid).is_none_or(|found| xml.contains(&found.xml)));
    domain.max_disks();
}

fn disk(path: &str) -> Disk {
    Disk {
        uuid: Uuid::from_u128(7),
        source: DiskSource::File(PathBuf::from(path)),
        read_only: true,
        shared: true,
        qos: Qos { iops: Some(1), bytes_per_second: None },
        on_full: OnFull::Pause,
        options: DiskOptions::default(),
    }
}

fn check(disk: &Disk, xml: &str) {
    let domain = format!("<domain><devices>{xml}</devices></domain>");
    let domain = LiveDomain::parse(&domain).expect("the XML of a disk is well-formed");
    let found = domain.find(disk.uuid).expect("the disk has its serial");
    assert_eq!(found.location(), Some(&disk.source.location()));
    assert!(found.read_only && found.is_scsi && domain.disks.len() == 1);
}
