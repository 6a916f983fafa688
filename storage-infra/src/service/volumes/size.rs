//! Sizes of volumes.

use infra_api::ProblemCode;

use crate::service::problems::{Failure, Result};

const MIB: u64 = 1 << 20;
/// Size granularity: no disk sector or filesystem page that we know of is larger.
const UNIT: u64 = 4096;

/// The size of a new volume: rounded up to MiB if the limit allows, otherwise to 4 KiB.
pub(super) fn rounded_size(requested: u64, limit: Option<u64>) -> Result<u64> {
    let invalid = |detail: String| Failure::new(ProblemCode::Invalid, detail);
    if requested == 0 {
        return Err(invalid("capacityBytes must be more than 0".into()));
    }
    let fits = |size: &u64| limit.is_none_or(|limit| *size <= limit) && i64::try_from(*size).is_ok();
    let sizes = [requested.checked_next_multiple_of(MIB), requested.checked_next_multiple_of(UNIT)];
    sizes.into_iter().flatten().find(fits).ok_or_else(|| match limit {
        Some(limit) => invalid(format!(
            "no multiple of {UNIT} bytes lies between capacityBytes {requested} and limitBytes {limit}"
        )),
        None => invalid(format!(
            "capacityBytes {requested} exceeds the maximum disk size of {} bytes",
            i64::MAX.cast_unsigned() / UNIT * UNIT
        )),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_to_mib_unless_the_limit_is_tighter() {
        assert_eq!(rounded_size(1, None).unwrap(), MIB);
        assert_eq!(rounded_size(MIB + 1, Some(2 * MIB)).unwrap(), 2 * MIB);
        assert_eq!(rounded_size(MIB + 1, Some(MIB + UNIT)).unwrap(), MIB + UNIT);
        for (size, limit) in [(0, None), (MIB + 1, Some(MIB + 2)), (2 * MIB, Some(MIB)), (u64::MAX, None)] {
            assert_eq!(
                rounded_size(size, limit).unwrap_err().code(),
                ProblemCode::Invalid,
                "{size} {limit:?}"
            );
        }
    }
}
