//! `bundle`: a support bundle of the objects, events and logs that belong to Nestor. Secrets are never read, and
//! credentials are removed from everything else.

mod archive;
pub(crate) mod redact;
mod sources;

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde_json::Value;

use crate::cli::BundleArgs;
use crate::clusters::{Cluster, Clusters};
use crate::error::Error;
use crate::render::print;
use archive::Archive;
use sources::{Logs, Source};

/// Writes a bundle and lists its files. Returns true: an object that cannot be read is noted in the bundle.
pub async fn run(clusters: &Clusters, args: &BundleArgs) -> Result<bool, Error> {
    let path = args.file.clone().unwrap_or_else(default_path);
    let mut archive = Archive::default();
    for cluster in clusters.each() {
        collect(cluster, args.log_lines, &mut archive).await?;
    }
    archive.add("README.txt", readme(clusters).into_bytes());
    write(&path, &archive)?;
    print(&format!("{}{} files in {}\n", archive.listing(), archive.len(), path.display()))?;
    Ok(true)
}

fn default_path() -> PathBuf {
    PathBuf::from(format!("nestor-bundle-{}.tar.gz", Timestamp::now().strftime("%Y%m%d-%H%M%S")))
}

fn write(path: &Path, archive: &Archive) -> Result<(), Error> {
    let bytes = archive.encode().map_err(|error| Error::Write("the bundle".to_owned(), error))?;
    std::fs::write(path, bytes).map_err(|error| Error::Write(path.display().to_string(), error))
}

/// What is in the bundle, and what is not.
fn readme(clusters: &Clusters) -> String {
    let read =
        clusters.each().map(|cluster| format!("{} (namespace {})", cluster.tier.name(), cluster.namespace));
    format!(
        "Support bundle of kubectl-nestor {} at {}.\nClusters: {}.\nSecrets were not read. Removed: managedFields, the annotation \
         kubectl.kubernetes.io/last-applied-configuration, and the values of fields and flags that hold tokens, passwords, \
         keys, certificates or kubeconfigs.\n",
        env!("CARGO_PKG_VERSION"),
        Timestamp::now(),
        read.collect::<Vec<_>>().join(", ")
    )
}

/// Objects, events and logs of one cluster.
async fn collect(cluster: &Cluster, log_lines: i64, archive: &mut Archive) -> Result<(), Error> {
    for source in Source::all(cluster).await {
        let name = format!("{}/{}.json", cluster.tier.name(), source.name);
        match source.read(cluster).await? {
            Ok(items) => archive.add(&name, encode(redact::items(items))?),
            Err(reason) => archive.add(&format!("{name}.error.txt"), reason.into_bytes()),
        }
    }
    for Logs { pod, container, text } in sources::logs(cluster, log_lines).await? {
        let name = format!("{}/logs/{pod}/{container}.log", cluster.tier.name());
        archive.add(&name, redact::log(&text).into_bytes());
    }
    Ok(())
}

fn encode(items: Vec<Value>) -> Result<Vec<u8>, Error> {
    serde_json::to_vec_pretty(&Value::Array(items)).map_err(|error| Error::Encode(error.to_string()))
}
