//! One object's round: it has the owner with which it is to be deleted, or none.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use kube_kit::queue::{Next, Queue};
use prometheus_client::metrics::gauge::Gauge;

use crate::management::{Fate, Made, Management};

/// Keeps owners as the policy of guest deletion wants them.
pub(super) struct Owned {
    management: Management,
    queue: Queue<Made>,
    outliving: Mutex<HashSet<Made>>,
    outliving_count: Gauge,
}

impl Owned {
    /// `outliving_count` is kept at the number of objects that stay, though the policy is to delete them.
    pub(super) fn new(management: Management, queue: Queue<Made>, outliving_count: Gauge) -> Self {
        Self { management, queue, outliving: Mutex::default(), outliving_count }
    }

    /// Gives one object its owner; or asks for a look at each.
    pub(super) async fn reconcile(&self, made: &Made) -> Result<Next, String> {
        if *made == Made::All {
            for one in self.management.all_made() {
                self.queue.push(one);
            }
            return Ok(Next::Wait);
        }
        let fate = self.management.keep_owner(made).await.map_err(|error| error.to_string())?;
        self.count(made, fate == Fate::Outlives);
        Ok(Next::Wait)
    }

    fn count(&self, made: &Made, outlives: bool) {
        let mut outliving = self.outliving.lock().unwrap_or_else(PoisonError::into_inner);
        if outlives {
            outliving.insert(made.clone());
        } else {
            outliving.remove(made);
        }
        self.outliving_count.set(i64::try_from(outliving.len()).unwrap_or(i64::MAX));
    }
}
