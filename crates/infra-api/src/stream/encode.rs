//! Encoder of volume streams.

use super::{Checksum, END, EXTENT, Header, Position, head};

/// Encodes one stream, part by part.
#[derive(Debug)]
pub struct Encoder {
    size: u64,
    at: Position,
}

impl Encoder {
    /// Starts a stream. Returns its header as bytes.
    pub fn start(header: &Header) -> (Self, Vec<u8>) {
        let checksum = header.checksum();
        let encoder = Self { size: header.size, at: Position { offset: 0, checksum } };
        (encoder, [&header.to_bytes(), checksum.as_bytes()].concat())
    }

    /// Continues an earlier stream of the same source after this position. Returns the header as bytes, which the
    /// receiver compares with that of the earlier stream.
    pub fn resume(header: &Header, after: Position) -> (Self, Vec<u8>) {
        let (encoder, bytes) = Self::start(header);
        (Self { at: after, ..encoder }, bytes)
    }

    /// End of the last extent in the volume.
    pub fn offset(&self) -> u64 {
        self.at.offset
    }

    /// Encodes an extent. Extents must ascend, and have at most [`MAX_EXTENT`](super::MAX_EXTENT) bytes.
    pub fn extent(&mut self, offset: u64, data: &[u8]) -> Vec<u8> {
        let part = [&head(EXTENT, offset, data.len()), data].concat();
        self.at.offset = offset + data.len() as u64;
        self.seal(part)
    }

    /// Encodes the end.
    pub fn end(mut self) -> Vec<u8> {
        let part = head(END, self.size, 0);
        self.seal(part)
    }

    fn seal(&mut self, mut part: Vec<u8>) -> Vec<u8> {
        let checksum: Checksum = self.at.checksum.then(&part);
        self.at.checksum = checksum;
        part.extend_from_slice(checksum.as_bytes());
        part
    }
}
