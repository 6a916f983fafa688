//! Validation of request fields.

use crate::Status;
use crate::proto::CapacityRange;

/// Maximum length of names and IDs in bytes. The CSI specification requires at least 128; Kubernetes names have at most 253.
pub const MAX_NAME: usize = 253;

/// Validates a required field.
pub fn required<'a>(field: &str, value: &'a str) -> Result<&'a str, Status> {
    if value.is_empty() {
        return Err(Status::invalid_argument(format!("{field} is missing in the request")));
    }
    if value.len() > MAX_NAME {
        return Err(Status::invalid_argument(format!(
            "{field} has {} bytes; the maximum is {MAX_NAME}",
            value.len()
        )));
    }
    Ok(value)
}

/// Required and maximum size of a volume in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Minimum size.
    pub required: u64,
    /// Maximum size, if the caller set a limit.
    pub limit: Option<u64>,
}

impl Size {
    /// Parses a capacity range; without a required size, `default` is required.
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

    /// Whether a volume of `bytes` is within the range.
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
    fn a_range_has_a_minimum_and_a_maximum() {
        let size = Size::from_range(Some(&range(10, 20)), 5).unwrap();
        assert!(size.admits(10) && size.admits(20) && !size.admits(9) && !size.admits(21));
        assert_eq!(Size::from_range(None, 5).unwrap(), Size { required: 5, limit: None });
        assert_eq!(Size::from_range(Some(&range(0, 3)), 5).unwrap(), Size { required: 3, limit: Some(3) });
    }

    #[test]
    fn an_invalid_range_is_refused() {
        assert_eq!(Size::from_range(Some(&range(20, 10)), 5).unwrap_err().code(), tonic::Code::OutOfRange);
        assert_eq!(
            Size::from_range(Some(&range(-1, 0)), 5).unwrap_err().code(),
            tonic::Code::InvalidArgument
        );
    }
}
