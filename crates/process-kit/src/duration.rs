//! Durations as text in flags and reports: numbers with units.

use std::time::Duration;

use jiff::{Span, SpanRelativeTo};

/// Units in descending order, with their seconds.
const UNITS: [(char, u64); 4] = [('d', 86_400), ('h', 3600), ('m', 60), ('s', 1)];

/// Parses `90s`, `5m`, `12h`, `30d`, or a sequence such as `1h30m`, in jiff's format. A day has 24 hours; months and years,
/// whose lengths vary, are refused.
pub fn parse(text: &str) -> Result<Duration, String> {
    let wrong = |error: jiff::Error| {
        format!("{text:?} is not a duration such as 90s, 5m, 12h, 30d or 1h30m: {error}")
    };
    let span: Span = text.parse().map_err(wrong)?;
    let duration = span.to_duration(SpanRelativeTo::days_are_24_hours()).map_err(wrong)?;
    Duration::try_from(duration).map_err(wrong)
}

/// Parses a duration from one second to one hour, for timeouts and intervals.
pub fn parse_timeout(text: &str) -> Result<Duration, String> {
    let duration = parse(text)?;
    match duration.as_secs() {
        1..=3600 => Ok(duration),
        _ => Err(format!("{text:?} is out of range: expected 1s to 1h")),
    }
}

/// Formats a duration with its two largest units, such as `3d4h`.
pub fn show(duration: Duration) -> String {
    let mut left = duration.as_secs();
    let parts = UNITS.into_iter().filter_map(|(name, unit)| {
        let count = left / unit;
        left %= unit;
        (count > 0).then(|| format!("{count}{name}"))
    });
    let shown: String = parts.take(2).collect();
    if shown.is_empty() { "0s".to_owned() } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formatted_durations_can_be_parsed() {
        for (text, seconds) in [("90s", 90), ("5m", 300), ("1h30m", 5400), ("30d", 30 * 86_400), ("0s", 0)] {
            assert_eq!(parse(text), Ok(Duration::from_secs(seconds)), "{text}");
            assert_eq!(
                parse(&show(Duration::from_secs(seconds))),
                Ok(Duration::from_secs(seconds)),
                "{text}"
            );
        }
        assert_eq!(show(Duration::from_secs(100_000)), "1d3h");
        for bad in ["", "5", "m", "-5m", "5M", "2mo", "1y", "99999999999999999999d"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
