//! A VM that overwrites its disk and shuts down. It boots a few instructions from a floppy disk, so it runs within a
//! second on any host.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use lab::LoopNode;
use lab::vm::virsh;

use crate::{PATIENCE, Scenario, eventually};

/// Size of one write in bytes; each begins with [`BEGINNING`].
pub const PIECE: usize = 64 * 512;
/// The first bytes of each write: the VM writes its own instructions.
pub const BEGINNING: [u8; 4] = [0xFA, 0x31, 0xC0, 0x8E];

/// The boot sector, as it is at address 0x7c00.
const INSTRUCTIONS: [u8; 57] = [
    0xFA, // cli
    0x31, 0xC0, // xor ax, ax
    0x8E, 0xD8, // mov ds, ax
    0x8E, 0xD0, // mov ss, ax
    0xBC, 0x00, 0x7C, // mov sp, 0x7c00
    0xFB, // sti
    // again: write with the BIOS, int 0x13 function 0x43, to the first hard disk, by the packet below
    0xBE, 0x29, 0x7C, // mov si, packet
    0xB2, 0x80, // mov dl, 0x80
    0xB8, 0x00, 0x43, // mov ax, 0x4300
    0xCD, 0x13, // int 0x13
    0x72, 0x0C, // jc end
    0x83, 0x06, 0x31, 0x7C, 0x40, // add word [packet.block], 64
    0x83, 0x16, 0x33, 0x7C, 0x00, // adc word [packet.block + 2], 0
    0xEB, 0xE8, // jmp again
    // end: behind the last block or at an error, reset with the keyboard controller
    0xB0, 0xFE, // mov al, 0xfe
    0xE6, 0x64, // out 0x64, al
    0xEB, 0xFE, // jmp $
    // packet: its size, 64 sectors, from 0:0x7c00, to block 0
    16, 0, 64, 0, 0x00, 0x7C, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];
const SECTOR: usize = 512;
const FLOPPY: u64 = 1440 * 1024;

fn floppy(path: &Path) -> Result<()> {
    let mut sector = [0; SECTOR];
    sector[..INSTRUCTIONS.len()].copy_from_slice(&INSTRUCTIONS);
    sector[SECTOR - 2..].copy_from_slice(&[0x55, 0xAA]);
    std::fs::write(path, sector)?;
    Ok(std::fs::File::options().write(true).open(path)?.set_len(FLOPPY)?)
}

// libvirt restricts the BIOS to boot disks, which excludes a disk that is hot-plugged later.
fn domain(vm: &LoopNode, floppy: &Path) -> String {
    format!(
        "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><name>{}</name><uuid>{}</uuid><memory unit='MiB'>32</memory>
        <os><type arch='x86_64' machine='pc'>hvm</type><boot dev='fd'/></os><on_reboot>destroy</on_reboot>
        <devices><emulator>/usr/bin/qemu-system-x86_64</emulator><memballoon model='none'/>
        <controller type='scsi' index='0' model='virtio-scsi'/>
        <disk type='file' device='floppy'><driver name='qemu' type='raw'/><source file='{}'/>
        <target dev='fda' bus='fdc'/><readonly/></disk></devices>
        <qemu:commandline><qemu:arg value='-boot'/><qemu:arg value='strict=off'/></qemu:commandline></domain>",
        vm.name,
        vm.uuid,
        floppy.display()
    )
}

/// The VM.
pub struct WriterVm<'a> {
    s: &'a Scenario,
    name: String,
    _folder: tempfile::TempDir,
}

impl<'a> WriterVm<'a> {
    /// Creates the VM on a node of the scenario. It is paused until [`Self::resume`].
    pub async fn create(s: &'a Scenario, vm: &LoopNode) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let (image, file) = (folder.path().join("floppy.img"), folder.path().join("domain.xml"));
        floppy(&image)?;
        std::fs::write(&file, domain(vm, &image))?;
        let file = file.to_str().context("a path that is not UTF-8")?;
        virsh(s.lab.run(), ["create", file, "--paused"]).await?;
        Ok(Self { s, name: vm.name.clone(), _folder: folder })
    }

    /// Resumes the VM.
    pub async fn resume(&self) -> Result<()> {
        virsh(self.s.lab.run(), ["resume", &self.name]).await.map(drop)
    }

    /// libvirt's state of the VM with the reason; `None` once it has shut down.
    pub async fn state(&self) -> Result<Option<String>> {
        match virsh(self.s.lab.run(), ["domstate", &self.name, "--reason"]).await {
            Ok(state) => Ok(Some(state.trim().to_owned())),
            Err(error) => {
                let names = virsh(self.s.lab.run(), ["list", "--all", "--name"]).await?;
                let exists = names.lines().any(|name| name.trim() == self.name);
                if exists { Err(error) } else { Ok(None) }
            }
        }
    }

    /// Waits until the VM is in state `expected`; fails if it is ever in state `never`.
    pub async fn wait_for_state(&self, expected: Option<&str>, never: &str) -> Result<()> {
        eventually(&format!("VM {} is {expected:?}", self.name), PATIENCE, || async {
            let state = self.state().await?;
            ensure!(state.as_deref() != Some(never), "VM {} is {never}", self.name);
            Ok(if state.as_deref() == expected { Ok(()) } else { Err(format!("{state:?}")) })
        })
        .await
    }

    /// Destroys the VM if it still exists.
    pub async fn destroy(&self) -> Result<()> {
        if self.state().await?.is_some() {
            virsh(self.s.lab.run(), ["destroy", &self.name]).await?;
        }
        Ok(())
    }
}
