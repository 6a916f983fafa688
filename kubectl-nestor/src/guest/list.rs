//! `kubectl nestor guest list`.

use super::accounts;
use super::overview::{self, Budget, Guest, joined};
use crate::cli::Format;
use crate::clusters::Clusters;
use crate::error::Error;
use crate::lists::{List, Row, of_limit, or_dash, show};

const HEAD: [&str; 11] = [
    "NAME",
    "NAMESPACE",
    "CLUSTER-ID",
    "CLASSES",
    "BYTES",
    "CLAIMS",
    "VOLUMES",
    "VMS",
    "TOKEN-EXPIRES",
    "BUDGET",
    "MANAGED-BY",
];

impl Row for Guest {
    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            self.namespace.clone(),
            self.cluster_id.clone(),
            classes(self),
            or_dash(self.budget.as_ref().map(bytes)),
            self.claims.to_string(),
            self.volumes.to_string(),
            self.vms.len().to_string(),
            or_dash(self.token_expires.map(|time| time.to_string())),
            self.budget.as_ref().map_or_else(|| "(none)".to_owned(), |budget| budget.name.clone()),
            or_dash(self.managed_by.clone()),
        ]
    }
}

/// The classes that a guest may use.
pub(super) fn classes(guest: &Guest) -> String {
    match &guest.classes {
        None => "(no policy)".to_owned(),
        Some(classes) if classes.is_empty() => "(all)".to_owned(),
        Some(classes) => joined(classes),
    }
}

/// What is used of a budget, and its limit.
pub(super) fn bytes(budget: &Budget) -> String {
    of_limit(budget.used_bytes.as_ref(), budget.max_bytes.as_ref())
}

/// Runs `guest list`.
pub async fn run(clusters: &Clusters, output: Format) -> Result<(), Error> {
    let cluster = clusters.management_for("guest list")?;
    let accounts = accounts::list(cluster).await?;
    let guests = overview::guests(cluster, &accounts).await?;
    show(output, &List { head: &HEAD, narrow: 9, unseen: Vec::new() }, &guests)
}
