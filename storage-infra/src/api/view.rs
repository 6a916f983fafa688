//! What a handler reaches, by its extractor: everything, or what exists for the client. A handler has no other access to the
//! service, so none can forget the client's scope.

use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use infra_api::{Account, Health, List, ProblemCode, Snapshot, SnapshotId, SnapshotSpec, Volume, VolumeId};
use tokio_util::sync::CancellationToken;

use super::for_account::{ForAccount, without_others};
use crate::scope::{OutOfScope, Scope};
use crate::service::{Failure, Result, Service};

/// State of the handlers. Only the extractors of this module open it.
#[derive(Clone)]
pub(super) struct App(Parties);

/// The service, and what ends with it.
#[derive(Clone)]
pub(super) struct Parties {
    pub(super) service: Service,
    /// Cancelled at shutdown; ends the event streams.
    pub(super) stop: CancellationToken,
}

impl App {
    pub(super) fn new(service: Service, stop: CancellationToken) -> Self {
        Self(Parties { service, stop })
    }
}

/// What [`super::client::authorize`] decided about the request.
fn scope(parts: &Parts) -> Result<&Scope> {
    let missing =
        || Failure::new(ProblemCode::Internal, "nothing decided which objects exist for the client");
    parts.extensions.get().ok_or_else(missing)
}

/// The whole service. Clients of one account are refused, whatever their role allows.
pub(super) struct Everything(pub(super) Parties);

impl FromRequestParts<App> for Everything {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self> {
        match scope(parts)? {
            Scope::All => Ok(Self(app.0.clone())),
            Scope::Account(_, account) => Err(OutOfScope::AllAccounts(account.clone()).into()),
        }
    }
}

/// The volumes and snapshots that exist for the client, and the health of the server.
pub(super) struct View {
    scope: Scope,
    service: Service,
}

impl FromRequestParts<App> for View {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self> {
        Ok(Self { scope: scope(parts)?.clone(), service: app.0.service.clone() })
    }
}

impl View {
    pub(super) async fn volume(&self, id: &VolumeId) -> Result<Volume> {
        self.show(self.service.volumes().get(&self.scope, id).await)
    }

    pub(super) async fn volumes(&self, limit: Option<usize>, after: String) -> Result<List<Volume>> {
        self.show(self.service.volumes().list(&self.scope, limit, after).await)
    }

    pub(super) async fn snapshot(&self, id: &SnapshotId) -> Result<Snapshot> {
        self.show(self.service.snapshots().get(&self.scope, id).await)
    }

    pub(super) async fn snapshots(
        &self,
        volume: Option<VolumeId>,
        limit: Option<usize>,
        after: String,
    ) -> Result<List<Snapshot>> {
        self.show(self.service.snapshots().list(&self.scope, volume, limit, after).await)
    }

    /// The snapshot, and whether it is new.
    pub(super) async fn put_snapshot(
        &self,
        id: SnapshotId,
        spec: SnapshotSpec,
        wait: Duration,
    ) -> Result<(Snapshot, bool)> {
        self.show(self.service.snapshots().put(&self.scope, id, spec, wait).await)
    }

    pub(super) async fn delete_snapshot(&self, id: SnapshotId) -> Result<()> {
        self.show(self.service.snapshots().delete(&self.scope, id).await.map(drop))
    }

    pub(super) async fn health(&self) -> Result<Health> {
        self.show(self.service.health().check().await)
    }

    /// An outcome as the client may see it.
    fn show<T: ForAccount>(&self, outcome: Result<T>) -> Result<T> {
        match &self.scope {
            Scope::All => outcome,
            Scope::Account(_, account) => {
                outcome.map(T::for_account).map_err(|failure| show_failure(account, failure))
            }
        }
    }
}

/// A failure as a client of this account may see it. The log has what the answer does not say.
fn show_failure(account: &Account, failure: Failure) -> Failure {
    let shown = Failure::from(without_others(*failure.0.clone()));
    if shown.0 != failure.0 {
        tracing::info!(%account, code = %failure.code(), cause = %failure, "the answer says less than is known");
    }
    shown
}
