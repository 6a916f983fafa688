//! Flags of the reconcilers.

use std::time::Duration;

use crds::names;
use process_kit::duration;

use super::lost_nodes::TaintPolicy;

/// Flags of the reconcilers.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// Key of a label to copy from guest PersistentVolumeClaims to their management claims and to keep in sync
    /// (repeatable).
    #[arg(long = "sync-label", value_name = "KEY", value_parser = label_key)]
    pub(crate) labels: Vec<String>,
    /// Record on each management claim which guest pods use it. Costs one write per change.
    #[arg(long)]
    pub(crate) sync_pods: bool,
    /// Grace period before a disk without a guest VolumeAttachment is detached, and before a management claim without a
    /// guest PersistentVolume is marked as orphaned.
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse)]
    pub(crate) repair_grace: Duration,
    /// Delete a management claim, with its data, when it has been orphaned for this long. Default: never.
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub(crate) remove_orphans_after: Option<Duration>,
    /// When to taint a guest Node that is not ready as out of service, so that Kubernetes moves its pods.
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = TaintPolicy::Proven)]
    pub(crate) out_of_service_taint: TaintPolicy,
}

/// Label domains that the management cluster interprets. A guest must not set them.
const RESERVED: [&str; 3] = ["nestor.dev", "kubernetes.io", "k8s.io"];

/// Parses the key of a label that guests may set.
fn label_key(text: &str) -> Result<String, String> {
    let (prefix, name) = match text.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, text),
    };
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let is_name = name.len() <= names::MAX_LABEL
        && edge(name.chars().next())
        && edge(name.chars().last())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    if !is_name || prefix.is_some_and(|prefix| !crate::management::is_object_name(prefix)) {
        return Err("not a label key: use a name of 1 to 63 letters, digits, '-', '_' or '.', \
                    optionally after a DNS name and '/'"
            .to_owned());
    }
    let within = |domain: &str| {
        prefix.is_some_and(|prefix| {
            prefix.strip_suffix(domain).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        })
    };
    match RESERVED.into_iter().find(|domain| within(domain)) {
        Some(domain) => Err(format!(
            "the management cluster interprets labels of {domain}: guests must not set them there"
        )),
        None => Ok(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_keys_of_reserved_domains_are_refused() {
        for good in ["team", "example.com/team", "my-k8s.io/x", "nestor.dev.example.com/x"] {
            assert!(label_key(good).is_ok(), "{good}");
        }
        for bad in [
            "nestor.dev/cluster-id",
            "share.nestor.dev/guest-1",
            "app.kubernetes.io/name",
            "kubernetes.io/x",
            "topology.k8s.io/x",
            "",
            "/x",
            "a/",
            "a b",
            "A_b/x",
            "a/b/c",
        ] {
            assert!(label_key(bad).is_err(), "{bad}");
        }
    }
}
