//! Steps of `cargo lab test`: their names, which of them a command line selects, and their order.

use anyhow::{Result, bail};

use super::black_box::{
    CLUSTER_API, DEPLOYED, HOSTS, INFRA_HA, KUBERNETES, KUBEVIRT, LONG, ON_BOTH_ENGINES, ON_KUBEVIRT, RBD,
    tests_of, without_long_tests,
};
use super::capabilities::is_outermost;
use crate::cache::Kubernetes;
use crate::sanity::Tier;
use crate::verbs::BLACKBOX_TESTS;

/// Duration in minutes of the step `long-soak`.
const LONG_SOAK_MINUTES: u64 = 20;

/// Unit tests. They are built with the features of the whole workspace, like the black-box tests, so that nothing is built
/// twice. All programs run, also after one has failed. The documentation contains no tests: rustdoc does not look for them
/// with `--tests`.
const UNIT_TESTS: [&str; 3] = ["test", "--workspace", "--no-fail-fast"];

/// Tests of one program at the same time in the step `unit`: those of storage-infra mostly wait.
const UNIT_THREADS: (&str, &str) = ("RUST_TEST_THREADS", "6");

/// Transitions of the model tests for each fault budget in the step `model`: more than most of them have.
const MODEL_TRANSITIONS: (&str, &str) = ("NESTOR_MODEL_STATES", "5000000");

/// The feature with the tests that need a Ceph cluster: they are not in the unit tests of a host without it.
const CEPH_TESTS: &str = "storage-infra/ceph-tests";

/// Cases of each operation and each kind in the step `infra-crash`: more than in `unit`.
const CRASH_CASES: (&str, &str) = ("NESTOR_CRASH_CASES", "25");

/// Seeds of storage-infra's simulation in the steps `simulation` and `simulation-all`: more than in `unit`.
const SIMULATION_SEEDS: (&str, &str) = ("NESTOR_SIMULATION_SEEDS", "5000");
const MORE_SIMULATION_SEEDS: (&str, &str) = ("NESTOR_SIMULATION_SEEDS", "20000");

/// Safety checks that the simulation must miss in the step `simulation-all`: also those that take long.
const SIMULATION_CHECKS: (&str, &str) = ("NESTOR_SIMULATION_CHECKS", "all");

/// Inputs per fuzz target in the step `fuzz`: more than in `unit`.
const FUZZ_INPUTS: (&str, &str) = ("NESTOR_FUZZ_RUNS", "5000");

/// Step that builds the black-box tests, so that VMs do not compete with the compiler for the CPU.
const BLACKBOX_BUILD: &str = "blackbox-build";

/// A check with a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Step {
    /// Its name in `--only` and in the table of results.
    pub(super) name: String,
    /// What it checks.
    pub(super) description: String,
    /// The smallest set that it belongs to.
    pub(super) set: Set,
    /// What it runs.
    pub(super) work: Work,
}

/// Sets of steps; each contains the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Set {
    /// Steps of `cargo lab test --quick`.
    Quick,
    /// Steps of `cargo lab test`.
    Normal,
    /// Steps of `cargo lab test --all`.
    All,
}

impl Set {
    /// The shortest command line that runs the set.
    pub(super) fn command(self) -> &'static str {
        match self {
            Self::Quick => "--quick",
            Self::Normal => "default",
            Self::All => "--all",
        }
    }
}

/// What a step runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Work {
    /// Cargo, with these arguments and variables.
    Cargo { args: Vec<&'static str>, env: Vec<(&'static str, &'static str)> },
    /// `cargo fmt --check`.
    Fmt,
    /// cargo-machete.
    Machete,
    /// cargo-deny.
    Deny,
    /// typos.
    Spelling,
    /// mdBook.
    Book,
    /// Cargo with these arguments, once Ceph's programs are installed.
    Ceph { args: Vec<&'static str> },
    /// schemathesis against storage-infra.
    Schemathesis,
    /// csi-sanity against the driver of a tier of the lab.
    Sanity(Tier),
    /// The black-box tests that these arguments of the test program select, in a lab; the duration of the soak test, if it is
    /// not the usual.
    BlackBox { selection: Vec<String>, soak_minutes: Option<u64>, lab: Kind },
}

/// The labs that steps need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nestor's components are processes of this host.
    Processes,
    /// The same, with pools in a Ceph cluster.
    Ceph,
    /// Nestor runs in pods.
    Pods,
    /// Cluster API makes the VMs.
    ClusterApi,
    /// KubeVirt makes the VMs; of Nestor, only gc-csi runs.
    KubeVirt,
    /// Two storage-infra servers, and no VMs.
    InfraServers,
    /// Two hypervisor hosts.
    Hosts,
    /// All clusters run this version of Kubernetes.
    Version(Kubernetes),
}

impl Work {
    /// The lab that it needs.
    pub(super) fn lab(&self) -> Option<Kind> {
        match self {
            Self::Sanity(_) => Some(Kind::Processes),
            Self::BlackBox { lab, .. } => Some(*lab),
            _ => None,
        }
    }

    /// Whether it leaves enough CPU time for other such steps beside it, and does not wait for the lock of cargo's target
    /// folder.
    fn is_light(&self) -> bool {
        matches!(self, Self::Fmt | Self::Machete | Self::Deny | Self::Spelling | Self::Book)
    }
}

/// Steps that a command line selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice<'a> {
    /// All steps of a set.
    Set(Set),
    /// The quick steps, and the black-box tests whose names contain this text.
    Filter(&'a str),
    /// The steps with these names.
    Only(&'a [String]),
}

/// All steps in the order in which they run: cheap ones first, and those that need a lab last, so that nothing competes with
/// the lab for the CPU.
pub(super) fn all(capabilities: &[String]) -> Vec<Step> {
    let mut steps = without_lab();
    for (name, tier) in [("sanity-guest", Tier::Guest), ("sanity-mgmt", Tier::Mgmt)] {
        let driver = if tier == Tier::Guest { "gc-csi" } else { "mgmt-csi" };
        steps.push(step(name, Set::Normal, &format!("csi-sanity against {driver}"), Work::Sanity(tier)));
    }
    let description = |module: &str| format!("black-box tests in tests/tests/{module}.rs");
    let of = |module: &str| tests_of(module, capabilities);
    let of_own_lab = [KUBERNETES, CLUSTER_API, KUBEVIRT, RBD, INFRA_HA, HOSTS];
    let own_lab = |module: &str| DEPLOYED.contains(&module) || of_own_lab.contains(&module);
    let in_usual_lab = capabilities.iter().filter(|module| is_outermost(module) && !own_lab(module));
    steps.extend(in_usual_lab.map(|module| {
        let set = if LONG.contains(&module.as_str()) { Set::All } else { Set::Normal };
        step(module, set, &description(module), blackbox(of(module), None))
    }));
    let long_soak = blackbox(of("soak"), Some(LONG_SOAK_MINUTES));
    let long_soak_description = format!("the black-box tests of soak, for {LONG_SOAK_MINUTES} minutes");
    steps.push(step("long-soak", Set::All, &long_soak_description, long_soak));
    steps.extend(on_rbd(of(RBD)));
    steps.extend(DEPLOYED.map(|module| {
        step(module, Set::All, &description(module), blackbox_in(Kind::Pods, of(module), None))
    }));
    let others = [
        (CLUSTER_API, Kind::ClusterApi),
        (INFRA_HA, Kind::InfraServers),
        (HOSTS, Kind::Hosts),
        (KUBEVIRT, Kind::KubeVirt),
    ];
    steps.extend(others.map(|(module, lab)| {
        step(module, Set::All, &description(module), blackbox_in(lab, of(module), None))
    }));
    let on_kubevirt = blackbox_in(Kind::KubeVirt, ON_KUBEVIRT.map(str::to_owned).to_vec(), None);
    let volumes = "black-box tests of other modules, with VMs of KubeVirt";
    steps.push(step("kubevirt-volumes", Set::All, volumes, on_kubevirt));
    steps.extend(Kubernetes::OTHERS.map(|version| {
        let description = format!("{} with Kubernetes {version}", description(KUBERNETES));
        let work = blackbox_in(Kind::Version(version), of(KUBERNETES), None);
        step(&format!("kubernetes-{version}"), Set::All, &description, work)
    }));
    steps
}

/// Steps in a lab with pools in a Ceph cluster.
fn on_rbd(own: Vec<String>) -> [Step; 2] {
    let own = blackbox_in(Kind::Ceph, own, None);
    let both = blackbox_in(Kind::Ceph, ON_BOTH_ENGINES.map(str::to_owned).to_vec(), None);
    [
        step(RBD, Set::All, "black-box tests in tests/tests/rbd.rs, with pools in a Ceph cluster", own),
        step("rbd-volumes", Set::All, "black-box tests of other modules, with pools in a Ceph cluster", both),
    ]
}

fn without_lab() -> Vec<Step> {
    let cargo = |args: &[&'static str]| Work::Cargo { args: args.to_vec(), env: Vec::new() };
    // `--all-targets` leaves out the black-box tests, because `cargo test` does not run them.
    let clippy = |targets: &[&'static str]| {
        let options = ["--features", CEPH_TESTS, "--", "-D", "warnings"];
        cargo(&[&["clippy", "--workspace"], targets, &options].concat())
    };
    let ceph =
        ["test", "-p", "storage-infra", "--features", CEPH_TESTS, "--test", "server", "rbd::"].to_vec();
    let model = Work::Cargo {
        args: [&UNIT_TESTS[..], &["--test", "attach", "--test", "kubevirt"]].concat(),
        env: vec![MODEL_TRANSITIONS],
    };
    let crash = Work::Cargo {
        args: ["test", "-p", "storage-infra", "--test", "server", "crash::"].to_vec(),
        env: vec![CRASH_CASES],
    };
    let simulation =
        |test, env| Work::Cargo { args: ["test", "-p", "storage-infra", "--lib", test].to_vec(), env };
    let unit = [&UNIT_TESTS[..], &["--tests"]].concat();
    let fuzz = Work::Cargo { args: [&unit[..], &["fuzz"]].concat(), env: vec![FUZZ_INPUTS] };
    vec![
        step("fmt", Set::Quick, "formatting", Work::Fmt),
        step("machete", Set::All, "unused dependencies (cargo-machete)", Work::Machete),
        step("deny", Set::All, "licences, sources and advisories of dependencies (cargo-deny)", Work::Deny),
        step("spelling", Set::All, "spelling (typos)", Work::Spelling),
        step("book", Set::All, "the documentation as a book (mdBook)", Work::Book),
        step("clippy", Set::Quick, "lints", clippy(&["--all-targets"])),
        step("clippy-blackbox", Set::Quick, "lints of the black-box tests", clippy(&["--test", "blackbox"])),
        step("doc", Set::All, "documentation of the code", cargo(&["doc", "--workspace", "--no-deps"])),
        step("unit", Set::Quick, "unit tests", Work::Cargo { args: unit, env: vec![UNIT_THREADS] }),
        step(
            BLACKBOX_BUILD,
            Set::Quick,
            "build of the black-box tests",
            cargo(&[&BLACKBOX_TESTS[..], &["--no-run"]].concat()),
        ),
        step(
            "simulation",
            Set::Normal,
            "storage-infra simulated, with more seeds than in `unit`",
            simulation("simulation::tests::whatever", vec![SIMULATION_SEEDS]),
        ),
        step(
            "simulation-all",
            Set::All,
            "storage-infra simulated, with many seeds, and without each of its safety checks",
            simulation("simulation::", vec![MORE_SIMULATION_SEEDS, SIMULATION_CHECKS]),
        ),
        step(
            "infra-crash",
            Set::All,
            "crashes of storage-infra while it recovers, and failed writes, in more cases than in `unit`",
            crash,
        ),
        step("fuzz", Set::All, "fuzz targets with a fixed number of inputs, more than in `unit`", fuzz),
        step(
            "schemathesis",
            Set::All,
            "storage-infra's API against its OpenAPI document (schemathesis)",
            Work::Schemathesis,
        ),
        step("ceph", Set::All, "storage-infra with a real Ceph cluster and VMs", Work::Ceph { args: ceph }),
        step("model", Set::All, "the model of the attach protocol, with more states than in `unit`", model),
    ]
}

fn step(name: &str, set: Set, description: &str, work: Work) -> Step {
    Step { name: name.to_owned(), description: description.to_owned(), set, work }
}

fn blackbox(selection: Vec<String>, soak_minutes: Option<u64>) -> Work {
    blackbox_in(Kind::Processes, selection, soak_minutes)
}

fn blackbox_in(lab: Kind, selection: Vec<String>, soak_minutes: Option<u64>) -> Work {
    Work::BlackBox { selection, soak_minutes, lab }
}

/// The selected steps and the ones that they require, in order.
pub(super) fn select(mut steps: Vec<Step>, choice: Choice<'_>) -> Result<Vec<Step>> {
    match choice {
        Choice::Set(set) => {
            steps.retain(|step| step.set <= set);
            // The long soak test replaces the short one.
            steps.retain(|step| step.name != "soak" || set < Set::All);
            if set < Set::All {
                steps.iter_mut().for_each(leave_out_long_tests);
            }
        }
        Choice::Filter(filter) => {
            steps.retain(|step| step.set == Set::Quick);
            let description = format!("black-box tests whose names contain {filter:?}");
            steps.push(step(filter, Set::Normal, &description, blackbox(vec![filter.to_owned()], None)));
        }
        Choice::Only(names) => {
            check_names(&steps, names)?;
            let is_chosen = |step: &Step| names.contains(&step.name);
            let needs_build =
                steps.iter().any(|step| is_chosen(step) && matches!(step.work, Work::BlackBox { .. }));
            steps.retain(|step| is_chosen(step) || needs_build && step.name == BLACKBOX_BUILD);
        }
    }
    Ok(steps)
}

fn leave_out_long_tests(step: &mut Step) {
    if let Work::BlackBox { selection, .. } = &mut step.work {
        selection.extend(without_long_tests(&step.name));
    }
}

fn check_names(steps: &[Step], names: &[String]) -> Result<()> {
    let unknown: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|name| !steps.iter().any(|step| step.name == **name))
        .collect();
    if !unknown.is_empty() {
        bail!("no step {}; `cargo lab test --list` shows the steps", unknown.join(", "));
    }
    Ok(())
}

/// Steps in groups: consecutive light steps run side by side, each other step runs alone.
pub(super) fn groups(steps: Vec<Step>) -> Vec<Vec<Step>> {
    let mut groups: Vec<Vec<Step>> = Vec::new();
    for step in steps {
        match groups.last_mut() {
            Some(group) if step.work.is_light() && group[0].work.is_light() => group.push(step),
            _ => groups.push(vec![step]),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::verify::capabilities::capabilities;

    fn steps() -> Vec<Step> {
        all(&["attach", "soak"].map(str::to_owned))
    }

    fn names(steps: &[Step]) -> Vec<&str> {
        steps.iter().map(|step| step.name.as_str()).collect()
    }

    fn chosen(choice: Choice<'_>) -> Vec<String> {
        select(steps(), choice).unwrap().into_iter().map(|step| step.name).collect()
    }

    fn only(names: &[&str]) -> Result<Vec<Step>> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        select(steps(), Choice::Only(&names))
    }

    #[test]
    fn names_are_unique_also_among_the_capabilities() {
        let steps = all(&capabilities().unwrap());
        let unique: BTreeSet<&str> = names(&steps).into_iter().collect();
        assert_eq!(unique.len(), steps.len());
        assert!(steps.iter().all(|step| !step.name.contains(',')));
    }

    #[test]
    fn steps_with_a_lab_run_after_all_others() {
        let first = steps().iter().position(|step| step.work.lab().is_some()).unwrap();
        assert!(steps()[first..].iter().all(|step| step.work.lab().is_some()));
        let expected = [
            "sanity-guest",
            "sanity-mgmt",
            "attach",
            "soak",
            "long-soak",
            "rbd",
            "rbd-volumes",
            "upgrade",
            "deployed",
            "capi",
            "infra_ha",
            "hosts",
            "kubevirt",
            "kubevirt-volumes",
        ];
        assert_eq!(
            names(&steps()[first..]),
            [&expected[..], &["kubernetes-1.35", "kubernetes-1.37"]].concat()
        );
    }

    #[test]
    fn each_set_contains_the_smaller_ones() {
        let quick = chosen(Choice::Set(Set::Quick));
        let normal = chosen(Choice::Set(Set::Normal));
        let all = chosen(Choice::Set(Set::All));
        assert!(quick.iter().all(|name| normal.contains(name)));
        assert!(normal.iter().all(|name| all.contains(name) || name == "soak"));
        let of_all: Vec<&String> = all.iter().filter(|name| !normal.contains(name)).collect();
        assert_eq!(
            of_all,
            [
                "machete",
                "deny",
                "spelling",
                "book",
                "doc",
                "simulation-all",
                "infra-crash",
                "fuzz",
                "schemathesis",
                "ceph",
                "model",
                "long-soak",
                "rbd",
                "rbd-volumes",
                "upgrade",
                "deployed",
                "capi",
                "infra_ha",
                "hosts",
                "kubevirt",
                "kubevirt-volumes",
                "kubernetes-1.35",
                "kubernetes-1.37",
            ]
        );
    }

    #[test]
    fn long_modules_run_only_in_the_largest_set() {
        let modules = LONG.into_iter().chain(["attach"]);
        let steps = all(&modules.map(str::to_owned).collect::<Vec<_>>());
        let normal = select(steps.clone(), Choice::Set(Set::Normal)).unwrap();
        assert!(LONG.iter().all(|module| !names(&normal).contains(module)));
        let all = select(steps, Choice::Set(Set::All)).unwrap();
        assert!(LONG.iter().all(|module| names(&all).contains(module)));
    }

    #[test]
    fn quick_steps_need_no_lab() {
        assert!(
            select(steps(), Choice::Set(Set::Quick)).unwrap().iter().all(|step| step.work.lab().is_none())
        );
    }

    #[test]
    fn a_filter_selects_the_quick_steps_and_one_run_of_the_black_box_tests() {
        let mut expected = chosen(Choice::Set(Set::Quick));
        expected.push("clone::".to_owned());
        assert_eq!(chosen(Choice::Filter("clone::")), expected);
    }

    #[test]
    fn only_selects_by_name_in_the_usual_order_with_what_is_required() {
        assert_eq!(names(&only(&["deny", "fmt", "deny"]).unwrap()), ["fmt", "deny"]);
        assert_eq!(names(&only(&["attach", "model"]).unwrap()), ["blackbox-build", "model", "attach"]);
        assert_eq!(names(&only(&["deployed"]).unwrap()), ["blackbox-build", "deployed"]);
        assert_eq!(names(&only(&["sanity-mgmt"]).unwrap()), ["sanity-mgmt"]);
    }

    #[test]
    fn unknown_names_are_refused() {
        let error = only(&["fmt", "nonsense", "more"]).unwrap_err().to_string();
        assert!(error.starts_with("no step nonsense, more;"), "{error}");
    }

    #[test]
    fn light_steps_run_side_by_side_and_others_alone() {
        let groups = groups(steps());
        assert_eq!(names(&groups[0]), ["fmt", "machete", "deny", "spelling", "book"]);
        assert!(groups[1..].iter().all(|group| group.len() == 1));
        assert_eq!(groups.concat(), steps());
    }
}
