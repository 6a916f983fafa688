//! Sizes in Kubernetes quantity notation: `10Gi`, `500M`, `4096`.

const UNITS: [(&str, u64); 10] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("Pi", 1 << 50),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("P", 1_000_000_000_000_000),
];

/// Parses a quantity; whole numbers only.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let unit = UNITS.iter().find(|(unit, _)| text.ends_with(unit));
    let (number, factor) = match unit {
        Some((unit, factor)) => (&text[..text.len() - unit.len()], *factor),
        None => (text, 1),
    };
    let number: u64 = number
        .parse()
        .map_err(|_| "must be a whole number with an optional unit, such as 4096, 500M or 10Gi".to_owned())?;
    number.checked_mul(factor).ok_or_else(|| "is too large: it does not fit into 64 bits".to_owned())
}

/// Formats a size with the largest binary unit that is not larger than the size.
pub(crate) fn show(bytes: u64) -> String {
    let unit = UNITS[..5].iter().rev().find(|(_, factor)| bytes >= *factor);
    match unit {
        Some((unit, factor)) if bytes.is_multiple_of(*factor) => format!("{}{unit}", bytes / factor),
        Some((unit, factor)) => format!("{:.1}{unit}", bytes as f64 / *factor as f64),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_use_kubernetes_quantity_notation() {
        assert_eq!(parse("10Gi"), Ok(10 << 30));
        assert_eq!(parse("500M"), Ok(500_000_000));
        assert_eq!(parse("7"), Ok(7));
        for bad in ["", "Gi", "1.5Gi", "-1", "1 Gi", "99999999999Pi"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert_eq!((show(10 << 30), show(1536), show(0)), ("10Gi".into(), "1.5Ki".into(), "0".into()));
    }
}
