//! `check`: checks of the installation in each connected cluster. Each finding says what, why and what to do.

mod classes;
mod clock;
mod credentials;
mod definitions;
mod drivers;
mod finding;
mod guests;
mod holders;
mod rights;
mod sidecars;

use futures::future::try_join_all;

use crate::cli::Format;
use crate::clusters::{Cluster, Clusters, Tier};
use crate::error::Error;
use crate::render::{format, has_colour, print};
use finding::{Finding, Level, text};

/// Runs all checks. Returns whether no finding is an error.
pub async fn run(clusters: &Clusters, output: Format) -> Result<bool, Error> {
    let mut findings = try_join_all(clusters.each().map(of_cluster)).await?.concat();
    findings.extend(classes::check(clusters).await?);
    findings.extend(missing(clusters));
    print(&format(output, &findings, |_| text(&findings, has_colour()))?)?;
    Ok(findings.iter().all(|finding| finding.level != Level::Error))
}

/// The checks of one cluster.
async fn of_cluster(cluster: &Cluster) -> Result<Vec<Finding>, Error> {
    let mut findings = credentials::check(cluster);
    findings.push(clock::check(cluster).await?);
    findings.extend(rights::check(cluster).await?);
    if cluster.tier == Tier::Management {
        findings.extend(definitions::check(cluster).await?);
        findings.extend(guests::check(cluster).await?);
        findings.extend(holders::check(cluster).await?);
    }
    findings.extend(drivers::check(cluster).await?);
    findings.extend(sidecars::check(cluster).await?);
    Ok(findings)
}

/// A line for each cluster that is not connected.
fn missing(clusters: &Clusters) -> Vec<Finding> {
    let tiers = [(Tier::Guest, clusters.guest.is_none()), (Tier::Management, clusters.management.is_none())];
    let absent = tiers.into_iter().filter(|(_, is_absent)| *is_absent);
    absent
        .map(|(tier, _)| {
            Finding::skipped(tier, "cluster")
                .because("not connected")
                .next(format!("set --{0}-kubeconfig or --{0}-context to check it", tier.name()))
        })
        .collect()
}
