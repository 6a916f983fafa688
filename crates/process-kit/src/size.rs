//! Sizes in bytes, in the notation of Kubernetes quantities.

const UNITS: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

/// The exact size with the largest binary unit that divides it.
pub fn exact(bytes: u64) -> String {
    let (mut number, mut unit) = (bytes, 0);
    while number > 0 && number.is_multiple_of(1024) && unit + 1 < UNITS.len() {
        (number, unit) = (number / 1024, unit + 1);
    }
    format!("{number}{}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_has_the_largest_unit_that_divides_it() {
        let sizes = [0, 1023, 1024, 1536, 5 << 20, 3 << 29, 1 << 60, u64::MAX];
        let expected = ["0", "1023", "1Ki", "1536", "5Mi", "1536Mi", "1Ei", "18446744073709551615"];
        assert_eq!(sizes.map(exact), expected);
    }
}
