//! Concurrency limiter per VM for attach and detach calls to the storage infra. A VM that hangs blocks only its own calls.

use kube_kit::fair::{FairLimiter, Limits, Permit};
use kube_kit::informer::Key;

/// Maximum number of concurrent attach calls, and of concurrent detach calls, per VM.
pub(super) const PER_VM: usize = 16;

/// Maximum number of concurrent calls for all VMs: well under the 4096 that storage-infra accepts on one connection, which
/// leaves capacity for its event stream and the reachability probe. A namespace can use half of them.
const TOTAL: usize = 2048;

/// Kind of call. Attach and detach calls do not wait for each other: one often unblocks the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Operation {
    Attach,
    Detach,
}

/// Limits of all VMs. Waiters are served first in, first out; a VM without calls takes no memory.
#[derive(Debug, Clone)]
pub(super) struct VmLimiter(FairLimiter);

impl Default for VmLimiter {
    fn default() -> Self {
        Self(FairLimiter::new(Limits { total: TOTAL, namespace: TOTAL / 2, object: PER_VM }))
    }
}

/// Permission for one call, released on drop.
#[derive(Debug)]
pub(super) struct Slot {
    operation: Operation,
    _permit: Permit,
}

impl VmLimiter {
    /// Waits until a call for the VM with this node UUID may start. Dropping the future gives up the place.
    pub(super) async fn acquire(&self, namespace: &str, node: &str, operation: Operation) -> Slot {
        let key = Key::new(namespace, format!("{node} {operation:?}"));
        Slot { operation, _permit: self.0.acquire(&key).await }
    }
}

impl Slot {
    /// Kind of call.
    pub(super) fn operation(&self) -> Operation {
        self.operation
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use futures::poll;
    use tokio::task::yield_now;

    use super::*;

    const NAMESPACE: &str = "guest";

    async fn fill(limiter: &VmLimiter, vm: &str) -> Vec<Slot> {
        join_all((0..PER_VM).map(|_| limiter.acquire(NAMESPACE, vm, Operation::Attach))).await
    }

    #[tokio::test]
    async fn a_vm_that_hangs_blocks_only_its_own_attaches() {
        let limiter = VmLimiter::default();
        let held = fill(&limiter, "a").await;
        let mut waiting = Box::pin(limiter.acquire(NAMESPACE, "a", Operation::Attach));
        assert!(poll!(&mut waiting).is_pending());
        let others = (
            limiter.acquire(NAMESPACE, "b", Operation::Attach).await,
            limiter.acquire(NAMESPACE, "a", Operation::Detach).await,
        );
        assert_eq!((others.0.operation(), others.1.operation()), (Operation::Attach, Operation::Detach));
        drop(held);
        assert!(poll!(&mut waiting).is_ready());
        drop((waiting, others));
        assert!(limiter.0.is_idle());
    }

    #[tokio::test]
    async fn calls_are_limited_per_namespace_and_in_total_without_counting_waiters() {
        let limiter = VmLimiter::default();
        let (mut held, mut waiters) = (Vec::new(), Vec::new());
        for number in 0..TOTAL / PER_VM {
            let namespace = ["one", "two"][number % 2];
            let vm = number.to_string();
            for _ in 0..PER_VM {
                held.push(limiter.acquire(namespace, &vm, Operation::Attach).await);
            }
            let (limiter, vm) = (limiter.clone(), vm.clone());
            let mut waiting =
                Box::pin(async move { limiter.acquire(namespace, &vm, Operation::Attach).await });
            assert!(poll!(&mut waiting).is_pending());
            waiters.push(waiting);
            // tokio's cooperative budget would make further polls return pending.
            yield_now().await;
        }
        let mut same = Box::pin(limiter.acquire("one", "other", Operation::Attach));
        let mut other = Box::pin(limiter.acquire("three", "other", Operation::Attach));
        assert!(poll!(&mut same).is_pending() && poll!(&mut other).is_pending());
        // A waiter of the second namespace, whose VMs are all at their limits.
        drop(waiters.remove(TOTAL / PER_VM - 1));
        held.pop();
        assert!(poll!(&mut same).is_pending(), "its namespace is at its limit");
        assert!(poll!(&mut other).is_ready());
        drop((same, other, waiters, held));
        assert!(limiter.0.is_idle());
    }

    #[tokio::test]
    async fn waiters_are_served_in_order_and_dropped_ones_are_skipped() {
        let limiter = VmLimiter::default();
        let mut held = fill(&limiter, "a").await;
        let mut waiters: Vec<_> =
            (0..3).map(|_| Box::pin(limiter.acquire(NAMESPACE, "a", Operation::Attach))).collect();
        for one in &mut waiters {
            assert!(poll!(one).is_pending());
        }
        drop(waiters.remove(0));
        held.pop();
        assert!(poll!(&mut waiters[1]).is_pending());
        let first = poll!(&mut waiters[0]);
        assert!(first.is_ready());
        drop(first);
        assert!(poll!(&mut waiters[1]).is_ready());
        drop((waiters, held));
        assert!(limiter.0.is_idle());
    }
}
