//! Labels of objects.

use std::collections::BTreeMap;

/// Labels of a pool, volume or node.
pub type Labels = BTreeMap<String, String>;
