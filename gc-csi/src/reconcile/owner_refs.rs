//! Reconciler of ownerReferences from the guest's objects to its Cluster object.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use kube_kit::queue::{NextAction, Queue};
use prometheus_client::metrics::gauge::Gauge;

use crate::management::{DeletionOutcome, OwnedObject, OwnerRefs};

/// Keeps ownerReferences as the policy requires.
pub(super) struct OwnerRefReconciler {
    owner_refs: OwnerRefs,
    queue: Queue<OwnedObject>,
    outliving: Mutex<HashSet<OwnedObject>>,
    outliving_count: Gauge,
}

impl OwnerRefReconciler {
    /// `outliving_count` is set to the number of objects that stay although the policy is Delete.
    pub(super) fn new(owner_refs: OwnerRefs, queue: Queue<OwnedObject>, outliving_count: Gauge) -> Self {
        Self { owner_refs, queue, outliving: Mutex::default(), outliving_count }
    }

    /// Updates the ownerReference of one object, or queues all objects.
    pub(super) async fn reconcile(&self, object: &OwnedObject) -> Result<NextAction, String> {
        if *object == OwnedObject::All {
            for one in self.owner_refs.objects() {
                self.queue.push(one);
            }
            return Ok(NextAction::AwaitChange);
        }
        let outcome = self.owner_refs.reconcile(object).await.map_err(|error| error.to_string())?;
        self.count(object, outcome == DeletionOutcome::OutlivesGuest);
        Ok(NextAction::AwaitChange)
    }

    fn count(&self, object: &OwnedObject, outlives: bool) {
        let mut outliving = self.outliving.lock().unwrap_or_else(PoisonError::into_inner);
        if outlives {
            outliving.insert(object.clone());
        } else {
            outliving.remove(object);
        }
        self.outliving_count.set(i64::try_from(outliving.len()).unwrap_or(i64::MAX));
    }
}
