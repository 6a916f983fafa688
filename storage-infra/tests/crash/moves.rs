//! Moves of attached disks, with crashes of the server while it recovers from a crash in a move.

use uuid::Uuid;

use super::drive::{Step, sample, steps};
use super::{cases, failures, seed};
use crate::moves::{At, check_moved, clear, move_attached, to};
use crate::support::*;

/// A domain, and a server that moves its disks.
struct Mover {
    at: At,
    rounds: usize,
}

/// A volume that is moved.
struct Moved {
    id: String,
    disk: Uuid,
}

impl Mover {
    async fn new() -> Self {
        Self { at: At::new().await, rounds: 0 }
    }

    async fn prepare(&mut self) -> Moved {
        let id = format!("v{}", self.rounds);
        self.rounds += 1;
        let disk = self.at.create(&id).await.disk_uuid;
        self.at.attach(&id, &id).await;
        Moved { id, disk }
    }

    async fn finish(&self, moved: Moved) {
        check_moved(&self.at, &moved.id, moved.disk).await;
        clear(&self.at, &moved.id).await;
    }

    async fn record(&mut self) -> Vec<Step> {
        let moved = self.prepare().await;
        self.at.site.record_fail_points();
        move_attached(&self.at, &moved.id, moved.disk).await.unwrap();
        let passed = self.at.site.passed_fail_points();
        self.finish(moved).await;
        steps(&passed)
    }

    async fn crash_at(&mut self, step: &Step) -> Moved {
        let moved = self.prepare().await;
        self.at.site.arm(&step.point, step.time);
        // The move may be complete before the crash.
        let _ = move_attached(&self.at, &moved.id, moved.disk).await;
        self.at.server.wait_for_crash().await;
        moved
    }

    /// Requests the move until it is complete. False if the server crashes before.
    async fn repeat(&mut self, moved: &Moved) -> bool {
        let Self { at, .. } = self;
        until("the move is complete, or the server crashes", async || {
            at.server.has_crashed()
                || at
                    .start(&moved.id, &to("far", None))
                    .await
                    .is_ok_and(|volume| volume.pool.as_str() == "far" && volume.moving.is_none())
        })
        .await;
        !at.server.has_crashed()
    }

    /// Starts the server, and goes on with the move. False if the server crashes before it is complete.
    async fn recover(&mut self, moved: &Moved) -> bool {
        let Some(server) = self.at.site.try_start() else { return false };
        self.at.server = server;
        self.repeat(moved).await
    }

    /// Crashes at a step. Returns the number of points that the recovery passes.
    async fn crash(&mut self, step: &Step) -> usize {
        println!("at {step:?}");
        let moved = self.crash_at(step).await;
        self.at.site.record_fail_points();
        assert!(self.recover(&moved).await, "it crashed once more");
        let passed = self.at.site.passed_fail_points().len();
        self.finish(moved).await;
        passed
    }

    /// Crashes at a step, and again at the n-th pass of a point in the recovery, if that passes it so often.
    async fn crash_twice(&mut self, step: &Step, point: &str, time: usize) -> bool {
        println!("at {step:?}, and at pass {time} of {point} in the recovery");
        let moved = self.crash_at(step).await;
        self.at.site.arm(point, time);
        let mut recovered = self.recover(&moved).await;
        let crashed = !self.at.site.disarm();
        if crashed {
            // Perhaps after all was done.
            if recovered {
                self.at.server.wait_for_crash().await;
            }
            recovered = self.recover(&moved).await;
        }
        assert!(recovered);
        self.finish(moved).await;
        crashed
    }

    async fn fail(&mut self, write: &Step, how: &str) {
        let point = format!("{}.{how}", write.point);
        println!("an error of {point}, pass {}", write.time);
        let moved = self.prepare().await;
        self.at.site.fail(&point, write.time);
        let first = move_attached(&self.at, &moved.id, moved.disk).await;
        assert!(self.repeat(&moved).await, "it crashed");
        assert!(!self.at.site.still_fails(), "{point} was not passed; the request ended with {first:?}");
        self.finish(moved).await;
    }
}

#[tokio::test]
async fn a_vm_is_not_left_paused_after_crashes_before_the_switch_and_before_the_vm_goes_on() {
    let mut mover = Mover::new().await;
    for first in ["hypervisor.pivot.before", "hypervisor.pivot.after"] {
        for second in ["hypervisor.unpause.before", "hypervisor.unpause.after"] {
            mover.crash_twice(&Step { point: first.to_owned(), time: 1 }, second, 1).await;
        }
    }
}

#[tokio::test]
async fn an_attached_volume_has_one_file_after_two_crashes_in_its_move() {
    let mut mover = Mover::new().await;
    let all = mover.record().await;
    for step in sample(all, cases(), seed()) {
        let passed = mover.crash(&step).await;
        for number in sample((1..=passed).collect(), cases().div_ceil(4), seed()) {
            mover.crash_twice(&step, "*", number).await;
        }
    }
}

#[tokio::test]
async fn an_attached_volume_has_one_file_after_a_write_of_its_move_failed() {
    let mut mover = Mover::new().await;
    let all = mover.record().await;
    for (write, how) in sample(failures(&all), cases(), seed()) {
        mover.fail(&write, how).await;
    }
}
