//! Advisories about dependencies. A test may have no network, so `hack/advisories` holds the part of the RustSec database that
//! is about the crates in Cargo.lock, and the date of the database. `cargo lab advisory` renews it; `cargo lab test --all` fails
//! if it is too old.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::civil::Date;
use k8s_openapi::jiff::tz::TimeZone;

use crate::process::{command, run};
use crate::run::repository;

/// Folder of the advisories, laid out as in the RustSec database.
const KEPT: &str = "hack/advisories";
/// File in that folder with the date of the database.
const DATE: &str = "DATE";
/// Folder of the RustSec database with the advisories, by crate.
const CRATES: &str = "crates";
/// Name of the clone of the RustSec database in the folder that is `db-path` of cargo-deny.
const CLONE: &str = "advisory-db-3157b0e258782691";
/// Maximum age of the advisories in days.
const MAX_AGE: i32 = 180;

/// Replaces the kept advisories by those in a checkout of the RustSec database; returns their number.
pub(crate) async fn renew(checkout: &Path) -> Result<usize> {
    let mut log = command("git", ["log", "-1", "--format=%cs"]);
    let date = run(log.current_dir(checkout)).await?;
    let kept = repository().join(KEPT);
    let _ = fs::remove_dir_all(kept.join(CRATES));
    let mut count = 0;
    for name in packages(&fs::read_to_string(repository().join("Cargo.lock"))?) {
        for file in advisories(&checkout.join(CRATES).join(name))? {
            let text = fs::read_to_string(&file)?;
            let text = facts(&text).with_context(|| format!("{} is not an advisory", file.display()))?;
            let folder = kept.join(CRATES).join(name);
            fs::create_dir_all(&folder)?;
            fs::write(folder.join(file.file_name().unwrap_or_default()), text)?;
            count += 1;
        }
    }
    fs::write(kept.join(DATE), date)?;
    Ok(count)
}

/// Files of the advisories about a crate; none if it has no folder.
fn advisories(folder: &Path) -> Result<Vec<PathBuf>> {
    let Ok(entries) = fs::read_dir(folder) else { return Ok(Vec::new()) };
    let paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    let is_advisory = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("RUSTSEC-") && name.ends_with(".md")
    };
    Ok(paths.into_iter().filter(is_advisory).collect())
}

/// Names of the packages in a lockfile.
fn packages(lock: &str) -> BTreeSet<&str> {
    lock.lines().filter_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"')).collect()
}

/// What an advisory says to programs: its front matter. The text for people is at its address.
fn facts(advisory: &str) -> Option<String> {
    let (facts, _) = advisory.strip_prefix("```toml\n")?.split_once("\n```")?;
    let id = facts.lines().find_map(|line| line.strip_prefix("id = \"")?.strip_suffix('"'))?;
    Some(format!("```toml\n{facts}\n```\n\n# {id}\n"))
}

/// Lays out the kept advisories in `folder` as cargo-deny's clone of the RustSec database; returns their date.
pub(crate) async fn database(folder: &Path) -> Result<Date> {
    let kept = repository().join(KEPT);
    let date: Date = fs::read_to_string(kept.join(DATE))?.trim().parse()?;
    let clone = folder.join(CLONE);
    fs::create_dir_all(&clone)?;
    run(command("cp", ["-r"]).arg(kept.join(CRATES)).arg(&clone)).await?;
    let author = ["-c", "user.name=nestor", "-c", "user.email=nestor@localhost"];
    let commit = [&author[..], &["commit", "--quiet", "--message", "advisories"]].concat();
    for args in [&["init", "--quiet"][..], &["add", "."], &commit] {
        run(command("git", args).current_dir(&clone)).await?;
    }
    Ok(date)
}

/// Fails if the advisories are too old.
pub(crate) fn check_age(date: Date) -> Result<()> {
    check_age_at(date, Timestamp::now().to_zoned(TimeZone::UTC).date())
}

fn check_age_at(date: Date, today: Date) -> Result<()> {
    let age = date.until(today)?.get_days();
    ensure!(
        age <= MAX_AGE,
        "the advisories in {KEPT} are of {date}, {age} days old; the maximum is {MAX_AGE}: clone \
         https://github.com/RustSec/advisory-db and run `cargo lab advisory CLONE`"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_and_facts_are_found() {
        let lock = "[[package]]\nname = \"b\"\nversion = \"1\"\n\n[[package]]\nname = \"a\"\n";
        assert_eq!(packages(lock).into_iter().collect::<Vec<_>>(), ["a", "b"]);
        let facts = facts("```toml\n[advisory]\nid = \"RUSTSEC-1\"\n```\n\n# Title\n\nText\n").unwrap();
        assert_eq!(facts, "```toml\n[advisory]\nid = \"RUSTSEC-1\"\n```\n\n# RUSTSEC-1\n");
    }

    #[test]
    fn kept_advisories_are_about_packages_in_the_lockfile() {
        let lock = fs::read_to_string(repository().join("Cargo.lock")).unwrap();
        let packages = packages(&lock);
        for entry in fs::read_dir(repository().join(KEPT).join(CRATES)).unwrap() {
            let folder = entry.unwrap().path();
            let name = folder.file_name().unwrap().to_str().unwrap();
            assert!(packages.contains(name), "{name}");
            for file in advisories(&folder).unwrap() {
                let text = fs::read_to_string(&file).unwrap();
                assert!(text.contains(&format!("\npackage = \"{name}\"\n")), "{}", file.display());
            }
        }
    }

    #[test]
    fn old_advisories_are_refused() {
        let date = |text: &str| text.parse::<Date>().unwrap();
        check_age_at(date("2026-01-01"), date("2026-06-30")).unwrap();
        let refused = check_age_at(date("2026-01-01"), date("2026-07-01")).unwrap_err().to_string();
        assert!(refused.contains("181 days old"), "{refused}");
    }
}
