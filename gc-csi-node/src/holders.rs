//! Who uses a filesystem, for the error of an unmount that is refused. Best effort: only processes of
//! the driver's own PID namespace are seen.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::mounts::Mount;

const MAX_NAMED: usize = 5;

/// Text that goes after "in use": who, or nothing when nobody is seen. Blocks.
pub(crate) fn of(mount: &Mount) -> String {
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
        .take(MAX_NAMED)
        .map(|process| {
            let command = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            format!("{} (pid {})", command.trim(), process.file_name().to_string_lossy())
        })
        .collect();
    if named.is_empty() { String::new() } else { format!(" by {}", named.join(", ")) }
}
