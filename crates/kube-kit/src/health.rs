//! Health checks: named checks that pass, or fail with a reason.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use process_kit::health::report;

use crate::relist::Informers;

/// All checks of a probe endpoint.
#[derive(Debug, Clone, Default)]
pub struct Health {
    checks: Arc<RwLock<BTreeMap<String, Option<String>>>>,
    informers: Informers,
}

/// A named check of a [`Health`].
#[derive(Debug, Clone)]
pub struct Check {
    health: Health,
    name: String,
}

impl Health {
    /// Adds a check that fails with `reason` until it passes.
    pub fn check(&self, name: impl Into<String>, reason: impl Into<String>) -> Check {
        let check = Check { health: self.clone(), name: name.into() };
        check.fail(reason);
        check
    }

    /// Failing checks: name and reason.
    pub fn failing(&self) -> Vec<(String, String)> {
        let checks = self.checks.read().unwrap_or_else(PoisonError::into_inner);
        checks.iter().filter_map(|(name, reason)| Some((name.clone(), reason.clone()?))).collect()
    }

    /// One line per check, as shown by `/healthz` and `/readyz`.
    pub fn report(&self) -> String {
        let checks = self.checks.read().unwrap_or_else(PoisonError::into_inner);
        report(checks.iter().map(|(name, reason)| (name.as_str(), reason.as_deref())))
    }

    /// Informers whose watches are among the checks.
    pub(crate) fn informers(&self) -> &Informers {
        &self.informers
    }

    fn set(&self, name: &str, reason: Option<String>) {
        self.checks.write().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), reason);
    }
}

impl Check {
    /// Informers of the process.
    pub(crate) fn informers(&self) -> &Informers {
        &self.health.informers
    }

    /// Marks the check as passing.
    pub fn pass(&self) {
        self.health.set(&self.name, None);
    }

    /// Marks the check as failing, with the reason.
    pub fn fail(&self, reason: impl Into<String>) {
        self.health.set(&self.name, Some(reason.into()));
    }
}
