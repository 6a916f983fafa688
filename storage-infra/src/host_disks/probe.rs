//! Reads what the host knows about its disks: sysfs, mounts, swaps, blkid, and the disk's first and last MiB. Writes nothing.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail, ensure};
use rustix::fs::OFlags;
use sha2::{Digest, Sha256};

use super::{Disk, Facts, Signature};
use crate::engine::file::MARKER;

const SYS_BLOCK: &str = "/sys/block";
/// Bytes at each end of a disk that must be zeros.
const MARGIN: u64 = 1 << 20;
/// Exit status of `blkid --probe` without a signature.
const NOTHING_FOUND: i32 = 2;
/// Names of block devices that are no disks: memory, optical and floppy drives.
const NO_DISKS: [&str; 4] = ["ram", "zram", "sr", "fd"];

/// All disks of the host but loop devices, ordered by name.
pub(crate) fn discover() -> anyhow::Result<Vec<Disk>> {
    let mut names = names(Path::new(SYS_BLOCK))?;
    names.retain(|name| !name.starts_with("loop") && !NO_DISKS.iter().any(|kind| name.starts_with(kind)));
    let disks = names.iter().map(|name| read(name)).collect::<anyhow::Result<Vec<_>>>()?;
    // A drive without a medium.
    Ok(disks.into_iter().filter(|disk| disk.facts.bytes > 0).collect())
}

/// The disk with this device.
pub(crate) fn find(device: &Path) -> anyhow::Result<Disk> {
    let real = fs::canonicalize(device).with_context(|| format!("cannot find {}", device.display()))?;
    let kind = fs::metadata(&real).with_context(|| format!("cannot read {}", real.display()))?.file_type();
    ensure!(kind.is_block_device(), "{} is not a block device", device.display());
    let name = real.file_name().and_then(|name| name.to_str()).context("the device has no name")?;
    if !Path::new(SYS_BLOCK).join(name).exists() {
        bail!("{} is not a whole disk: a partition cannot become a pool", device.display());
    }
    read(name)
}

fn read(name: &str) -> anyhow::Result<Disk> {
    let sys = Path::new(SYS_BLOCK).join(name);
    let device = Path::new("/dev").join(name.replace('!', "/"));
    let sectors: u64 = text(&sys.join("size")).context("no size")?.parse().context("invalid size")?;
    let number = text(&sys.join("dev")).with_context(|| format!("{} has no number", sys.display()))?;
    let bytes = sectors * 512;
    let opened = exclusively(&device);
    let facts = Facts {
        bytes,
        read_only: text(&sys.join("ro")).is_none_or(|ro| ro != "0"),
        partitions: names(&sys)?
            .into_iter()
            .filter(|name| sys.join(name).join("partition").exists())
            .collect(),
        holders: names(&sys.join("holders"))?,
        mounts: mounts(&fs::read_to_string("/proc/self/mountinfo")?, &number),
        is_swap: is_swap(&fs::read_to_string("/proc/swaps")?, &device),
        loops: loops_on(&device)?,
        volume: text(&sys.join("loop/backing_file")).filter(|file| is_in_pool(Path::new(file))),
        signature: match &opened {
            Err(error) if !is_busy(error) => Signature::Unclear(format!("cannot open it: {error}")),
            _ => signature(&device),
        },
        is_busy: opened.as_ref().is_err_and(is_busy),
        has_data: opened.is_ok_and(|file| has_data(file, bytes)),
    };
    let first =
        |files: &[&str]| files.iter().find_map(|file| text(&sys.join(file)).filter(|text| !text.is_empty()));
    let serial = first(&["device/serial", "serial", "device/wwid", "wwid"]);
    let model = first(&["device/model"]);
    let parts = [
        name.to_owned(),
        number,
        bytes.to_string(),
        model.clone().unwrap_or_default(),
        serial.clone().unwrap_or_default(),
        // Another disk with the same name has another number.
        text(&sys.join("diskseq")).unwrap_or_default(),
        text(Path::new("/proc/sys/kernel/random/boot_id")).unwrap_or_default(),
    ];
    Ok(Disk { device, id: id(&parts), model, serial, facts })
}

fn id(parts: &[String]) -> String {
    let hash = format!("{:x}", Sha256::digest(parts.join("\n").as_bytes()));
    hash[..12].to_owned()
}

/// The trimmed content of a file, if it can be read.
fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The names in a directory, in order; none if it does not exist.
fn names(dir: &Path) -> anyhow::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("cannot list {}", dir.display()))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Where the device with this number is mounted.
fn mounts(mountinfo: &str, number: &str) -> Vec<String> {
    let target = |line: &str| {
        let mut fields = line.split(' ').skip(2);
        (fields.next()? == number).then(|| fields.nth(1).map(str::to_owned))?
    };
    mountinfo.lines().filter_map(target).collect()
}

fn is_swap(swaps: &str, device: &Path) -> bool {
    let used = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    used.into_iter()
        .any(|path| Path::new(path) == device || fs::canonicalize(path).is_ok_and(|real| real == device))
}

/// Loop devices whose backing file is the device.
fn loops_on(device: &Path) -> anyhow::Result<Vec<String>> {
    let backing = |name: &String| text(&Path::new(SYS_BLOCK).join(name).join("loop/backing_file"));
    let mut loops = names(Path::new(SYS_BLOCK))?;
    loops.retain(|name| backing(name).is_some_and(|file| Path::new(&file) == device));
    Ok(loops)
}

fn is_in_pool(file: &Path) -> bool {
    file.parent().is_some_and(|dir| dir.join(MARKER).exists())
}

/// Opens a disk so that no other exclusive user can, as the kernel does for mounts and swap space.
fn exclusively(device: &Path) -> io::Result<File> {
    let flags = OFlags::EXCL.bits().cast_signed();
    fs::OpenOptions::new().read(true).custom_flags(flags).open(device)
}

fn is_busy(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ResourceBusy
}

/// Whether the disk's first or last MiB has data. A disk that cannot be read counts as one with data.
fn has_data(mut disk: File, bytes: u64) -> bool {
    let margin = MARGIN.min(bytes);
    [0, bytes - margin].into_iter().any(|from| !is_zero(&mut disk, from, margin).unwrap_or(false))
}

fn is_zero(disk: &mut File, from: u64, bytes: u64) -> io::Result<bool> {
    let mut content = Vec::new();
    disk.seek(SeekFrom::Start(from))?;
    disk.take(bytes).read_to_end(&mut content)?;
    Ok(content.len() as u64 == bytes && content.iter().all(|byte| *byte == 0))
}

/// The signatures that blkid finds.
fn signature(device: &Path) -> Signature {
    let probed = Command::new("blkid").args(["--probe", "--output", "export"]).arg(device).output();
    let output = match probed {
        Ok(output) => output,
        Err(error) => return Signature::Unclear(format!("cannot run blkid: {error}")),
    };
    match output.status.code() {
        Some(0) => Signature::Found(types(&String::from_utf8_lossy(&output.stdout))),
        Some(NOTHING_FOUND) => Signature::None,
        status => {
            let status = status.map_or_else(|| "a signal".to_owned(), |code| format!("status {code}"));
            Signature::Unclear(format!("blkid --probe ended with {status}"))
        }
    }
}

/// The types in blkid's output; all of it if it names none.
fn types(output: &str) -> String {
    let value = |key: &str| output.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let found: Vec<String> = [("TYPE", ""), ("PTTYPE", " partition table")]
        .into_iter()
        .filter_map(|(key, what)| Some(format!("{}{what}", value(key)?)))
        .collect();
    if found.is_empty() { output.split_whitespace().collect::<Vec<_>>().join(" ") } else { found.join(", ") }
}

/// Whether the filesystem at a path is that of a device.
pub(super) fn is_mounted_at(device: &Path, path: &Path) -> anyhow::Result<bool> {
    let number = fs::metadata(device).with_context(|| format!("cannot read {}", device.display()))?.rdev();
    Ok(fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?.dev() == number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_and_swaps_are_found_by_the_device() {
        let mountinfo =
            "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 7:5 / /mnt/a\\040b rw - xfs /dev/loop5 rw\n";
        assert_eq!(mounts(mountinfo, "7:5"), ["/mnt/a\\040b"]);
        assert!(mounts(mountinfo, "7:50").is_empty());
        let swaps = "Filename Type Size Used Priority\n/dev/sdz9 partition 1 0 -2\n";
        assert!(is_swap(swaps, Path::new("/dev/sdz9")) && !is_swap(swaps, Path::new("/dev/sdz")));
    }

    #[test]
    fn signatures_have_their_types() {
        assert_eq!(types("DEVNAME=/dev/x\nUUID=1\nTYPE=ext4\n"), "ext4");
        assert_eq!(types("DEVNAME=/dev/x\nPTTYPE=gpt\n"), "gpt partition table");
        assert_eq!(types("DEVNAME=/dev/x\n"), "DEVNAME=/dev/x");
    }

    #[test]
    fn data_at_either_end_counts() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = 3 * MARGIN;
        for (at, expected) in [(0, true), (MARGIN, false), (bytes - 1, true)] {
            let path = dir.path().join(at.to_string());
            let mut content = vec![0; bytes as usize];
            content[at as usize] = 1;
            fs::write(&path, content).unwrap();
            assert_eq!(has_data(File::open(&path).unwrap(), bytes), expected, "{at}");
        }
        let short = dir.path().join("short");
        fs::write(&short, [0; 7]).unwrap();
        assert!(has_data(File::open(&short).unwrap(), bytes));
    }

    #[test]
    fn another_disk_has_another_id() {
        let of = |seq: &str| id(&["sdb".to_owned(), seq.to_owned()]);
        assert_eq!(of("1"), of("1"));
        assert_ne!(of("1"), of("2"));
    }
}
