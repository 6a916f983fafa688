//! The server: routes, and what a page is made from.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Query, State};
use axum::http::header::CONTENT_TYPE;
use axum::middleware;
use axum::response::{Html, IntoResponse};
use axum::routing::get;
use jiff::{SignedDuration, Timestamp};
use kube_kit::health::Health;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use super::guard::{Hosts, guard};
use super::page::{self, Model};
use super::query::{Parameters, View};
use super::stream;
use crate::feed::EventRow;
use crate::overview::{Clock, Inputs, Overview, Warnings};
use crate::pools::Pools;
use crate::watches::Watches;

/// Maximum number of streams at once.
const MAX_STREAMS: usize = 64;

/// What the pages are made from.
#[derive(Debug)]
pub struct Site {
    /// The watched objects.
    pub watches: Watches,
    /// Whether each source is current.
    pub sources: Health,
    /// The pools, with a connection to the storage infra.
    pub pools: Option<watch::Receiver<Pools>>,
    /// Longest wait that is not late.
    pub late_after: SignedDuration,
    /// Ends the streams.
    pub stop: CancellationToken,
    /// Streams that may still be opened.
    pub(super) streams: Arc<Semaphore>,
}

impl Site {
    /// A site without open streams.
    pub fn new(
        watches: Watches,
        sources: Health,
        pools: Option<watch::Receiver<Pools>>,
        late_after: SignedDuration,
        stop: CancellationToken,
    ) -> Self {
        Self { watches, sources, pools, late_after, stop, streams: Arc::new(Semaphore::new(MAX_STREAMS)) }
    }

    fn model(&self, view: View) -> Model {
        // Before the events are read: the stream repeats what follows.
        let last = self.watches.feed.last();
        let clock = Clock { now: Timestamp::now(), late_after: self.late_after };
        let events = self.events();
        let inputs = self.inputs(Warnings::of(events.iter().cloned()));
        Model {
            overview: Overview::of(&inputs, clock),
            pools: self.pools.as_ref().map(|pools| pools.borrow().clone()),
            events,
            last,
            stale: self.sources.failing(),
            clock,
            view,
        }
    }

    fn inputs(&self, warnings: Warnings) -> Inputs {
        Inputs {
            vms: self.watches.vms(),
            attachments: self.watches.attachments.list(),
            claims: self.watches.claims.list(),
            volumes: self.watches.volumes.list(),
            warnings,
            first_seen: self.watches.first_seen.clone(),
        }
    }

    /// All Events, newest first.
    fn events(&self) -> Vec<EventRow> {
        let all = self.watches.events.iter().flat_map(kube_kit::informer::Informer::list);
        let mut rows: Vec<EventRow> = all.filter_map(|event| EventRow::of(&event)).collect();
        rows.sort_by(|a, b| (b.time, &b.uid).cmp(&(a.time, &a.uid)));
        rows
    }
}

/// Serves the page until the site stops.
pub async fn serve(address: SocketAddr, hosts: Hosts, site: Site) -> std::io::Result<()> {
    let stop = site.stop.clone();
    let listener = tokio::net::TcpListener::bind(address).await?;
    tracing::info!(%address, "serving the page");
    axum::serve(listener, router(hosts, site)).with_graceful_shutdown(stop.cancelled_owned()).await
}

fn router(hosts: Hosts, site: Site) -> Router {
    Router::new()
        .route("/", get(overview))
        .route("/events", get(stream::events))
        .route("/console.css", get(|| file("text/css", include_str!("../../assets/console.css"))))
        .route("/console.js", get(|| file("text/javascript", include_str!("../../assets/console.js"))))
        .route("/icon.svg", get(|| file("image/svg+xml", include_str!("../../assets/icon.svg"))))
        .with_state(Arc::new(site))
        .layer(middleware::from_fn_with_state(hosts, guard))
}

async fn overview(State(site): State<Arc<Site>>, Query(parameters): Query<Parameters>) -> Html<String> {
    Html(page::render(&site.model(parameters.into())).into_string())
}

async fn file(content_type: &'static str, text: &'static str) -> impl IntoResponse {
    ([(CONTENT_TYPE, content_type)], text)
}
