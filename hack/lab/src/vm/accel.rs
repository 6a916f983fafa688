//! Detection of hardware acceleration (KVM).

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader};

use crate::process::command;

/// How long a kernel may take to print its first line.
const BOOT_TIMEOUT: Duration = Duration::from_secs(10);

/// `kvm` if a kernel boots under it, otherwise `tcg`.
///
/// The existence of `/dev/kvm` proves nothing: under nested virtualization it may run only real-mode code. So the CPU
/// must have the extensions, and our kernel must print its first line under KVM.
pub(super) async fn accelerator(kernel: &Path) -> &'static str {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let extensions = cpu.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    if extensions && Path::new("/dev/kvm").exists() && kernel_boots(kernel).await { "kvm" } else { "tcg" }
}

async fn kernel_boots(kernel: &Path) -> bool {
    let mut qemu = command("qemu-system-x86_64", ["-machine", "q35,accel=kvm", "-cpu", "host", "-m", "256"]);
    qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"]);
    qemu.arg("-kernel").arg(kernel).args(["-append", "console=ttyS0 panic=-1"]);
    qemu.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
    let Ok(mut child) = qemu.spawn() else { return false };
    let Some(output) = child.stdout.take() else { return false };
    let mut lines = BufReader::new(output).lines();
    let booted = tokio::time::timeout(BOOT_TIMEOUT, async {
        while let Ok(Some(line)) = lines.next_line().await {
            if line.contains("Linux version") {
                return true;
            }
        }
        false
    });
    let booted = booted.await.unwrap_or(false);
    let _ = child.kill().await;
    booted
}
