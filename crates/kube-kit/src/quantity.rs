//! Kubernetes quantities as integers.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use process_kit::size;

/// Returns the value of a quantity, rounded up; None if it is invalid.
pub fn value(quantity: &Quantity) -> Option<u64> {
    let text = quantity.0.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
    let (number, suffix) = text.split_at(digits);
    let (scale_up, scale_down): (u128, u128) = match suffix {
        "" => (1, 1),
        "m" => (1, 1000),
        "k" => (1000, 1),
        "M" => (1_000_000, 1),
        "G" => (1_000_000_000, 1),
        "T" => (1_000_000_000_000, 1),
        "P" => (1_000_000_000_000_000, 1),
        "E" => (1_000_000_000_000_000_000, 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        _ => {
            let exponent: u32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            (10u128.checked_pow(exponent)?, 1)
        }
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.len() > 9 || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    let fraction_scale = 10u128.pow(u32::try_from(fraction.len()).ok()?);
    let parse = |digits: &str| if digits.is_empty() { Some(0u128) } else { digits.parse().ok() };
    let scaled =
        parse(whole)?.checked_mul(fraction_scale)?.checked_add(parse(fraction)?)?.checked_mul(scale_up)?;
    u64::try_from(scaled.div_ceil(fraction_scale * scale_down)).ok()
}

/// Formats bytes with the largest binary unit that divides them, because quotas and Events show quantities as written.
pub fn of(bytes: u64) -> Quantity {
    Quantity(size::exact(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_parsed_in_every_notation() {
        for (text, expected) in [
            ("1Gi", 1 << 30),
            ("1.5Ki", 1536),
            ("1e3", 1000),
            ("2M", 2_000_000),
            ("1", 1),
            ("1500m", 2),
            ("0.5", 1),
        ] {
            assert_eq!(value(&Quantity(text.to_owned())), Some(expected), "{text}");
        }
        for number in [0, 1, 1023, 1024, 5 << 20, 3 << 29, 1 << 30, 1 << 60, u64::MAX] {
            assert_eq!(value(&of(number)), Some(number), "{number}");
        }
        assert_eq!(of(20 << 20).0, "20Mi");
        for text in ["", "Gi", "1Zi", "-1", "99999999999E"] {
            assert_eq!(value(&Quantity(text.to_owned())), None, "{text}");
        }
    }
}
