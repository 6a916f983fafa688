//! Documentation: the commands of the pages work, and the page of the flags shows what the programs print.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use tests::docs::{Block, Directive, Page, Terminal, pages};
use tests::run;

/// The pages whose commands are run.
const RUN: [&str; 14] = [
    "docs/tutorial.md",
    "docs/guides/budgets.md",
    "docs/guides/expansion.md",
    "docs/guides/export-and-adopt.md",
    "docs/guides/guest-deletion.md",
    "docs/guides/quality-of-service.md",
    "docs/guides/reclaim-policy.md",
    "docs/guides/repair.md",
    "docs/guides/restore-the-management-cluster.md",
    "docs/guides/snapshots.md",
    "docs/guides/static-volumes.md",
    "docs/guides/suspend.md",
    "docs/guides/troubleshooting.md",
    "docs/guides/uninstall.md",
];

/// Pages with commands that are not run, and why.
const NOT_RUN: [(&str, &str); 25] = [
    ("CONTRIBUTING.md", "fuzzes for an hour, and fetches the list of advisories"),
    ("README.md", "starts labs of its own"),
    ("docs/decisions/fuzzing.md", "fuzzes for an hour"),
    ("docs/explanation/crash-safety.md", "lists tests, each of which is a step of its own"),
    ("docs/guides/ceph.md", "presupposes a Ceph cluster; the step ceph of `cargo lab test --all` starts one"),
    ("docs/guides/certificates.md", "replaces credentials that other tests use"),
    ("docs/guides/cluster-api.md", "needs Cluster API; the module capi has it"),
    ("docs/guides/console.md", "presupposes the chart in pods; the module console runs the program"),
    (
        "docs/guides/guest-credentials.md",
        "revokes credentials that other tests use; the module credentials does that",
    ),
    ("docs/guides/hosts.md", "needs two hosts; the module hosts has them"),
    ("docs/guides/install.md", "installs into empty clusters; `cargo lab demo --deployed` does that"),
    ("docs/guides/kubevirt.md", "needs KubeVirt; the module kubevirt has it"),
    (
        "docs/guides/kubevirt-migration.md",
        "presupposes kubevirt-csi; the module migrate_kubevirt writes what it leaves",
    ),
    ("docs/guides/legacy-driver.md", "shows flags, not commands"),
    (
        "docs/guides/pools.md",
        "formats disks; the module pools, and storage-infra's own tests, run the commands",
    ),
    ("docs/guides/machines.md", "registers a VM by hand; the module machines does what mgmt-csi does"),
    (
        "docs/guides/management-pods.md",
        "presupposes the chart in pods; the module mgmt_pods has a host as node",
    ),
    ("docs/guides/moves.md", "needs two pools of its own; the module move_volume has them"),
    ("docs/guides/onboarding.md", "needs the charts in pods; the module onboarding adds and removes guests"),
    ("docs/guides/recover-the-infra.md", "presupposes a lost catalog; the tests of storage-infra have one"),
    ("docs/guides/runbooks/alerts.md", "presupposes a fault and pods; the module alerts causes the faults"),
    ("docs/guides/sharing.md", "presupposes two guests with a namespace each; the module sharing has them"),
    ("docs/guides/topology.md", "adds a pool in a zone; the module topology does that"),
    ("docs/guides/tracing.md", "presupposes a collector; the module otel starts one"),
    ("docs/guides/upgrade.md", "presupposes two versions in pods; the module upgrade has them"),
];

/// Reference pages describe commands; examples there are of a broken installation or of a release.
const REFERENCE: &str = "docs/reference/";

fn is_command(block: &Block) -> bool {
    let is_hidden = matches!(block.directive, Some(Directive::Run | Directive::Cleanup));
    !is_hidden && ["sh", "console"].contains(&block.language.as_str())
}

#[test]
fn every_command_is_run_or_there_is_a_reason_why_not() -> Result<()> {
    let reasons: BTreeMap<&str, &str> = NOT_RUN.into();
    for page in pages()?.iter().filter(|page| !page.path.starts_with(REFERENCE)) {
        let commands: Vec<&Block> = page.blocks.iter().filter(|block| is_command(block)).collect();
        let is_run = RUN.contains(&page.path.as_str());
        let known = is_run || commands.is_empty() || reasons.contains_key(page.path.as_str());
        ensure!(known, "{} has commands: add it to RUN, or to NOT_RUN with a reason", page.path);
        for block in commands {
            let Some(Directive::NoRun(reason)) = &block.directive else { continue };
            ensure!(!reason.is_empty(), "{}:{}: no reason", page.path, block.line);
            println!("{}:{}: not run: {reason}", page.path, block.line);
        }
    }
    for (path, _) in NOT_RUN {
        let page = Page::read(path)?;
        ensure!(page.blocks.iter().any(is_command), "{path} has no commands: remove it from NOT_RUN");
    }
    Ok(())
}

async fn works(page: &'static str) -> Result<()> {
    assert!(RUN.contains(&page), "{page}");
    run(move |s| async move {
        let page = Page::read(page)?;
        let expected = page.blocks.iter().filter(|block| is_command(block));
        let expected = expected.filter(|block| !matches!(block.directive, Some(Directive::NoRun(_)))).count();
        let ran = Terminal::open(&s)?.run(&page).await?;
        ensure!(expected > 0 && ran >= expected, "{}: {ran} of {expected} blocks were run", page.path);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_tutorial_works() -> Result<()> {
    works("docs/tutorial.md").await
}

#[tokio::test]
async fn the_guide_to_budgets_works() -> Result<()> {
    works("docs/guides/budgets.md").await
}

#[tokio::test]
async fn the_guide_to_expansion_works() -> Result<()> {
    works("docs/guides/expansion.md").await
}

#[tokio::test]
async fn the_guide_to_exports_and_adoptions_works() -> Result<()> {
    works("docs/guides/export-and-adopt.md").await
}

#[tokio::test]
async fn the_guide_to_quality_of_service_works() -> Result<()> {
    works("docs/guides/quality-of-service.md").await
}

#[tokio::test]
async fn the_guide_to_reclaim_policy_works() -> Result<()> {
    works("docs/guides/reclaim-policy.md").await
}

#[tokio::test]
async fn the_guide_to_repair_works() -> Result<()> {
    works("docs/guides/repair.md").await
}

#[tokio::test]
async fn the_guide_to_snapshots_works() -> Result<()> {
    works("docs/guides/snapshots.md").await
}

#[tokio::test]
async fn the_guide_to_static_volumes_works() -> Result<()> {
    works("docs/guides/static-volumes.md").await
}

#[tokio::test]
async fn the_guide_to_suspensions_works() -> Result<()> {
    works("docs/guides/suspend.md").await
}

#[tokio::test]
async fn the_guide_to_troubleshooting_works() -> Result<()> {
    works("docs/guides/troubleshooting.md").await
}

#[tokio::test]
async fn the_commands_that_list_objects_work() -> Result<()> {
    works("docs/guides/guest-deletion.md").await?;
    works("docs/guides/restore-the-management-cluster.md").await?;
    works("docs/guides/uninstall.md").await
}

#[tokio::test]
async fn the_page_of_the_flags_is_what_the_programs_print() -> Result<()> {
    run(|s| async move { lab::generate::flags(&s.lab.state().binaries).await?.check() }).await
}
