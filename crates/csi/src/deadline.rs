//! Deadline of a call: the caller's timeout minus a margin for the response.

use std::time::Duration;

use tokio::time::Instant;
use tonic::Request;

/// Deadline for the response to `request`; uses `default` if the caller set no timeout.
pub fn of<T>(request: &Request<T>, default: Duration) -> Instant {
    let header = request.metadata().get("grpc-timeout").and_then(|value| value.to_str().ok());
    let timeout = header.and_then(parse).unwrap_or(default);
    // Reserve a tenth, within limits, so that the response arrives before the caller's timeout.
    let margin = (timeout / 10).clamp(Duration::from_millis(20), Duration::from_secs(1));
    Instant::now() + timeout.saturating_sub(margin)
}

/// Parses a `grpc-timeout` header: up to eight digits and a unit (gRPC over HTTP/2, "Requests").
fn parse(header: &str) -> Option<Duration> {
    let (digits, unit) = header.split_at_checked(header.len().checked_sub(1)?)?;
    let amount: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(amount.checked_mul(3600)?)),
        "M" => Some(Duration::from_secs(amount.checked_mul(60)?)),
        "S" => Some(Duration::from_secs(amount)),
        "m" => Some(Duration::from_millis(amount)),
        "u" => Some(Duration::from_micros(amount)),
        "n" => Some(Duration::from_nanos(amount)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_parsed_in_every_unit() {
        assert_eq!(parse("15S"), Some(Duration::from_secs(15)));
        assert_eq!(parse("2M"), Some(Duration::from_secs(120)));
        assert_eq!(parse("14999992u"), Some(Duration::from_micros(14_999_992)));
        assert_eq!(parse(""), None);
        assert_eq!(parse("5x"), None);
        assert_eq!(parse("99999999999999999999H"), None);
    }
}
