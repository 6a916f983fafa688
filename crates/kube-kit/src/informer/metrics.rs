//! Metrics of the watches of this process, by the objects they watch.

use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use tokio::time::Instant;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    watch: String,
}

/// Global, because informers are created in many places.
static ALL: LazyLock<Families> = LazyLock::new(Families::default);

#[derive(Default)]
struct Families {
    ages: Family<Labels, Gauge>,
    connected: Family<Labels, Gauge>,
    relists: Family<Labels, Counter>,
    heard: Mutex<Vec<(Labels, Heard)>>,
}

/// When a watch last heard from its server; None before that.
type Heard = Arc<Mutex<Option<Instant>>>;

/// Registers the metrics of all informers of this process.
pub(crate) fn register(registry: &mut Registry) {
    let help = "Time since the last event, bookmark or list of a watch";
    registry.register_with_unit("watch_age", help, Unit::Seconds, ALL.ages.clone());
    registry.register("watch_connected", "1 while a watch is established, else 0", ALL.connected.clone());
    let help = "Complete lists of the watched objects after the first one";
    registry.register("watch_relists", help, ALL.relists.clone());
}

/// Updates the ages, before they are served.
pub(crate) fn refresh() {
    for (labels, heard) in &*ALL.heard.lock().unwrap_or_else(PoisonError::into_inner) {
        if let Some(heard) = *heard.lock().unwrap_or_else(PoisonError::into_inner) {
            let age = i64::try_from(heard.elapsed().as_secs()).unwrap_or(i64::MAX);
            ALL.ages.get_or_create(labels).set(age);
        }
    }
}

/// Metrics of one watch.
#[derive(Debug)]
pub(super) struct WatchMetrics {
    connected: Gauge,
    relists: Counter,
    heard: Heard,
}

impl WatchMetrics {
    /// `what` names the watched objects.
    pub(super) fn of(what: &str) -> Self {
        let (labels, heard) = (Labels { watch: what.to_owned() }, Heard::default());
        let metrics = Self {
            connected: ALL.connected.get_or_create_owned(&labels),
            relists: ALL.relists.get_or_create_owned(&labels),
            heard: heard.clone(),
        };
        ALL.heard.lock().unwrap_or_else(PoisonError::into_inner).push((labels, heard));
        metrics
    }

    /// Records an event or a bookmark.
    pub(super) fn heard(&self) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Records a complete list.
    pub(super) fn listed(&self, is_first: bool) {
        self.heard();
        if !is_first {
            self.relists.inc();
        }
    }

    pub(super) fn set_connected(&self, connected: bool) {
        self.connected.set(connected.into());
    }
}
