//! Parameters of guest classes: only the name of the management class.

use std::collections::HashMap;

use csi::Status;

/// Prefix of the keys that the sidecars add to the parameters.
pub(super) const EXTRA_PREFIX: &str = "csi.storage.k8s.io/";

/// The management class that a guest class of this kind names in the parameter `known`. Unknown parameters are refused,
/// because they would have no effect.
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
            "unknown {kind} parameter {}: the guest's class accepts only {known}",
            unknown.join(", ")
        )));
    }
    parameters.get(known).map(String::as_str).filter(|class| !class.is_empty()).ok_or_else(|| {
        Status::invalid_argument(format!(
            "{kind} parameter {known} is missing: set it to the name of a {kind} of the management cluster"
        ))
    })
}

/// The value that a sidecar added under this key.
pub(super) fn extra(parameters: &HashMap<String, String>, key: &str) -> Option<String> {
    parameters.get(&format!("{EXTRA_PREFIX}{key}")).cloned()
}
