//! Turns at a machine: how many calls that change its disks wait for the infra at once. A machine that hangs holds up
//! its own line, and no other's.

use kube_kit::fair::{Gate, Limits, Permit};
use kube_kit::informer::Key;

/// How many plugs, and how many unplugs, are under way at once for one machine.
pub(super) const AT_ONCE: usize = 16;

/// How many calls are under way at once for all machines: well under the 4096 that the infra takes on one connection,
/// so that there is room for its events and for what finds out whether it is there. One namespace has at most half of them.
const IN_ALL: usize = 2048;

/// What a turn is for. Plugs and unplugs don't wait for each other: the one is often what ends the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Work {
    Plug,
    Unplug,
}

/// The lines of all machines, each served in the order in which it was joined. Only those that somebody is in are kept.
#[derive(Debug, Clone)]
pub(super) struct Turns(Gate);

impl Default for Turns {
    fn default() -> Self {
        Self(Gate::new(Limits { total: IN_ALL, namespace: IN_ALL / 2, object: AT_ONCE }))
    }
}

/// One's turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    work: Work,
    _permit: Permit,
}

impl Turns {
    /// Waits for a turn at `machine`, of a namespace. Whoever stops waiting has left the line.
    pub(super) async fn take(&self, namespace: &str, machine: &str, work: Work) -> Turn {
        let line = Key::new(namespace, format!("{machine} {work:?}"));
        Turn { work, _permit: self.0.enter(&line).await }
    }
}

impl Turn {
    /// What it is for.
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
    async fn a_machine_that_hangs_holds_up_its_own_plugs_alone() {
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
    async fn a_namespace_and_all_together_have_a_bound_and_what_waits_in_a_line_does_not_count() {
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
            // What a task may do at a stretch is bounded, too.
            yield_now().await;
        }
        let mut same = Box::pin(turns.take("one", "other", Work::Plug));
        let mut other = Box::pin(turns.take("three", "other", Work::Plug));
        assert!(poll!(&mut same).is_pending() && poll!(&mut other).is_pending());
        // One of the second namespace, which has no line but those that are full.
        drop(lines.remove(IN_ALL / AT_ONCE - 1));
        held.pop();
        assert!(poll!(&mut same).is_pending(), "its namespace has as much as it may have");
        assert!(poll!(&mut other).is_ready());
        drop((same, other, lines, held));
        assert!(turns.0.is_idle());
    }

    #[tokio::test]
    async fn turns_come_in_order_and_who_leaves_the_line_is_passed_over() {
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
