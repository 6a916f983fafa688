//! Runs fuzz targets as tests, without a fuzzer: the kept inputs of a target, and a fixed number of mutations of them. The
//! mutations come from a fixed seed, so every run has the same inputs. `cargo fuzz` runs the same targets guided by coverage
//! (CONTRIBUTING.md, "Fuzzing").
//!
//! A target is a function of bytes. It panics if a property does not hold.

mod mutate;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use fastrand::Rng;
use mutate::mutated;

/// Environment variable with the number of mutations per target.
pub const RUNS_VAR: &str = "NESTOR_FUZZ_RUNS";
/// Number of mutations per target without that variable.
const RUNS: u64 = 1000;
/// Package of the fuzz targets.
const FUZZ: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz");
const SEED: u64 = 0x6e65_7374_6f72;

/// Runs a target on its kept inputs and on mutations of them.
pub fn replay(target: &str, run: impl Fn(&[u8])) {
    let kept = kept_inputs(&corpus(target));
    for input in &kept {
        check(target, input, &run);
    }
    let mut rng = rng();
    for _ in 0..runs() {
        check(target, &mutated(&mut rng, &kept), &run);
    }
}

/// Number of random inputs per target.
pub fn runs() -> u64 {
    let number = std::env::var(RUNS_VAR).ok();
    number.map_or(RUNS, |number| number.parse().expect("the number of runs is a number"))
}

/// The source of random inputs: the same in every run.
pub fn rng() -> Rng {
    Rng::with_seed(SEED)
}

/// Folder with the kept inputs of a target.
fn corpus(target: &str) -> PathBuf {
    Path::new(FUZZ).join("corpus").join(target)
}

/// The inputs in a folder, by file name.
fn kept_inputs(folder: &Path) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.expect("the folder is readable").path()).collect();
    assert!(!paths.is_empty(), "{} has no inputs", folder.display());
    paths.sort();
    paths.iter().map(|path| fs::read(path).expect("a kept input is readable")).collect()
}

fn check(target: &str, input: &[u8], run: &impl Fn(&[u8])) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(input))) {
        eprintln!(
            "target {target} fails with this input; keep it in fuzz/corpus/{target}: b\"{}\"",
            input.escape_ascii()
        );
        resume_unwind(panic);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_failing_input_is_found_from_a_kept_one() {
        let found = catch_unwind(|| {
            let kept = [b"{\"size\": 10}".to_vec()];
            let mut rng = rng();
            for _ in 0..RUNS {
                check("none", &mutated(&mut rng, &kept), &|input: &[u8]| assert!(!input.contains(&0)));
            }
        });
        assert!(found.is_err());
    }

    /// Names of the entries of a folder, without suffixes.
    fn names(folder: &str) -> BTreeSet<String> {
        let entries = fs::read_dir(Path::new(FUZZ).join(folder)).unwrap();
        entries.map(|entry| entry.unwrap().path().file_stem().unwrap().display().to_string()).collect()
    }

    #[test]
    fn every_target_has_kept_inputs_and_is_known_to_cargo_fuzz() {
        let manifest = fs::read_to_string(Path::new(FUZZ).join("Cargo.toml")).unwrap();
        let programs = manifest.split("[[bin]]\nname = \"").skip(1);
        let programs: BTreeSet<String> =
            programs.map(|rest| rest.split('"').next().unwrap_or_default().to_owned()).collect();
        assert_eq!(programs, names("corpus"));
        assert_eq!(programs, names("fuzz_targets"));
    }

    #[test]
    fn the_kept_inputs_are_small() {
        let targets = names("corpus").into_iter().map(|target| kept_inputs(&corpus(&target)));
        let bytes: usize = targets.map(|inputs| inputs.iter().map(Vec::len).sum::<usize>()).sum();
        assert!(bytes < 300 << 10, "{bytes} bytes: minimise the inputs with `cargo fuzz cmin`");
    }
}
