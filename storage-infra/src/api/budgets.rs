//! Request handlers of budgets.

use axum::Json;
use axum::http::StatusCode;
use axum::response::Response;
use infra_api::{Account, Budget, BudgetSpec, List, Problem};

use super::extract::{Body, Id};
use super::handlers::{all, created_or_ok};
use super::view::Everything;
use crate::service::Result;

/// Sets the limits of an account. They apply to later requests: nothing is removed if the account is beyond them.
#[utoipa::path(put, path = "/v1/budgets/{account}", tag = "Budgets", request_body = BudgetSpec, params(("account" = Account, Path)), responses(
    (status = 201, description = "Set", body = Budget), (status = 200, description = "The account had a budget; replaced", body = Budget),
    (status = 400, description = "`invalid`: the name of a class is too long", body = Problem),
    (status = 404, description = "`not-found`: the path has no account", body = Problem),
))]
pub(super) async fn put_budget(
    Everything(app): Everything,
    Id(account): Id<Account>,
    Body(limits): Body<BudgetSpec>,
) -> Result<Response> {
    app.service.budgets().put(account, limits).await.map(created_or_ok)
}

/// Lists all accounts that have a budget or use space.
#[utoipa::path(get, path = "/v1/budgets", tag = "Budgets", responses((status = 200, body = List<Budget>)))]
pub(super) async fn list_budgets(Everything(app): Everything) -> Result<Json<List<Budget>>> {
    app.service.budgets().list().await.map(all)
}

/// Gets the limits of an account, if it has a budget, and what it uses.
#[utoipa::path(get, path = "/v1/budgets/{account}", tag = "Budgets", params(("account" = Account, Path)), responses(
    (status = 200, body = Budget), (status = 404, description = "`not-found`: the path has no account", body = Problem),
))]
pub(super) async fn get_budget(
    Everything(app): Everything,
    Id(account): Id<Account>,
) -> Result<Json<Budget>> {
    app.service.budgets().get(account).await.map(Json)
}

/// Removes the limits of an account. Its objects remain.
#[utoipa::path(delete, path = "/v1/budgets/{account}", tag = "Budgets", params(("account" = Account, Path)), responses(
    (status = 204, description = "Removed, or did not exist"),
    (status = 404, description = "`not-found`: the path has no account", body = Problem),
))]
pub(super) async fn delete_budget(
    Everything(app): Everything,
    Id(account): Id<Account>,
) -> Result<StatusCode> {
    app.service.budgets().delete(account).await.map(|_| StatusCode::NO_CONTENT)
}
