//! Mount options of a StorageClass or PersistentVolume. Only those in a list per filesystem type are accepted: other options
//! change what is mounted (`bind`, `subvol`), name other files and devices of the node (`loop`, `journal_path`, `logdev`,
//! `X-mount.*`), or came with a kernel that this driver was not reviewed for.

use crate::filesystem::Filesystem;

/// Options of every filesystem type: mount(8), "Filesystem-independent mount options". A trailing `=` means a value.
const COMMON: &str = "async atime context= defaults defcontext= dev diratime dirsync exec fscontext= iversion lazytime loud noatime \
                      nodev nodiratime noexec noiversion nolazytime norelatime nostrictatime nosuid nosymfollow relatime ro \
                      rootcontext= rw silent strictatime suid sync";

/// ext4(5).
const EXT4: &str = "acl auto_da_alloc barrier barrier= block_validity bsddf bsdgroups commit= data= dax dax= debug delalloc \
                    dioread_lock dioread_nolock discard errors= grpid grpquota i_version init_itable init_itable= \
                    inode_readahead_blks= journal_async_commit journal_checksum journal_ioprio= max_batch_time= \
                    max_dir_size_kb= min_batch_time= minixdf noacl noauto_da_alloc nobarrier noblock_validity nodelalloc \
                    nodiscard nogrpid noinit_itable nojournal_checksum noload nombcache noquota norecovery nouser_xattr \
                    prjquota quota resgid= resuid= stripe= sysvgroups user_xattr usrquota";

/// xfs(5).
const XFS: &str = "allocsize= attr2 bsdgroups dax dax= discard filestreams gqnoenforce gquota grpid grpquota ikeep inode32 inode64 \
                   largeio lifetime logbsize= logbufs= noalign noattr2 nodiscard nogrpid noikeep nolargeio nolifetime noquota \
                   norecovery nouuid pqnoenforce pquota prjquota qnoenforce quota sunit= swalloc swidth= sysvgroups uqnoenforce \
                   uquota usrquota wsync";

/// btrfs(5).
const BTRFS: &str = "acl autodefrag barrier clear_cache commit= compress compress= compress-force compress-force= datacow datasum \
                     discard discard= enospc_debug fatal_errors= flushoncommit max_inline= metadata_ratio= noacl noautodefrag \
                     nobarrier nodatacow nodatasum nodiscard noenospc_debug noflushoncommit nospace_cache nossd nossd_spread \
                     notreelog rescue= space_cache space_cache= ssd ssd_spread thread_pool= treelog user_subvol_rm_allowed";

/// Options that control access time updates.
const ATIME_OPTIONS: [&str; 6] = ["atime", "noatime", "relatime", "norelatime", "strictatime", "lazytime"];

/// Options that a volume which several guests write always has: a set-user-ID program or a device node that one guest creates
/// has no effect in another.
const SHARED_OPTIONS: [&str; 2] = ["nosuid", "nodev"];

/// Mount options.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MountOptions {
    options: Vec<String>,
    /// Whether the volume is shared between guests.
    shared: bool,
}

/// The mount option is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidOption {
    /// The option is not in the list.
    #[error("mount option {option:?} is not allowed; correct mountOptions: {types} can have {allowed}")]
    NotAllowed {
        /// The option.
        option: String,
        /// Filesystem types.
        types: String,
        /// The allowed options.
        allowed: String,
    },
    /// The option contains an invalid character.
    #[error("mount option {0:?} contains an invalid character; correct mountOptions")]
    Malformed(String),
}

impl MountOptions {
    /// Splits the options at commas and checks each. Without a type, the disk's filesystem decides, and the options of all
    /// types are accepted. `shared` means that several guests use the volume.
    pub(crate) fn new(
        flags: &[String],
        filesystem: Option<Filesystem>,
        shared: bool,
    ) -> Result<Self, InvalidOption> {
        let mut options = Vec::new();
        for option in flags.iter().flat_map(|flag| flag.split(',')).filter(|option| !option.is_empty()) {
            if option.chars().any(|c| c.is_control() || c.is_whitespace()) {
                return Err(InvalidOption::Malformed(option.to_owned()));
            }
            if !allowed(filesystem).any(|allowed| is_named(option, allowed)) {
                return Err(not_allowed(option, filesystem));
            }
            options.push(option.to_owned());
        }
        Ok(Self { options, shared })
    }

    /// Whether the mount is read-only. The last of `ro` and `rw` takes effect, as in mount(8).
    pub(crate) fn is_read_only(&self) -> bool {
        let last = self.options.iter().rfind(|option| *option == "ro" || *option == "rw");
        last.is_some_and(|option| option == "ro")
    }

    /// The option list for mount(8), in which the last of two opposite options takes effect.
    pub(crate) fn for_mount(&self, filesystem: Filesystem, read_only: bool) -> String {
        let mut options: Vec<&str> = Vec::new();
        // Access time updates turn reads into writes, which allocate space in thin disks and unshare snapshots. Users who
        // need access times set an option.
        if !self.options.iter().any(|option| ATIME_OPTIONS.contains(&option.as_str())) {
            options.push("noatime");
        }
        // A clone has the same UUID as its source, and both can be used on one node.
        if filesystem == Filesystem::Xfs && !self.options.iter().any(|option| option == "nouuid") {
            options.push("nouuid");
        }
        // mke2fs's default, errors=continue, would keep writing to a damaged filesystem.
        if filesystem == Filesystem::Ext4 && !self.options.iter().any(|option| option.starts_with("errors="))
        {
            options.push("errors=remount-ro");
        }
        let own = self.options.iter().map(String::as_str);
        options.extend(own.filter(|option| *option != "ro" && *option != "rw"));
        if self.shared {
            options.extend(SHARED_OPTIONS);
        }
        options.push(if read_only { "ro" } else { "rw" });
        options.join(",")
    }
}

/// The options of a filesystem type, or of all.
fn allowed(filesystem: Option<Filesystem>) -> impl Iterator<Item = &'static str> {
    let own = match filesystem {
        Some(Filesystem::Ext4) => [EXT4, "", ""],
        Some(Filesystem::Xfs) => [XFS, "", ""],
        Some(Filesystem::Btrfs) => [BTRFS, "", ""],
        None => [EXT4, XFS, BTRFS],
    };
    [COMMON].into_iter().chain(own).flat_map(str::split_whitespace)
}

/// Whether an option is the allowed one; `name=` allows any value.
fn is_named(option: &str, allowed: &str) -> bool {
    match allowed.ends_with('=') {
        true => option.strip_prefix(allowed).is_some_and(|value| !value.is_empty()),
        false => option == allowed,
    }
}

fn not_allowed(option: &str, filesystem: Option<Filesystem>) -> InvalidOption {
    let types = filesystem.map_or_else(|| "ext4, xfs and btrfs".to_owned(), |one| one.to_string());
    let mut names: Vec<&str> = allowed(filesystem).collect();
    names.sort_unstable();
    names.dedup();
    InvalidOption::NotAllowed { option: option.to_owned(), types, allowed: names.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(flags: &[&str], filesystem: Filesystem) -> Result<MountOptions, InvalidOption> {
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        MountOptions::new(&flags, Some(filesystem), false)
    }

    #[test]
    fn noatime_is_the_default() {
        let of = |flags: &[&str], filesystem, read_only| {
            options(flags, filesystem).unwrap().for_mount(filesystem, read_only)
        };
        assert_eq!(of(&[], Filesystem::Btrfs, false), "noatime,rw");
        assert_eq!(
            of(&["relatime", "discard,commit=30"], Filesystem::Btrfs, true),
            "relatime,discard,commit=30,ro"
        );
        assert_eq!(of(&["ro"], Filesystem::Xfs, true), "noatime,nouuid,ro");
    }

    #[test]
    fn ext4_becomes_read_only_after_an_error_unless_configured_otherwise() {
        let of =
            |flags: &[&str]| options(flags, Filesystem::Ext4).unwrap().for_mount(Filesystem::Ext4, false);
        assert_eq!(of(&[]), "noatime,errors=remount-ro,rw");
        assert_eq!(of(&["errors=panic"]), "noatime,errors=panic,rw");
    }

    #[test]
    fn a_shared_volume_has_no_set_user_id_programs_and_no_devices() {
        let flags = ["suid".to_owned(), "dev".to_owned()];
        let shared = MountOptions::new(&flags, Some(Filesystem::Ext4), true).unwrap();
        let text = shared.for_mount(Filesystem::Ext4, false);
        assert_eq!(text, "noatime,errors=remount-ro,suid,dev,nosuid,nodev,rw");
    }

    #[test]
    fn options_that_are_not_in_the_list_of_the_type_are_refused_with_the_list() {
        for flag in [
            "bind",
            "remount",
            "loop=/dev/loop3",
            "X-mount.mkdir",
            "x-systemd.requires=a",
            "noatime,rbind",
            "journal_path=/dev/sda",
            "offset=4",
            "subdir=/etc",
            "COMMIT=3",
            "commit",
            "commit=",
            "nouuid",
            "user",
        ] {
            let refused = options(&[flag], Filesystem::Ext4).unwrap_err();
            assert!(matches!(refused, InvalidOption::NotAllowed { .. }), "{flag}");
            assert!(refused.to_string().contains("ext4 can have acl async"), "{refused}");
        }
        assert!(options(&["logdev=/dev/sda"], Filesystem::Xfs).is_err());
        for flag in ["device=/dev/sda", "subvol=/", "subvolid=5", "degraded"] {
            assert!(options(&[flag], Filesystem::Btrfs).is_err(), "{flag}");
        }
        assert!(matches!(options(&["a b"], Filesystem::Ext4), Err(InvalidOption::Malformed(_))));
    }

    #[test]
    fn without_a_type_the_options_of_all_types_are_accepted() {
        let of = |flag: &str| MountOptions::new(&[flag.to_owned()], None, false);
        for flag in ["nouuid", "errors=panic", "compress=zstd:3"] {
            assert!(of(flag).is_ok(), "{flag}");
        }
        assert!(of("subvol=/").is_err());
    }

    #[test]
    fn the_last_of_ro_and_rw_takes_effect() {
        assert!(options(&["rw", "ro"], Filesystem::Ext4).unwrap().is_read_only());
        assert!(!options(&["ro,rw"], Filesystem::Ext4).unwrap().is_read_only());
    }
}
