//! Kubernetes' recommended labels on the objects that Nestor's programs create.

use std::collections::BTreeMap;

/// Label: the application that an object belongs to.
const PART_OF: (&str, &str) = ("app.kubernetes.io/part-of", "nestor");
/// Label: the program that manages an object.
const MANAGED_BY: &str = "app.kubernetes.io/managed-by";

/// The labels of an object that `program` creates and manages.
pub fn managed_by(program: &str) -> BTreeMap<String, String> {
    [PART_OF, (MANAGED_BY, program)].map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}
