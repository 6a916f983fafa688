//! Report of health checks, the same in every program.

use crate::text::one_line;

/// One line per check, as `/healthz` and `/readyz` show them: the name, and why it fails.
pub fn report<'a>(checks: impl IntoIterator<Item = (&'a str, Option<&'a str>)>) -> String {
    let line = |(name, reason): (&str, Option<&str>)| match reason {
        None => format!("ok   {name}\n"),
        Some(reason) => format!("FAIL {name}: {}\n", one_line(reason)),
    };
    checks.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_one_line_per_check() {
        let checks = [("catalog", None), ("pools", Some("no pool\nis healthy"))];
        assert_eq!(report(checks), "ok   catalog\nFAIL pools: no pool\\nis healthy\n");
    }
}
