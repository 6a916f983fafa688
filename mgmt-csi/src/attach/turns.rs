//! Concurrency limiter per VM for attach and detach calls to the storage infra. A VM that hangs blocks only its own calls.

use kube_kit::fair::{Gate, Limits, Permit};
use kube_kit::informer::Key;

/// Maximum number of concurrent attach calls, and of concurrent detach calls, per VM.
pub(super) const AT_ONCE: usize = 16;

/// Maximum number of concurrent calls for all VMs: well under the 4096 that storage-infra accepts on one connection, which
/// leaves capacity for its event stream and the reachability probe. A namespace can use half of them.
const IN_ALL: usize = 2048;

/// Kind of call. Attach and detach calls do not wait for each other: one often unblocks the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Work {
    Plug,
    Unplug,
}

/// Limits of all VMs. Waiters are served first in, first out; a VM without calls takes no memory.
#[derive(Debug, Clone)]
pub(super) struct Turns(Gate);

impl Default for Turns {
    fn default() -> Self {
        Self(Gate::new(Limits { total: IN_ALL, namespace: IN_ALL / 2, object: AT_ONCE }))
    }
}

/// Permission for one call, released on drop.
#[derive(Debug)]
pub(super) struct Turn {
    work: Work,
    _permit: Permit,
}

impl Turns {
    /// Waits until a call for this VM may start. Dropping the future gives up the place.
    pub(super) async fn take(&self, namespace: &str, machine: &str, work: Work) -> Turn {
        let line = Key::new(namespace, format!("{machine} {work:?}"));
        Turn { work, _permit: self.0.enter(&line).await }
    }
}

impl Turn {
    /// Kind of call.
    pub(super) fn work(&self) -> Work {
        self.work
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use futures::poll;
    use tokio::task::yield_now;

    use super::*;

    const NAMESPACE: &str = "guest";

    async fn full(turns: &Turns, machine: &str) -> Vec<Turn> {
        join_all((0..AT_ONCE).map(|_| turns.take(NAMESPACE, machine, Work::Plug))).await
    }

    #[tokio::test]
    async fn a_vm_that_hangs_blocks_only_its_own_attaches() {
        let turns = Turns::default();
        let held = full(&turns, "a").await;
        let mut waiting = Box::pin(turns.take(NAMESPACE, "a", Work::Plug));
        assert!(poll!(&mut waiting).is_pending());
        let others =
            (turns.take(NAMESPACE, "b", Work::Plug).await, turns.take(NAMESPACE, "a", Work::Unplug).await);
        assert_eq!((others.0.work(), others.1.work()), (Work::Plug, Work::Unplug));
        drop(held);
        assert!(poll!(&mut waiting).is_ready());
        drop((waiting, others));
        assert!(turns.0.is_idle());
    }

    #[tokio::test]
    async fn calls_are_limited_per_namespace_and_in_total_without_counting_waiters() {
        let turns = Turns::default();
        let (mut held, mut lines) = (Vec::new(), Vec::new());
        for number in 0..IN_ALL / AT_ONCE {
            let namespace = ["one", "two"][number % 2];
            let machine = number.to_string();
            for _ in 0..AT_ONCE {
                held.push(turns.take(namespace, &machine, Work::Plug).await);
            }
            let (turns, machine) = (turns.clone(), machine.clone());
            let mut waiting = Box::pin(async move { turns.take(namespace, &machine, Work::Plug).await });
            assert!(poll!(&mut waiting).is_pending());
            lines.push(waiting);
            // tokio's cooperative budget would make further polls return pending.
            yield_now().await;
        }
        let mut same = Box::pin(turns.take("one", "other", Work::Plug));
        let mut other = Box::pin(turns.take("three", "other", Work::Plug));
        assert!(poll!(&mut same).is_pending() && poll!(&mut other).is_pending());
        // A waiter of the second namespace, whose VMs are all at their limits.
        drop(lines.remove(IN_ALL / AT_ONCE - 1));
        held.pop();
        assert!(poll!(&mut same).is_pending(), "its namespace is at its limit");
        assert!(poll!(&mut other).is_ready());
        drop((same, other, lines, held));
        assert!(turns.0.is_idle());
    }

    #[tokio::test]
    async fn waiters_are_served_in_order_and_dropped_ones_are_skipped() {
        let turns = Turns::default();
        let mut held = full(&turns, "a").await;
        let mut line: Vec<_> = (0..3).map(|_| Box::pin(turns.take(NAMESPACE, "a", Work::Plug))).collect();
        for one in &mut line {
            assert!(poll!(one).is_pending());
        }
        drop(line.remove(0));
        held.pop();
        assert!(poll!(&mut line[1]).is_pending());
        let first = poll!(&mut line[0]);
        assert!(first.is_ready());
        drop(first);
        assert!(poll!(&mut line[1]).is_ready());
        drop((line, held));
        assert!(turns.0.is_idle());
    }
}
