//! Decoder of volume streams: verifies each part before it is used.

use uuid::Uuid;

use super::{CHECKSUM, Checksum, END, EXTENT, HEAD, HEADER, Header, MAGIC, MAX_EXTENT, Position, VERSION};

/// A stream is refused. The offset `at` is in the stream.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The bytes do not begin with a header.
    #[error("this is no volume stream: it does not begin with {}", MAGIC.escape_ascii())]
    NotAStream,
    /// A newer format.
    #[error("the stream has format version {0}, this program supports {VERSION}: use a newer version of it")]
    Version(u32),
    /// A part is damaged, or breaks a rule of the format.
    #[error("the stream is corrupt at byte {at}: {what}; nothing from there on is used")]
    Corrupt {
        /// Start of the part.
        at: u64,
        /// What is wrong.
        what: String,
    },
    /// The stream ends early.
    #[error("the stream is truncated: it ends at byte {at}, before its end mark")]
    Truncated {
        /// Length of the stream.
        at: u64,
    },
    /// There are bytes after the end.
    #[error("the stream has more bytes after its end at byte {at}")]
    TrailingBytes {
        /// End of the stream.
        at: u64,
    },
}

/// A verified part of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// The header: always the first.
    Header(Header),
    /// Data of the volume.
    Extent {
        /// Offset in the volume.
        offset: u64,
        /// The whole part, with its checksum.
        part: Vec<u8>,
    },
    /// The end: the stream is complete.
    End {
        /// The whole part, with its checksum.
        part: Vec<u8>,
    },
}

impl Frame {
    /// Data of an extent; empty for other parts.
    pub fn data(&self) -> &[u8] {
        match self {
            Self::Extent { part, .. } => &part[HEAD..part.len() - CHECKSUM],
            Self::Header(_) | Self::End { .. } => &[],
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    Extents(Header),
    Ended,
}

/// Decodes one stream from chunks of any size.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Offset of the buffer in the stream.
    at: u64,
    state: State,
    position: Position,
    /// Position after which the stream continues.
    resume: Option<Position>,
}

impl Default for Decoder {
    fn default() -> Self {
        let position = Position { offset: 0, checksum: Checksum([0; CHECKSUM]) };
        Self { buffer: Vec::new(), at: 0, state: State::Start, position, resume: None }
    }
}

impl Decoder {
    /// A decoder of a stream that continues an earlier one after this position: a header, and the parts from there on.
    pub fn resume(after: Position) -> Self {
        Self { resume: Some(after), ..Self::default() }
    }

    /// Adds bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The position after the last part that was returned.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Number of verified bytes of the stream.
    pub fn verified(&self) -> u64 {
        self.at
    }

    /// The next part, once all of it was added and verified.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, StreamError> {
        match self.state {
            State::Start => self.header(),
            State::Extents(header) => self.part(&header),
            State::Ended if self.buffer.is_empty() => Ok(None),
            State::Ended => Err(StreamError::TrailingBytes { at: self.at }),
        }
    }

    /// Fails unless the stream is complete. Called when there are no more bytes.
    pub fn finish(&self) -> Result<(), StreamError> {
        match self.state {
            State::Ended => Ok(()),
            State::Start | State::Extents(_) => {
                Err(StreamError::Truncated { at: self.at + self.buffer.len() as u64 })
            }
        }
    }

    fn corrupt<T>(&self, what: impl Into<String>) -> Result<T, StreamError> {
        Err(StreamError::Corrupt { at: self.at, what: what.into() })
    }

    fn header(&mut self) -> Result<Option<Frame>, StreamError> {
        let known = self.buffer.len().min(MAGIC.len());
        if self.buffer[..known] != MAGIC[..known] {
            return Err(StreamError::NotAStream);
        }
        if self.buffer.len() < 12 {
            return Ok(None);
        }
        let version = u32::from_be_bytes(array(&self.buffer[8..]));
        if version != VERSION {
            return Err(StreamError::Version(version));
        }
        if self.buffer.len() < HEADER + CHECKSUM {
            return Ok(None);
        }
        let header = Header {
            size: u64::from_be_bytes(array(&self.buffer[12..])),
            identity: Uuid::from_bytes(array(&self.buffer[20..])),
            generation: u64::from_be_bytes(array(&self.buffer[36..])),
        };
        let checksum = Checksum::of_header(&self.buffer[..HEADER]);
        if self.buffer[HEADER..HEADER + CHECKSUM] != checksum.0 {
            return self.corrupt("the checksum of the header does not match");
        }
        self.take(HEADER + CHECKSUM);
        self.position = self.resume.unwrap_or(Position { offset: 0, checksum });
        self.state = State::Extents(header);
        Ok(Some(Frame::Header(header)))
    }

    fn part(&mut self, header: &Header) -> Result<Option<Frame>, StreamError> {
        if self.buffer.len() < HEAD {
            return Ok(None);
        }
        let tag: [u8; 4] = array(&self.buffer);
        let (offset, length) =
            (u64::from_be_bytes(array(&self.buffer[4..])), u32::from_be_bytes(array(&self.buffer[12..])));
        let is_end = match &tag {
            EXTENT => false,
            END => true,
            _ => return self.corrupt("neither an extent nor the end begins here"),
        };
        self.check_bounds(is_end, offset, length, header.size)?;
        let sealed = HEAD + length as usize;
        if self.buffer.len() < sealed + CHECKSUM {
            return Ok(None);
        }
        let checksum = self.position.checksum.then(&self.buffer[..sealed]);
        if self.buffer[sealed..sealed + CHECKSUM] != checksum.0 {
            return self.corrupt(format!("the checksum of the part for offset {offset} does not match"));
        }
        let part = self.take(sealed + CHECKSUM);
        if is_end {
            self.state = State::Ended;
            return Ok(Some(Frame::End { part }));
        }
        self.position = Position { offset: offset + u64::from(length), checksum };
        Ok(Some(Frame::Extent { offset, part }))
    }

    fn check_bounds(&self, is_end: bool, offset: u64, length: u32, size: u64) -> Result<(), StreamError> {
        if is_end {
            let fits = offset == size && length == 0;
            return if fits { Ok(()) } else { self.corrupt(format!("the end is not at the size {size}")) };
        }
        if length == 0 || length as usize > MAX_EXTENT {
            return self.corrupt(format!("an extent has {length} bytes"));
        }
        if offset < self.position.offset {
            return self.corrupt(format!("the extent for offset {offset} is out of order"));
        }
        match offset.checked_add(u64::from(length)) {
            Some(end) if end <= size => Ok(()),
            _ => self.corrupt(format!("the extent for offset {offset} exceeds the size {size}")),
        }
    }

    fn take(&mut self, length: usize) -> Vec<u8> {
        let rest = self.buffer.split_off(length);
        self.at += length as u64;
        std::mem::replace(&mut self.buffer, rest)
    }
}

/// The first `N` bytes. The caller checked the length.
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[..N]);
    array
}
