//! Volume stream: the content of a volume as a sequence of bytes, for exports and imports. No I/O.
//!
//! All integers are big-endian. A stream is a header, extents in ascending order, and an end:
//!
//! | part | bytes |
//! | --- | --- |
//! | header | magic `NESTORVS`, version (4), size of the volume (8), identity of the source (16), generation of the source (8), checksum (32) |
//! | extent | `EXTN`, offset in the volume (8), length (4), data, checksum (32) |
//! | end | `DONE`, size of the volume (8), 0 (4), checksum (32) |
//!
//! Bytes of the volume in no extent are zero. The checksum of the header is the SHA-256 of the bytes before it; every
//! other checksum is the SHA-256 of the checksum before it and of the bytes of its own part. So each checksum confirms
//! everything before it, and that of the end is the digest of the whole stream. A stream is continued after an extent
//! whose offset and checksum are known.

mod decode;
mod encode;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;
use uuid::Uuid;

pub use decode::{Decoder, Frame, StreamError};
pub use encode::Encoder;

/// Media type of a volume stream.
pub const STREAM_MEDIA_TYPE: &str = "application/vnd.nestor.volume-stream";
/// Maximum length of the data of an extent in bytes.
pub const MAX_EXTENT: usize = 1 << 20;

const MAGIC: &[u8; 8] = b"NESTORVS";
const VERSION: u32 = 1;
const EXTENT: &[u8; 4] = b"EXTN";
const END: &[u8; 4] = b"DONE";
/// Length of the header without its checksum.
const HEADER: usize = 44;
/// Length of an extent or end without data and checksum.
const HEAD: usize = 16;
const CHECKSUM: usize = 32;

/// Checksum of a stream up to the end of a part. As text: 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, pattern = "^[0-9a-f]{64}$")]
pub struct Checksum([u8; CHECKSUM]);

impl Checksum {
    /// From its bytes; `None` if they are not 32.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(bytes.try_into().ok()?))
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn of_header(header: &[u8]) -> Self {
        Self(Sha256::digest(header).into())
    }

    fn then(self, part: &[u8]) -> Self {
        Self(Sha256::new().chain_update(self.0).chain_update(part).finalize().into())
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Checksum {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("{text:?} is not a checksum: it must have 64 characters of 0-9 and a-f");
        let pairs = text.as_bytes().chunks(2);
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bytes: Option<Vec<u8>> = pairs.map(byte).collect();
        let is_plain = text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        bytes.filter(|_| is_plain).and_then(|bytes| Self::from_bytes(&bytes)).ok_or_else(invalid)
    }
}

impl TryFrom<String> for Checksum {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Checksum> for String {
    fn from(checksum: Checksum) -> Self {
        checksum.to_string()
    }
}

/// Header of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Size of the volume in bytes.
    pub size: u64,
    /// Identity of the source: differs between objects of the same ID.
    pub identity: Uuid,
    /// Generation of the source: differs if its content may have changed.
    pub generation: u64,
}

impl Header {
    /// The header as bytes, without its checksum.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (version, size, generation) =
            (VERSION.to_be_bytes(), self.size.to_be_bytes(), self.generation.to_be_bytes());
        [MAGIC, version.as_slice(), &size, self.identity.as_bytes(), &generation].concat()
    }

    /// The checksum of the header.
    pub fn checksum(&self) -> Checksum {
        Checksum::of_header(&self.to_bytes())
    }
}

/// A point of a stream: the end of the header or of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// End of the last extent in the volume; 0 after the header.
    pub offset: u64,
    /// Checksum of the stream up to there.
    pub checksum: Checksum,
}

fn head(tag: &[u8; 4], offset: u64, length: usize) -> Vec<u8> {
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    [tag.as_slice(), &offset.to_be_bytes(), &length.to_be_bytes()].concat()
}

#[cfg(test)]
mod tests;
