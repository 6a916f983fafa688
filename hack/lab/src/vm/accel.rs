//! Whether this machine can run virtual machines in hardware.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader};

use crate::process::command;

/// How long a kernel may take to say its first word.
const FIRST_WORD: Duration = Duration::from_secs(10);

/// `kvm` where a guest kernel really runs under it, else `tcg`.
///
/// A `/dev/kvm` proves nothing: in nested machines it can be there and run nothing but real-mode code. So the CPU must
/// have the extensions, and our kernel must speak under KVM.
pub(super) async fn accelerator(kernel: &Path) -> &'static str {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let extensions = cpu.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    if extensions && Path::new("/dev/kvm").exists() && kernel_speaks(kernel).await { "kvm" } else { "tcg" }
}

async fn kernel_speaks(kernel: &Path) -> bool {
    let mut qemu = command("qemu-system-x86_64", ["-machine", "q35,accel=kvm", "-cpu", "host", "-m", "256"]);
    qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"]);
    qemu.arg("-kernel").arg(kernel).args(["-append", "console=ttyS0 panic=-1"]);
    qemu.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
    let Ok(mut child) = qemu.spawn() else { return false };
    let Some(output) = child.stdout.take() else { return false };
    let mut lines = BufReader::new(output).lines();
    let spoke = tokio::time::timeout(FIRST_WORD, async {
        while let Ok(Some(line)) = lines.next_line().await {
            if line.contains("Linux version") {
                return true;
            }
        }
        false
    });
    let spoke = spoke.await.unwrap_or(false);
    let _ = child.kill().await;
    spoke
}
