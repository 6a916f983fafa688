//! Checks of single fields, in one wording.

use crate::Status;
use crate::proto::CapacityRange;

/// Longest name or ID that the drivers take, in bytes. The CSI specification asks for 128; Kubernetes'
/// own names end at 253.
pub const MAX_NAME: usize = 253;

/// A field that must be there and of a sane length.
pub fn required<'a>(field: &str, value: &'a str) -> Result<&'a str, Status> {
    if value.is_empty() {
        return Err(Status::invalid_argument(format!("{field} is missing in the request")));
    }
    if value.len() > MAX_NAME {
        return Err(Status::invalid_argument(format!(
            "{field} has {} bytes; the longest that is taken has {MAX_NAME}",
            value.len()
        )));
    }
    Ok(value)
}

/// How large a volume must and may be, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// At least this.
    pub required: u64,
    /// At most this, where the caller set a limit.
    pub limit: Option<u64>,
}

impl Size {
    /// Reads a capacity range; without one, `default` bytes are required.
    pub fn from_range(range: Option<&CapacityRange>, default: u64) -> Result<Self, Status> {
        let (required, limit) = range.map_or((0, 0), |r| (r.required_bytes, r.limit_bytes));
        if required < 0 || limit < 0 {
            return Err(Status::invalid_argument(format!(
                "capacity range is negative: required_bytes {required}, limit_bytes {limit}"
            )));
        }
        let limit = (limit > 0).then_some(limit.unsigned_abs());
        let required = match (required.unsigned_abs(), limit) {
            (0, Some(limit)) => default.min(limit),
            (0, None) => default,
            (required, _) => required,
        };
        if limit.is_some_and(|limit| limit < required) {
            return Err(Status::out_of_range(format!(
                "capacity range is empty: required_bytes {required} is more than limit_bytes {}",
                limit.unwrap_or_default()
            )));
        }
        Ok(Self { required, limit })
    }

    /// Whether a volume of `bytes` satisfies this.
    pub fn admits(&self, bytes: u64) -> bool {
        bytes >= self.required && self.limit.is_none_or(|limit| bytes <= limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(required_bytes: i64, limit_bytes: i64) -> CapacityRange {
        CapacityRange { required_bytes, limit_bytes }
    }

    #[test]
    fn a_range_says_what_a_volume_must_and_may_have() {
        let size = Size::from_range(Some(&range(10, 20)), 5).unwrap();
        assert!(size.admits(10) && size.admits(20) && !size.admits(9) && !size.admits(21));
        assert_eq!(Size::from_range(None, 5).unwrap(), Size { required: 5, limit: None });
        assert_eq!(Size::from_range(Some(&range(0, 3)), 5).unwrap(), Size { required: 3, limit: Some(3) });
    }

    #[test]
    fn an_impossible_range_is_refused() {
        assert_eq!(Size::from_range(Some(&range(20, 10)), 5).unwrap_err().code(), tonic::Code::OutOfRange);
        assert_eq!(
            Size::from_range(Some(&range(-1, 0)), 5).unwrap_err().code(),
            tonic::Code::InvalidArgument
        );
    }
}
