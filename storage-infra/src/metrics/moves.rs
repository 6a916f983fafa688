//! Metrics of moves.

use infra_api::{MovePhase, VolumeId};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::catalog::MoveRow;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PhaseLabels {
    phase: &'static str,
}

/// All phases, so that each has a value.
const PHASES: [MovePhase; 5] =
    [MovePhase::Waiting, MovePhase::Copying, MovePhase::Mirroring, MovePhase::Switching, MovePhase::Removing];

/// Metrics of moves.
#[derive(Default)]
pub struct MoveMetrics {
    running: Family<PhaseLabels, Gauge>,
    left: Gauge,
    delayed: Gauge,
    undecided: Gauge,
    failures: Counter,
    completed: Counter,
}

impl MoveMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("moves", "Moves of volumes that are not complete, by phase", self.running.clone());
        let help = "Bytes that moves have still to copy";
        registry.register_with_unit("moves_left", help, Unit::Bytes, self.left.clone());
        let help = "Moves that wait for what their message says";
        registry.register("moves_delayed", help, self.delayed.clone());
        let help = "Moves that wait until an operator chooses between their two files";
        registry.register("moves_undecided", help, self.undecided.clone());
        let help = "Attempts to go on with a move that failed for a new reason";
        registry.register("move_failures", help, self.failures.clone());
        registry.register("moves_completed", "Moves that were completed", self.completed.clone());
    }

    pub(super) fn set(&self, rows: &[MoveRow], copied: impl Fn(&VolumeId) -> Option<u64>, undecided: usize) {
        for phase in PHASES {
            let count = rows.iter().filter(|row| row.phase == phase).count();
            self.running.get_or_create(&PhaseLabels { phase: phase.as_str() }).set(count as i64);
        }
        let to_copy = rows.iter().filter(|row| row.phase != MovePhase::Removing);
        let left = to_copy.map(|row| row.reserved.saturating_sub(copied(&row.volume).unwrap_or(0)));
        self.left.set(left.sum::<u64>().cast_signed());
        self.undecided.set(undecided as i64);
        self.delayed.set(rows.iter().filter(|row| row.message.is_some()).count() as i64);
    }

    pub(super) fn failed(&self) {
        self.failures.inc();
    }

    pub(super) fn completed(&self) {
        self.completed.inc();
    }
}
