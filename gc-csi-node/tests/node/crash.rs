//! Crash test: the driver is killed before and after each change to the node, and while each command runs, and is then
//! restarted. When kubelet has repeated its calls, everything is mounted exactly once, and all written data is there.
//!
//! The cases are the fail points that an undisturbed volume lifecycle passes, so a new change has cases automatically. In
//! each further lifecycle, the driver dies once in every call that has cases left.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use csi::proto::volume_capability::access_mode::Mode;
use tonic::Status;

use crate::expansion::ext4_expands_online;
use crate::test_node::{Disk, TestNode, block, filesystem};

/// Time limit for a repeated call.
const TIME_LIMIT: Duration = Duration::from_secs(120);
/// Data that a pod writes.
static KEPT: [u8; 64 << 10] = [b'k'; 64 << 10];
/// Delay before a call is repeated.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// A call of kubelet, in the order of a volume's lifecycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Call {
    Stage,
    Publish,
    PublishReadOnly,
    Expand,
    UnpublishReadOnly,
    Unpublish,
    Unstage,
    StageAgain,
    UnstageAgain,
}

use Call::{
    Expand, Publish, PublishReadOnly, Stage, StageAgain, Unpublish, UnpublishReadOnly, Unstage, UnstageAgain,
};

const LIFECYCLE: [Call; 9] = [
    Stage,
    Publish,
    PublishReadOnly,
    Expand,
    UnpublishReadOnly,
    Unpublish,
    Unstage,
    StageAgain,
    UnstageAgain,
];

/// A fail point, and which pass of it, from 1.
type FailPoint = (String, usize);

/// A volume in its lifecycle.
struct Lifecycle<'a> {
    node: &'a mut TestNode,
    disk: Disk,
    /// None for a block volume.
    fs_type: Option<&'static str>,
    mib: u64,
}

#[tokio::test]
async fn an_ext4_volume_survives_crashes_at_every_fail_point() {
    completes_lifecycle(Some("ext4"), 16).await;
}

#[tokio::test]
async fn an_xfs_volume_survives_crashes_at_every_fail_point() {
    completes_lifecycle(Some("xfs"), 320).await;
}

#[tokio::test]
async fn a_btrfs_volume_survives_crashes_at_every_fail_point() {
    completes_lifecycle(Some("btrfs"), 128).await;
}

#[tokio::test]
async fn a_block_volume_survives_crashes_at_every_fail_point() {
    completes_lifecycle(None, 8).await;
}

async fn completes_lifecycle(fs_type: Option<&'static str>, mib: u64) {
    let mut node = TestNode::start().await;
    let is_possible = |call: &Call| *call != Expand || fs_type != Some("ext4") || ext4_expands_online();
    let calls: Vec<Call> = LIFECYCLE.into_iter().filter(is_possible).collect();
    let mut lifecycle = Lifecycle::begin(&mut node, fs_type, mib);
    let mut cases = Vec::new();
    for call in calls.iter().copied() {
        std::fs::write(lifecycle.file("passed"), "").unwrap();
        lifecycle.repeat_until_done(call, None).await;
        lifecycle.check(call, None);
        let passed = std::fs::read_to_string(lifecycle.file("passed")).unwrap();
        std::fs::remove_file(lifecycle.file("passed")).unwrap();
        cases.push(fail_points(&passed));
    }
    lifecycle.end();
    let (points, total) = (
        cases.iter().flatten().map(|(point, _)| point).collect::<BTreeSet<_>>().len(),
        cases.iter().map(Vec::len).sum::<usize>(),
    );
    assert!(points > 0, "the driver has no fail points: is it built with debug assertions?");
    let started = Instant::now();
    let mut cases: Vec<_> = cases.into_iter().map(Vec::into_iter).collect();
    while cases.iter().any(|left| left.len() > 0) {
        let mut lifecycle = Lifecycle::begin(&mut node, fs_type, mib);
        for (call, left) in calls.iter().copied().zip(&mut cases) {
            let point = left.next();
            lifecycle.repeat_until_done(call, point.as_ref()).await;
            lifecycle.check(call, point.as_ref());
        }
        lifecycle.end();
    }
    eprintln!(
        "{total} crashes at {points} points in {} calls for a volume with {}: {:.0} s",
        calls.len(),
        fs_type.unwrap_or("no filesystem"),
        started.elapsed().as_secs_f64()
    );
}

/// Numbers the passes of each fail point.
fn fail_points(passed: &str) -> Vec<FailPoint> {
    let mut counts = BTreeMap::new();
    let count = |point: &str| {
        let count = counts.entry(point.to_owned()).or_insert(0);
        *count += 1;
        (point.to_owned(), *count)
    };
    passed.lines().map(count).collect()
}

impl<'a> Lifecycle<'a> {
    fn begin(node: &'a mut TestNode, fs_type: Option<&'static str>, mib: u64) -> Self {
        let disk = node.disk(mib);
        Self { node, disk, fs_type, mib }
    }

    fn end(self) {
        self.node.detach(&self.disk);
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        self.node.path("fail-points").join(name)
    }

    async fn take(&self, call: Call) -> Result<(), Status> {
        let Self { node, disk, .. } = self;
        let capability = || match self.fs_type {
            Some(fs_type) => filesystem(fs_type, Mode::SingleNodeMultiWriter),
            None => block(Mode::SingleNodeMultiWriter),
        };
        match call {
            Stage | StageAgain => node.stage(disk, capability()).await,
            Publish => node.publish(disk, "one", capability(), false).await.map(drop),
            PublishReadOnly => node.publish(disk, "two", capability(), true).await.map(drop),
            Expand => {
                node.resize(disk, 2 * self.mib);
                let size = node.expand(disk, &node.target(disk, "one"), 2 * self.mib).await?;
                assert_eq!(size, i64::try_from((2 * self.mib) << 20).unwrap());
                Ok(())
            }
            UnpublishReadOnly => node.unpublish(disk, "two").await,
            Unpublish => node.unpublish(disk, "one").await,
            Unstage | UnstageAgain => node.unstage(disk).await,
        }
    }

    /// Repeats a call until it succeeds, as kubelet does. If `point` is given, the driver dies there once.
    async fn repeat_until_done(&mut self, call: Call, point: Option<&FailPoint>) {
        let armed = self.file("armed");
        if let Some((point, count)) = point {
            std::fs::write(&armed, format!("{point} {count}")).unwrap();
        }
        let (deadline, mut died) = (Instant::now() + TIME_LIMIT, false);
        loop {
            let outcome = self.take(call).await;
            if point.is_some() && !died && !armed.exists() {
                assert_eq!(self.node.wait_for_driver().await, None, "{call:?}: the driver was not killed");
                self.node.start_driver(None).await;
                died = true;
            }
            match outcome {
                Ok(()) => break,
                Err(status) => assert!(Instant::now() < deadline, "{call:?}, {point:?}: {status}"),
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
        assert!(point.is_none() || died, "{call:?}: {point:?} was not passed again");
    }

    /// Checks that all mounts expected after this call exist exactly once.
    fn check(&self, call: Call, point: Option<&FailPoint>) {
        let (after, is_filesystem) =
            (|first: Call, last: Call| first <= call && call < last, self.fs_type.is_some());
        let [one, two] = ["one", "two"].map(|pod| self.node.target(&self.disk, pod));
        let is_staged = is_filesystem && (after(Stage, Unstage) || after(StageAgain, UnstageAgain));
        for (path, is_there) in [
            (self.node.staging(&self.disk), is_staged),
            (one.clone(), after(Publish, Unpublish)),
            (two.clone(), after(PublishReadOnly, UnpublishReadOnly)),
        ] {
            let mounts = self.node.mounts_at(&path);
            assert_eq!(
                mounts.len(),
                usize::from(is_there),
                "{call:?}, {point:?}: {}: {mounts:?}",
                path.display()
            );
        }
        assert_eq!(one.exists(), after(Publish, Unpublish), "{call:?}, {point:?}");
        assert_eq!(two.exists(), after(PublishReadOnly, UnpublishReadOnly), "{call:?}, {point:?}");
        let kept = |path: &Path| if is_filesystem { path.join("kept") } else { path.to_owned() };
        if call == Publish {
            let mut file =
                std::fs::File::options().create(is_filesystem).write(true).open(kept(&one)).unwrap();
            file.write_all(&KEPT).unwrap();
            file.sync_all().unwrap();
        }
        let shown = match call {
            PublishReadOnly | Expand => kept(&two),
            StageAgain if is_filesystem => kept(&self.node.staging(&self.disk)),
            UnstageAgain if !is_filesystem => self.disk.image.clone(),
            _ => return,
        };
        let mut found = [0; KEPT.len()];
        std::fs::File::open(shown).unwrap().read_exact(&mut found).unwrap();
        assert!(found == KEPT, "{call:?}, {point:?}: the written data is missing");
        if call == PublishReadOnly && is_filesystem {
            assert!(std::fs::write(kept(&two), "x").is_err(), "{point:?}: a read-only target was written to");
        }
    }
}
