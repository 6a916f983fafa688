//! How long a call may wait: until shortly before its caller gives up, so that the caller gets an
//! answer that says what was missing instead of a bare timeout.

use std::time::Duration;

/// The wait of a call whose caller set no deadline.
pub(crate) const DEFAULT_WAIT: Duration = Duration::from_secs(20);
/// The most that is kept back for answering.
const MARGIN: Duration = Duration::from_secs(2);

/// How long to wait, given the call's `grpc-timeout` header.
pub(crate) fn time_to_wait(header: Option<&str>) -> Duration {
    match header.and_then(parse) {
        Some(timeout) => timeout - MARGIN.min(timeout / 5),
        None => DEFAULT_WAIT,
    }
}

/// Reads a `grpc-timeout`: at most 8 digits and a unit (gRPC over HTTP/2, "Requests").
fn parse(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let value: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(value * 3600)),
        "M" => Some(Duration::from_secs(value * 60)),
        "S" => Some(Duration::from_secs(value)),
        "m" => Some(Duration::from_millis(value)),
        "u" => Some(Duration::from_micros(value)),
        "n" => Some(Duration::from_nanos(value)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_waits_until_shortly_before_its_deadline() {
        assert_eq!(time_to_wait(Some("120S")), Duration::from_secs(118));
        assert_eq!(time_to_wait(Some("1000m")), Duration::from_millis(800));
        for odd in ["", "S", "5", "5x", "-5S", "123456789S", "5ü"] {
            assert_eq!(time_to_wait(Some(odd)), DEFAULT_WAIT, "{odd}");
        }
        assert_eq!(time_to_wait(None), DEFAULT_WAIT);
    }
}
