//! Turns at a machine: how many calls that change its disks wait for the infra at once. A machine that hangs holds up
//! its own line, and no other's.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How many plugs, and how many unplugs, are under way at once for one machine.
pub(super) const AT_ONCE: usize = 16;

/// How many calls are under way at once for all machines: well under the 4096 that the infra takes on one connection,
/// so that there is room for its events and for what finds out whether it is there.
const IN_ALL: usize = 2048;

/// What a turn is for. Plugs and unplugs don't wait for each other: the one is often what ends the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Work {
    Plug,
    Unplug,
}

/// The lines of all machines, each served in the order in which it was joined. Only those that somebody is in are kept.
#[derive(Debug, Clone)]
pub(super) struct Turns {
    lines: Arc<Mutex<HashMap<Place, Arc<Semaphore>>>>,
    in_all: Arc<Semaphore>,
}

impl Default for Turns {
    fn default() -> Self {
        Self { lines: Arc::default(), in_all: Arc::new(Semaphore::new(IN_ALL)) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Place {
    machine: String,
    work: Work,
}

/// A place in a line. The last one clears the line away.
#[derive(Debug)]
struct Line {
    turns: Turns,
    place: Place,
    free: Arc<Semaphore>,
}

/// One's turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    // Before the line, so that they are given back by the time that is left.
    _permits: [OwnedSemaphorePermit; 2],
    line: Line,
}

impl Turns {
    /// Waits for a turn at `machine`. Whoever stops waiting has left the line.
    pub(super) async fn take(&self, machine: &str, work: Work) -> Turn {
        let line = self.line(Place { machine: machine.to_owned(), work });
        // Its own line first: what waits at one machine takes no room from the others.
        let own = line.free.clone().acquire_owned().await.expect("a line is never closed");
        let shared = self.in_all.clone().acquire_owned().await.expect("nor is this");
        Turn { _permits: [own, shared], line }
    }

    fn line(&self, place: Place) -> Line {
        let new = || Arc::new(Semaphore::new(AT_ONCE));
        let free = self.all().entry(place.clone()).or_insert_with(new).clone();
        Line { turns: self.clone(), place, free }
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Place, Arc<Semaphore>>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    /// What it is for.
    pub(super) fn work(&self) -> Work {
        self.line.place.work
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let mut all = self.turns.all();
        // Two counts: the table's and this one's.
        if Arc::strong_count(&self.free) <= 2 {
            all.remove(&self.place);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use futures::poll;
    use tokio::task::yield_now;

    use super::*;

    async fn full(turns: &Turns, machine: &str) -> Vec<Turn> {
        join_all((0..AT_ONCE).map(|_| turns.take(machine, Work::Plug))).await
    }

    #[tokio::test]
    async fn a_machine_that_hangs_holds_up_its_own_plugs_alone() {
        let turns = Turns::default();
        let held = full(&turns, "a").await;
        let mut waiting = Box::pin(turns.take("a", Work::Plug));
        assert!(poll!(&mut waiting).is_pending());
        let others = (turns.take("b", Work::Plug).await, turns.take("a", Work::Unplug).await);
        assert_eq!((others.0.work(), others.1.work()), (Work::Plug, Work::Unplug));
        drop(held);
        assert!(poll!(&mut waiting).is_ready());
        drop((waiting, others));
        assert!(turns.all().is_empty());
    }

    #[tokio::test]
    async fn all_machines_together_have_a_bound_and_what_waits_in_a_line_does_not_count() {
        let turns = Turns::default();
        let machines: Vec<String> = (0..IN_ALL / AT_ONCE).map(|machine| machine.to_string()).collect();
        let (mut held, mut lines) = (Vec::new(), Vec::new());
        for machine in &machines {
            held.extend(full(&turns, machine).await);
            let mut waiting = Box::pin(turns.take(machine, Work::Plug));
            assert!(poll!(&mut waiting).is_pending());
            lines.push(waiting);
            // What a task may do at a stretch is bounded, too.
            yield_now().await;
        }
        let mut other = Box::pin(turns.take("other", Work::Plug));
        assert!(poll!(&mut other).is_pending());
        held.pop();
        assert!(poll!(&mut other).is_ready());
        drop((other, lines, held));
        assert!(turns.all().is_empty());
    }

    #[tokio::test]
    async fn turns_come_in_order_and_who_leaves_the_line_is_passed_over() {
        let turns = Turns::default();
        let mut held = full(&turns, "a").await;
        let mut line: Vec<_> = (0..3).map(|_| Box::pin(turns.take("a", Work::Plug))).collect();
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
        assert!(turns.all().is_empty());
    }
}
