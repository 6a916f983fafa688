//! Attempts that other modules of the black-box tests make.

use super::attempt::By;
use super::attempt::Outcome::{self, Bounded, Refused};

/// An attempt, what comes of it, and the module.
pub(super) type Covered = (&'static str, Outcome, &'static str);

pub(super) static COVERED: [Covered; 15] = [
    (
        "attach, delete or publish another guest's volume by its handle through gc-csi",
        Refused(By::GcCsi),
        "bad_input",
    ),
    (
        "use handles and names that are empty, too long, or look like paths through gc-csi",
        Refused(By::GcCsi),
        "bad_input",
    ),
    ("use a handle of another guest's snapshot through gc-csi", Refused(By::GcCsi), "snapshot_ownership"),
    ("list another guest's snapshots through gc-csi", Refused(By::GcCsi), "snapshot_ownership"),
    ("create a volume of 900 TiB through gc-csi", Refused(By::MgmtCsi), "dynamic"),
    ("present a self-signed certificate to the storage infra", Refused(By::Tls), "bad_input"),
    ("write to a volume that is shared read-only", Refused(By::MgmtCsi), "ownership"),
    ("delete a shared claim that other guests use", Refused(By::Policy), "admission"),
    (
        "delete claims whose disks stay attached, to use space that no quota counts",
        Bounded("a claim counts in its quotas until its disk is detached"),
        "claim_deletion",
    ),
    (
        "name hundreds of missing claims in a VirtualMachine",
        Bounded("vm-operator-shim reports them in one event, and other VMs are served"),
        "fairness",
    ),
    (
        "add and remove disks all the time",
        Bounded("vm-operator-shim slows the VM down, and no other"),
        "fairness",
    ),
    ("leave a thousand attachments of a dead VM", Bounded("mgmt-csi serves other VMs meanwhile"), "fairness"),
    (
        "make malformed VolumeAttachments and VirtualMachines appear",
        Bounded("each program skips what it cannot read"),
        "bad_input",
    ),
    ("have a disk formatted that has data", Refused(By::GcCsiNode), "formatting"),
    (
        "put programs with the setuid bit, or device files, on a volume that is shared read-write",
        Refused(By::GcCsiNode),
        "rights",
    ),
];
