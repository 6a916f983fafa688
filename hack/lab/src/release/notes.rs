//! Release notes: the section of a version in the changelog.

use anyhow::{Context, Result};

/// The section of a version, or of what is not released yet if the version has none.
pub(super) fn of_version(changelog: &str, version: &str) -> Result<String> {
    let section = section(changelog, version).or_else(|| section(changelog, "Unreleased"));
    let section =
        section.with_context(|| format!("CHANGELOG.md has no section {version} and no Unreleased"))?;
    Ok(format!("# Nestor {version}\n\n{}\n", section.trim()))
}

/// Text below a heading such as `## 1.2.3` or `## [1.2.3] - 2026-01-01`.
fn section<'a>(changelog: &'a str, name: &str) -> Option<&'a str> {
    let mut parts = changelog.split("\n## ").skip(1);
    parts.find_map(|part| {
        let (heading, text) = part.split_once('\n')?;
        let first = heading.split_whitespace().next()?.trim_matches(['[', ']']);
        (first == name).then_some(text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_section_of_the_version_is_used_or_the_unreleased_one() {
        let changelog =
            "# Changelog\n\n## Unreleased\n\n- new\n\n## [0.2.0] - 2026-01-01\n\n### Added\n\n- old\n";
        assert_eq!(of_version(changelog, "0.2.0").unwrap(), "# Nestor 0.2.0\n\n### Added\n\n- old\n");
        assert_eq!(of_version(changelog, "0.3.0").unwrap(), "# Nestor 0.3.0\n\n- new\n");
        assert!(of_version("# Changelog\n", "1").is_err());
    }
}
