//! How the hypervisor reads and writes a volume's disk.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An option with a few named values.
macro_rules! option {
    ($(#[$about:meta])* $name:ident { $($(#[$of:meta])* $value:ident = $word:literal,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
        pub enum $name {
            $($(#[$of])* #[serde(rename = $word)] $value,)+
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$value => $word,)+ })
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok(Self::$value),)+
                    _ => Err(format!("must be one of {}", [$($word),+].join(", "))),
                }
            }
        }
    };
}

option!(
    /// How QEMU reads and writes a file.
    DiskIo {
        /// System calls that block, in a pool of threads.
        Threads = "threads",
        /// Linux AIO.
        Native = "native",
        /// io_uring. The host's kernel and QEMU must support it.
        IoUring = "io_uring",
    }
);

option!(
    /// Whether writes are acknowledged from a cache. Flushes of the guest always reach the storage.
    DiskCache {
        /// No cache.
        None = "none",
        /// The cache of Ceph's client.
        Writeback = "writeback",
    }
);

option!(
    /// What happens with the guest's discards.
    DiskDiscard {
        /// The storage frees the blocks.
        Unmap = "unmap",
        /// Nothing.
        Ignore = "ignore",
    }
);

option!(
    /// What happens with writes of zeros.
    DetectZeroes {
        /// They are written.
        Off = "off",
        /// The storage writes zeros by itself.
        On = "on",
        /// The storage frees the blocks.
        Unmap = "unmap",
    }
);

/// How the hypervisor reads and writes a volume's disk. Absent options are the server's defaults. An option that the
/// volume's engine does not have is kept, and has no effect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DiskOptions {
    /// How QEMU reads and writes. Engine `file`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io: Option<DiskIo>,
    /// Whether writes are acknowledged from a cache. Engine `rbd`: a file is never cached, because a full pool would lose
    /// writes that are acknowledged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<DiskCache>,
    /// What happens with the guest's discards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub discard: Option<DiskDiscard>,
    /// What happens with writes of zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detect_zeroes: Option<DetectZeroes>,
}

impl DiskOptions {
    /// Whether no option is set.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}
