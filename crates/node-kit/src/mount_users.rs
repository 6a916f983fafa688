//! Processes that use a mount, as fuser(1) lists them, for the error of a refused unmount. Best effort: only processes in
//! the driver's PID namespace are visible.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::mount_table::Mount;

const MAX_PROCESSES: usize = 5;

/// Text to append to "in use": " by NAME (pid PID), …", or empty if no process is visible. Blocks.
pub(crate) fn describe(mount: &Mount) -> String {
    let Ok(device) = std::fs::metadata(&mount.point).map(|found| found.dev()) else { return String::new() };
    let on_it = |path: &Path| std::fs::metadata(path).is_ok_and(|found| found.dev() == device);
    let uses = |process: &Path| {
        ["cwd", "root", "exe"].iter().any(|link| on_it(&process.join(link)))
            || std::fs::read_dir(process.join("fd"))
                .is_ok_and(|files| files.flatten().any(|file| on_it(&file.path())))
    };
    let Ok(processes) = std::fs::read_dir("/proc") else { return String::new() };
    let pids = processes.flatten().filter(|p| p.file_name().to_string_lossy().parse::<u32>().is_ok());
    let named: Vec<String> = pids
        .filter(|process| uses(&process.path()))
        .take(MAX_PROCESSES)
        .map(|process| {
            let command = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            format!("{} (pid {})", command.trim(), process.file_name().to_string_lossy())
        })
        .collect();
    if named.is_empty() { String::new() } else { format!(" by {}", named.join(", ")) }
}
