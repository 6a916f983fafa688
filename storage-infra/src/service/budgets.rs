//! Budgets: limits of the space and the number of objects per account. A request is checked in the transaction that
//! reserves its space.

use std::sync::Arc;

use infra_api::{Account, Budget, BudgetSpec, ObjectKind, Owner, Problem, ProblemCode};

use super::core::Core;
use super::problems::{Failure, Result};
use crate::budget::{self, Demand};
use crate::catalog::Tx;

/// What to do about a refusal.
const ADVICE: &str = "snapshots and volumes that are kept after their claim's deletion count too; delete some, or ask the \
                      platform team to raise the budget";

/// The budgets.
pub struct Budgets {
    core: Arc<Core>,
}

impl Budgets {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self { core }
    }

    /// Sets the limits of an account. True if it had none.
    pub async fn put(&self, account: Account, limits: BudgetSpec) -> Result<(Budget, bool)> {
        if account.is_nobody() {
            return Err(Failure::new(ProblemCode::Invalid, "a budget needs the name of an account"));
        }
        limits.check_bounds().map_err(|what| Problem::from(what).about(ObjectKind::Account, &account))?;
        let set = move |tx: &Tx<'_>| -> Result<_> {
            let is_new = tx.budget(&account)?.is_none();
            tx.put_budget(&account, &limits)?;
            Ok((Budget { used: tx.usage(&account)?, limits: Some(limits), account }, is_new))
        };
        self.core.catalog().run(set).await
    }

    /// The limits of an account, if it has a budget, and what it uses.
    pub async fn get(&self, account: Account) -> Result<Budget> {
        let read = move |tx: &Tx<'_>| -> Result<_> {
            Ok(Budget { limits: tx.budget(&account)?, used: tx.usage(&account)?, account })
        };
        self.core.catalog().read(read).await
    }

    /// All accounts that have a budget or use space.
    pub async fn list(&self) -> Result<Vec<Budget>> {
        self.core.catalog().read(|tx| -> Result<_> { list(tx) }).await
    }

    /// Removes the limits of an account. False if it had none.
    pub async fn delete(&self, account: Account) -> Result<bool> {
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.delete_budget(&account)?) }).await
    }

    /// Updates the metrics.
    pub async fn measure(&self) -> Result<()> {
        self.core.metrics().accounts().set(&self.list().await?);
        Ok(())
    }
}

fn list(tx: &Tx<'_>) -> Result<Vec<Budget>> {
    let (mut limits, mut usages) = (tx.budgets()?, tx.usages()?);
    for account in limits.keys() {
        usages.entry(account.clone()).or_default();
    }
    let of = |(account, used)| Budget { limits: limits.remove(&account), used, account };
    Ok(usages.into_iter().map(of).collect())
}

/// Fails if the budget of the account does not allow a request for an object.
pub(super) fn refuse_over_budget(
    tx: &Tx<'_>,
    owner: &Owner,
    demand: &Demand,
    kind: ObjectKind,
    id: impl std::fmt::Display,
) -> Result<()> {
    if owner.account.is_nobody() {
        return Ok(());
    }
    let Some(limits) = tx.budget(&owner.account)? else { return Ok(()) };
    budget::check(&limits, &tx.usage(&owner.account)?, owner, demand).map_err(|excess| {
        let detail = format!("{kind} {id}: {excess}; {ADVICE}");
        Problem::new(ProblemCode::OverBudget, detail).about(kind, id).exceeds(excess).into()
    })
}
