//! What a class in the guest says: the class of the management cluster that it stands for, and nothing else.

use std::collections::HashMap;

use csi::Status;

/// Keys that the sidecars add to the parameters of a class.
pub(super) const EXTRA_PREFIX: &str = "csi.storage.k8s.io/";

/// The management class that a guest's class of this kind names under `known`. Anything that is not understood is
/// refused, since it would be silently without effect.
pub(super) fn management_class<'a>(
    kind: &str,
    known: &str,
    parameters: &'a HashMap<String, String>,
) -> Result<&'a str, Status> {
    let mut unknown: Vec<&str> = parameters
        .keys()
        .map(String::as_str)
        .filter(|key| *key != known && !key.starts_with(EXTRA_PREFIX))
        .collect();
    unknown.sort_unstable();
    if !unknown.is_empty() {
        return Err(Status::invalid_argument(format!(
            "{kind} parameter {} is not known: the guest's class takes {known} only",
            unknown.join(", ")
        )));
    }
    parameters.get(known).map(String::as_str).filter(|class| !class.is_empty()).ok_or_else(|| {
        Status::invalid_argument(format!(
            "{kind} parameter {known} is missing: name the management cluster's {kind} in it"
        ))
    })
}

/// What a sidecar added to the parameters under this key.
pub(super) fn extra(parameters: &HashMap<String, String>, key: &str) -> Option<String> {
    parameters.get(&format!("{EXTRA_PREFIX}{key}")).cloned()
}
