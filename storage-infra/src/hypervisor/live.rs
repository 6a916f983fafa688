//! A disk of a virtual machine as its hypervisor shows it, and how it differs from the disk that the server attached. Pure.
//!
//! The serial of a disk says which volume it was attached for, not where its writes go: a backup tool, an administrator or
//! another program may have put a layer over its file, exchanged the file, or changed how it is opened.

use std::fmt;

use uuid::Uuid;

use super::{Disk, DiskLocation};

/// Data that a virtual machine has attached as a disk, whether the server attached it or someone else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedDisk {
    /// UUID of the virtual machine.
    pub node: Uuid,
    /// Name of the virtual machine at the hypervisor.
    pub name: String,
    /// The hypervisor's name of the disk.
    pub target: String,
    /// Where the data is: the layer that is written first, then those below it. Empty if that is neither a file nor an
    /// image.
    pub layers: Vec<DiskLocation>,
    /// The disk's WWN, if it has one in the form of a disk UUID's WWN.
    pub wwn: Option<String>,
    /// Whether the virtual machine cannot write.
    pub read_only: bool,
    /// How it is opened, if the hypervisor has a choice.
    pub settings: Option<Settings>,
    /// The block job that is running on it.
    pub job: Option<BlockJob>,
}

/// How a hypervisor opens a disk, as far as safety depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Format of the first layer.
    pub format: String,
    /// Cache mode; empty if the hypervisor chooses.
    pub cache: String,
    /// Whether other virtual machines may open it at the same time.
    pub shareable: bool,
    /// Whether all writes are discarded when the virtual machine stops.
    pub transient: bool,
}

/// A block job of a hypervisor that changes where a disk's data is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockJob {
    /// Whether it writes the first layer into one below it. Otherwise it copies the disk.
    pub is_commit: bool,
    /// Where it writes.
    pub to: DiskLocation,
}

impl AttachedDisk {
    /// A disk of this data, without anything else.
    #[cfg(test)]
    pub(crate) fn of(node: Uuid, data: DiskLocation) -> Self {
        let (name, target) = ("vm".to_owned(), "sdb".to_owned());
        Self {
            node,
            name,
            target,
            layers: vec![data],
            wwn: None,
            read_only: false,
            settings: None,
            job: None,
        }
    }

    /// Where writes go.
    pub fn location(&self) -> Option<&DiskLocation> {
        self.layers.first()
    }

    /// Whether data is in use by the disk, in any of its layers or as the target of a block job.
    pub fn uses(&self, data: &DiskLocation) -> bool {
        self.layers.contains(data) || self.job.as_ref().is_some_and(|job| job.to == *data)
    }

    /// How it differs from the disk that the server attached. `moving_to`: where the server itself copies it.
    pub fn differences(&self, expected: &Disk, moving_to: Option<&DiskLocation>) -> Vec<Difference> {
        let file = expected.source.location();
        let mut found = Vec::new();
        let is_ours = |data: &DiskLocation| *data == file || Some(data) == moving_to;
        match self.location() {
            Some(top) if is_ours(top) => {}
            Some(top) if self.layers.iter().skip(1).any(is_ours) => {
                found.push(Difference::Overlay { top: top.clone(), file: file.clone() });
            }
            top => found.push(Difference::Source { found: top.cloned(), file: file.clone() }),
        }
        if let Some(job) = self.job.as_ref().filter(|job| !job.is_commit && !is_ours(&job.to)) {
            found.push(Difference::Copied { to: job.to.clone() });
        }
        if self.wwn.as_ref() != Some(&expected.wwn()) {
            found.push(Difference::Serial);
        }
        if self.read_only != expected.read_only {
            found.push(Difference::Mode { is_read_only: self.read_only });
        }
        if let Some(settings) = &self.settings {
            if settings.transient {
                found.push(Difference::Transient);
            }
            if settings.format != "raw" && found.is_empty() {
                found.push(Difference::Format(settings.format.clone()));
            }
            if settings.shareable != expected.shared {
                found.push(Difference::Shareable { is_shareable: settings.shareable });
            }
            if !expected.allows_cache(&settings.cache) {
                found.push(Difference::Cache(settings.cache.clone()));
            }
        }
        found
    }
}

/// A difference between an attached disk and what the server attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// Writes go to a layer over the volume's data.
    Overlay {
        /// The layer.
        top: DiskLocation,
        /// The volume's data.
        file: DiskLocation,
    },
    /// The disk is other data than the volume's.
    Source {
        /// That data, if it is a file or an image.
        found: Option<DiskLocation>,
        /// The volume's data.
        file: DiskLocation,
    },
    /// All writes are discarded when the virtual machine stops.
    Transient,
    /// The volume's data is read and written in this format.
    Format(String),
    /// Somebody copies the disk.
    Copied {
        /// Where the copy goes.
        to: DiskLocation,
    },
    /// The disk has another identity than the volume's disk.
    Serial,
    /// The virtual machine may write and should not, or the reverse.
    Mode {
        /// Whether the disk is read-only.
        is_read_only: bool,
    },
    /// The hypervisor lets others open it and should not, or the reverse.
    Shareable {
        /// Whether it does.
        is_shareable: bool,
    },
    /// The hypervisor caches writes in a way that loses them.
    Cache(String),
}

impl Difference {
    /// Whether writes of the virtual machine are, or may be, elsewhere than in the volume's data. That remains so after the
    /// disk was detached or the virtual machine has stopped.
    pub fn diverts_writes(&self) -> bool {
        match self {
            Self::Overlay { .. } | Self::Source { .. } | Self::Transient | Self::Format(_) => true,
            Self::Copied { .. }
            | Self::Serial
            | Self::Mode { .. }
            | Self::Shareable { .. }
            | Self::Cache(_) => false,
        }
    }

    /// What was found, and what to do, for a disk of this virtual machine.
    pub fn describe(&self, vm: &str, target: &str) -> String {
        match self {
            Self::Overlay { top, file } => format!(
                "its writes go to {top}, a layer over {file}, as after an external snapshot: commit the layer with virsh \
                 blockcommit {vm} {target} --active --pivot, or let the tool that made it do so"
            ),
            Self::Source { found: Some(found), file } => format!(
                "its data is {found} instead of {file}: if newer data is in {found}, copy it back with virsh blockcopy {vm} \
                 {target} --pivot before the disk is detached"
            ),
            Self::Source { found: None, file } => {
                format!("its data is neither a file nor an image, instead of {file}: give it back that data")
            }
            Self::Transient => "it is transient, so all writes are lost when the VM stops: make a copy of its data while the VM \
                                runs"
                .to_owned(),
            Self::Format(format) => format!("it is opened as {format} instead of raw: find out who changed it"),
            Self::Copied { to } => format!(
                "a block job that Nestor did not start copies it to {to}: let the job's owner end it, or end it with virsh \
                 blockjob {vm} {target} --abort, which keeps the volume's data"
            ),
            Self::Serial => {
                format!("it does not have the serial and WWN of the volume, so somebody else attached it: detach it with virsh \
                         detach-disk {vm} {target}")
            }
            Self::Mode { is_read_only: false } => {
                "the VM can write to it, and the attachment is read-only: delete the pod and let it start again".to_owned()
            }
            Self::Mode { is_read_only: true } => {
                "the VM cannot write to it, and the attachment is for writing: delete the pod and let it start again".to_owned()
            }
            Self::Shareable { is_shareable: true } => {
                "its image is not locked against other VMs (<shareable/>), and the volume is for one VM: delete the pod and let \
                 it start again"
                    .to_owned()
            }
            Self::Shareable { is_shareable: false } => {
                "its image is locked against other VMs, and the volume is shared: delete the pod and let it start again".to_owned()
            }
            Self::Cache(cache) => format!(
                "its cache mode is {cache:?}, with which writes that the VM has flushed can be lost: delete the pod and let it \
                 start again"
            ),
        }
    }
}

/// Differences of one disk, as text.
#[derive(Debug, Clone, Copy)]
pub struct Described<'a> {
    /// The disk.
    pub disk: &'a AttachedDisk,
    /// Its differences.
    pub differences: &'a [Difference],
}

impl fmt::Display for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AttachedDisk { name, target, .. } = self.disk;
        write!(f, "the disk {target} of the VM {name} is not as it was attached: ")?;
        let all = self.differences.iter().map(|one| one.describe(name, target));
        f.write_str(&all.collect::<Vec<_>>().join("; "))
    }
}

#[cfg(test)]
mod tests {
    use infra_api::{DiskOptions, OnFull, Qos};

    use super::*;
    use crate::hypervisor::DiskSource;

    fn at(path: &str) -> DiskLocation {
        DiskLocation::File(path.into())
    }

    fn expected() -> Disk {
        Disk {
            uuid: Uuid::from_u128(7 << 64),
            source: DiskSource::File("/pool/v.raw".into()),
            read_only: false,
            shared: false,
            qos: Qos::default(),
            on_full: OnFull::default(),
            options: DiskOptions::default(),
        }
    }

    fn attached() -> AttachedDisk {
        let settings = Settings {
            format: "raw".to_owned(),
            cache: "none".to_owned(),
            shareable: false,
            transient: false,
        };
        AttachedDisk {
            node: Uuid::from_u128(9),
            name: "vm".to_owned(),
            target: "sdb".to_owned(),
            layers: vec![at("/pool/v.raw")],
            wwn: Some(expected().wwn()),
            read_only: false,
            settings: Some(settings),
            job: None,
        }
    }

    /// Every way in which one thing of a disk can be different, with whether it diverts writes.
    fn altered() -> Vec<(AttachedDisk, bool)> {
        let with = |change: &dyn Fn(&mut Settings)| {
            let mut disk = attached();
            disk.settings.as_mut().into_iter().for_each(change);
            disk
        };
        let layers =
            |all: &[&str]| AttachedDisk { layers: all.iter().map(|path| at(path)).collect(), ..attached() };
        let job = |is_commit, to: &str| Some(BlockJob { is_commit, to: at(to) });
        vec![
            (layers(&["/pool/v.snap1", "/pool/v.raw"]), true),
            (layers(&["/b", "/a", "/pool/v.raw"]), true),
            (AttachedDisk { job: job(true, "/pool/v.raw"), ..layers(&["/a", "/pool/v.raw"]) }, true),
            (layers(&["/other"]), true),
            (layers(&[]), true),
            (with(&|settings| settings.transient = true), true),
            (with(&|settings| settings.format = "qcow2".to_owned()), true),
            (AttachedDisk { job: job(false, "/copy"), ..attached() }, false),
            (AttachedDisk { wwn: None, ..attached() }, false),
            (AttachedDisk { wwn: Some("0".to_owned()), ..attached() }, false),
            (AttachedDisk { read_only: true, ..attached() }, false),
            (with(&|settings| settings.shareable = true), false),
            (with(&|settings| settings.cache = "unsafe".to_owned()), false),
            (with(&|settings| settings.cache = "writeback".to_owned()), false),
        ]
    }

    #[test]
    fn a_disk_as_it_was_attached_has_no_difference() {
        assert_eq!(attached().differences(&expected(), None), []);
        let read_only = Disk { read_only: true, ..expected() };
        assert_eq!(AttachedDisk { read_only: true, ..attached() }.differences(&read_only, None), []);
        assert_eq!(AttachedDisk { settings: None, ..attached() }.differences(&expected(), None), []);
    }

    #[test]
    fn every_alteration_is_found_and_described() {
        for (disk, diverts) in altered() {
            let found = disk.differences(&expected(), None);
            assert_eq!(found.len(), 1, "{disk:?}: {found:?}");
            assert_eq!(found[0].diverts_writes(), diverts, "{disk:?}");
            let text = Described { disk: &disk, differences: &found }.to_string();
            assert!(text.starts_with("the disk sdb of the VM vm is not as it was attached: it"), "{text}");
        }
    }

    #[test]
    fn a_move_of_the_servers_own_is_no_difference() {
        let new = at("/far/v.raw");
        let mirrored =
            AttachedDisk { job: Some(BlockJob { is_commit: false, to: new.clone() }), ..attached() };
        let pivoted = AttachedDisk { layers: vec![new.clone()], ..attached() };
        for disk in [mirrored, pivoted] {
            assert_eq!(disk.differences(&expected(), Some(&new)), []);
            assert_eq!(disk.differences(&expected(), None).len(), 1);
            assert_eq!(disk.differences(&expected(), Some(&at("/elsewhere"))).len(), 1);
        }
    }

    #[test]
    fn data_is_in_use_in_every_layer_and_as_the_target_of_a_job() {
        let disk = AttachedDisk {
            layers: vec![at("/top"), at("/base")],
            job: Some(BlockJob { is_commit: false, to: at("/copy") }),
            ..attached()
        };
        for path in ["/top", "/base", "/copy"] {
            assert!(disk.uses(&at(path)), "{path}");
        }
        assert!(!disk.uses(&at("/other")));
    }
}
