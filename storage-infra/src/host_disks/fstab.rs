//! Entries of fstab, which systemd reads too. No I/O.

use std::path::Path;

use uuid::Uuid;

/// Options of a pool's filesystem. `nofail`: the host starts although a disk is missing; its pool is then unhealthy.
const OPTIONS: &str = "noatime,nofail";

/// The entry that mounts a filesystem at every start of the host.
pub(super) fn entry(pool: &str, filesystem: Uuid, target: &Path) -> String {
    format!("# Nestor pool {pool}\nUUID={filesystem} {} xfs {OPTIONS} 0 0\n", escaped(target))
}

/// The text to append to a file with this content.
pub(super) fn addition(content: &str, entry: &str) -> String {
    let separator = if content.is_empty() || content.ends_with('\n') { "" } else { "\n" };
    format!("{separator}{entry}")
}

/// Whether the file has an entry for this target.
pub(super) fn mounts_at(content: &str, target: &Path) -> bool {
    let (target, comment) = (escaped(target), '#');
    let lines = content.lines().map(str::trim).filter(|line| !line.starts_with(comment));
    lines.filter_map(|line| line.split_whitespace().nth(1)).any(|one| one.trim_end_matches('/') == target)
}

fn escaped(path: &Path) -> String {
    path.display().to_string().replace('\\', "\\134").replace(' ', "\\040").replace('\t', "\\011")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_appended_on_lines_of_its_own_and_found_again() {
        let (uuid, target) = (Uuid::nil(), Path::new("/srv/nestor/fast one"));
        let entry = entry("fast", uuid, target);
        assert!(entry.contains(&format!("\nUUID={uuid} /srv/nestor/fast\\040one xfs noatime,nofail 0 0\n")));
        let before = "UUID=1 / ext4 defaults 0 1";
        let after = format!("{before}{}", addition(before, &entry));
        assert!(after.starts_with(&format!("{before}\n#")), "{after}");
        assert!(mounts_at(&after, target) && !mounts_at(before, target));
        assert!(!mounts_at(&after, Path::new("/srv/nestor/fast")));
        assert!(!mounts_at("# UUID=1 /srv/a xfs defaults 0 0", Path::new("/srv/a")));
        assert_eq!(addition("", &entry), entry);
    }
}
